"""A device that computes nothing: what is left of a turn is the host's own work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pw_jax.engine.engine import Engine


def idle_device(engine: Engine) -> None:
    """Puts programs in place of an engine's that take the same arguments and give them back.

    Launching them costs the host as many arguments as before; tokens are zeros, and pages keep
    what they held.
    """
    assert engine.precision is not None
    device, mover = engine._device, engine.precision._mover
    steps = device.compiled
    assert len(steps.decode_steps) == len(steps.prefill_steps) == 1  # no latents
    state = (device.weights, device.caches, device.output, engine._expert_pages())
    logits = jnp.zeros((engine.config.slots, 1))

    def decode(weights: Any, caches: Any, output: Any, pages: Any, packed: Any) -> Any:
        return caches, output, logits

    def prefill(weights: Any, caches: Any, output: Any, pages: Any, packed: Any, _: None) -> Any:
        return caches, output, logits[:1], None

    steps.decode_steps = [_compiled(decode, 1, *state, steps.decode_arguments.vector)]
    prefilled = steps.prefill_arguments.vector
    steps.prefill_steps = [_compiled(prefill, 1, *state, prefilled, None)]
    for size, writer in mover._writers.items():
        (pool, *images), _ = writer.args_info
        mover._writers[size] = _compiled(lambda pool, *images: pool, 0, pool, *images)


def _compiled(function: Callable[..., Any], donated: int, *arguments: Any) -> Any:
    return jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments).compile()
