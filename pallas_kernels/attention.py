"""Attention over keys and values given as plain arrays: the reference for every paged form."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mask(
    queries: Int[Array, " T"], keys: Int[Array, " S"], window: int | None
) -> Bool[Array, "T S"]:
    """True where a query may see a key: not ahead of it, and less than ``window`` tokens behind.

    Args:
        queries: Positions of the queries.
        keys: Positions of the keys.
        window: Tokens that a query sees, itself included; None for all.
    """
    ahead = queries[:, None] - keys[None, :]
    allowed = ahead >= 0
    return allowed if window is None else allowed & (ahead < window)


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Grouped-query attention with an explicit mask.

    Args:
        q: Queries; head n reads kv head n // (N / K).
        k: Keys.
        v: Values.
        mask: True where a query may see a key. A query that sees none yields zeros, so that empty
            slots and padding never become NaN.
        scale: Multiplies the scores (usually H ** -0.5; some models use 1).
        soft_cap: If given, scores become ``soft_cap * tanh(scores / soft_cap)`` before the mask.

    Returns:
        Weighted values in q's dtype; scores and softmax are float32.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(scale)
    if soft_cap is not None:
        scores = jnp.float32(soft_cap) * jnp.tanh(scores / jnp.float32(soft_cap))
    seen = mask[:, None, None, :, :]
    scores = jnp.where(seen, scores, jnp.float32(-1e30))
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype)
