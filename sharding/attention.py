"""Exact attention in plain JAX, to put between the projections where no cache is needed."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def causal_attention(
    q: Float[Array, "*batch T heads width"],
    k: Float[Array, "*batch T kv width"],
    v: Float[Array, "*batch T kv value"],
    scale: float | None = None,
) -> Float[Array, "*batch T heads value"]:
    """Softmax attention of each token to itself and those before it, in float32.

    Args:
        q: Queries; head i uses kv head ``i // (heads / kv)``.
        k: Keys.
        v: Values.
        scale: Multiplies the scores; default 1 / sqrt(width).

    Returns:
        In the dtype of `v`.
    """
    tokens, kv = k.shape[-3], k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv, -1, q.shape[-1])
    scores = jnp.einsum(
        "...tkgd,...skd->...kgts", grouped, k, preferred_element_type=jnp.float32
    ) * jnp.float32(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = jnp.tri(tokens, dtype=bool).reshape((1,) * (scores.ndim - 2) + (tokens, tokens))
    share = jax.nn.softmax(jnp.where(seen, scores, jnp.float32(-1e30)), axis=-1)
    out = jnp.einsum("...kgts,...skd->...tkgd", share.astype(v.dtype), v)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def latent_causal_attention(
    q: Float[Array, "*batch T heads width"],
    plain: Float[Array, "*batch T heads plain"],
    shared: Float[Array, "*batch T one rope"],
    v: Float[Array, "*batch T heads value"],
    scale: float | None = None,
) -> Float[Array, "*batch T heads value"]:
    """`causal_attention` of MLA: all heads have the last dimensions of their keys in common."""
    common = jnp.broadcast_to(shared, (*plain.shape[:-1], shared.shape[-1]))
    return causal_attention(q, jnp.concatenate((plain, common), axis=-1), v, scale)
