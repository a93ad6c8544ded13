"""Unquantised experts: all of them against the chosen ones, at Qwen1.5-MoE's shapes."""

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
from _step_profile import profile_steps

from pw_jax.models.config import ExpertShape
from pw_jax.models.moe import all_experts, chosen_experts

SHAPE = ExpertShape(experts=60, top_k=4, embed=2048, ffn=1408, activation="silu")
TOKENS = (1, 4, 8, 14, 64, 256)
CALLS = 16
SETS = 2
"""Weights read in turn, so that none are left in the cache."""


def run(shape: ExpertShape = SHAPE, tokens: tuple[int, ...] = TOKENS) -> Iterator[dict[str, Any]]:
    """Device time of a layer's routed experts in bfloat16.

    Args:
        shape: The experts.
        tokens: Numbers of tokens; the chosen alone are timed while they are fewer than the experts.

    Yields:
        Tokens, product, microseconds a call, and the largest difference over the largest value.
    """
    keys = jax.random.split(jax.random.key(0), 2 * SETS)
    gate_up = [_normal(key, (shape.experts, 2 * shape.ffn, shape.embed)) for key in keys[:SETS]]
    down = [_normal(key, (shape.experts, shape.embed, shape.ffn)) for key in keys[SETS:]]
    for count in tokens:
        x = jax.random.normal(jax.random.key(count), (count, shape.embed), jnp.bfloat16)
        order = jax.random.uniform(jax.random.key(1), (count, shape.experts))
        ids = jnp.argsort(order, axis=1)[:, : shape.top_k].astype(jnp.int32)
        weights = jnp.full(ids.shape, 1 / shape.top_k, jnp.float32)
        reference = None
        for product in (all_experts, chosen_experts):
            if product is chosen_experts and ids.size >= shape.experts:
                continue
            call = jax.jit(partial(product, activation=shape.activation))
            out = call(x, ids, weights, gate_up[0], down[0])
            reference = out if reference is None else reference

            turns = cycle(zip(gate_up, down, strict=True))
            timed = partial(_next, partial(call, x, ids, weights), turns)
            yield {
                "tokens": count,
                "product": product.__name__,
                "us": profile_steps(timed, CALLS)["busy"],
                "error": float(jnp.abs(out - reference).max() / jnp.abs(reference).max()),
            }


def _next(call: Any, turns: Iterator[tuple[jax.Array, jax.Array]]) -> jax.Array:
    return call(*next(turns))


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)
