"""The linear layers of a decoder layer as they are in a checkpoint: unpadded, on no mesh."""

from typing import Any, NamedTuple

Leaf = Any  # an array, its shape alone, or a `mesh.Placed` array


class Factors(NamedTuple):
    """``y = (x @ v) @ u + bias``.

    Attributes:
        v: [in, rank].
        u: [rank, out].
        bias: [out] or None.
    """

    v: Leaf
    u: Leaf
    bias: Leaf | None = None


class Dense(NamedTuple):
    """``y = x @ weight + bias``.

    Attributes:
        weight: [in, out].
        bias: [out] or None.
    """

    weight: Leaf
    bias: Leaf | None = None


Linear = Factors | Dense


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm where there is a bias.

    Attributes:
        weight: [width].
        bias: [width] or None.
    """

    weight: Leaf
    bias: Leaf | None = None


class AttentionWeights(NamedTuple):
    """Multi-head or grouped-query attention.

    Attributes:
        q: To heads * head_dim.
        k: To kv_heads * head_dim.
        v: To kv_heads * value_dim; None where values are the keys.
        o: From heads * value_dim.
        norm: Before all of it, if any.
    """

    q: Linear
    k: Linear
    v: Linear | None
    o: Linear
    norm: Norm | None = None


class LatentWeights(NamedTuple):
    """Latent attention (MLA), whose down projections are the v of factors already.

    Attributes:
        q: To heads * (plain_dim + rope_dim); its latent is normalised by `q_norm` if there is one.
        kv: v is [in, rank + rope_dim]; u is [rank, heads * (plain_dim + value_dim)].
        o: From heads * value_dim.
        kv_norm: Of the first `rank` columns of the kv latent.
        q_norm: Of the q latent, if any.
        q_latent_bias: Added to the q latent, if any.
        kv_latent_bias: Added to the kv latent and the shared key, if any.
        norm: Before all of it, if any.
    """

    q: Linear
    kv: Factors
    o: Linear
    kv_norm: Norm
    q_norm: Norm | None = None
    q_latent_bias: Leaf | None = None
    kv_latent_bias: Leaf | None = None
    norm: Norm | None = None


class MlpWeights(NamedTuple):
    """``down(activation(gate) * up)``, or ``down(activation(up))`` without a gate.

    Attributes:
        gate: To the hidden width, or None.
        up: To the hidden width.
        down: From the hidden width.
        norm: Before all of it, if any.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    norm: Norm | None = None


class ExpertWeights(NamedTuple):
    """Routed experts.

    Attributes:
        router: Called with tokens [M, D], gives expert ids and weights [M, k]; a pytree.
        shared_gate: [1, D], the gate of the expert that every token uses, or None.
        gate_up: [E, 2F, D], gate rows first; None where the memory holds the experts.
        down: [E, D, F], or None.
        norm: Before all of it.
    """

    router: Any
    shared_gate: Leaf | None
    gate_up: Leaf | None
    down: Leaf | None
    norm: Norm
