"""Strict settings for every test: no silent promotion, no warnings, a few CPU devices."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
