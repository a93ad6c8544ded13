"""Strict settings for every test: no silent promotion, no warnings, eight CPU devices.

What XLA compiled is kept in pytest's cache folder: many tests compile the same programs, in several
processes, and compiling takes most of the time.
"""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Shares compiled programs between tests, their processes and later runs."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_collection_modifyitems(items):
    """Skips what needs a GPU where there is none."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
