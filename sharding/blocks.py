"""Attention and MLP of a decoder layer in any layout.

A block is `prepare` (when loading: unpadded weights to `Placed` ones), and `enter` and `leave` on
a device's part of the arrays. What happens between the two is injected: see `parallel`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sharding.layouts.base import COLUMNS, PARTS, REPLICATED, Entry, Layout, Spread
from sharding.mesh import AXIS, replicated
from sharding.norms import normalize
from sharding.padding import HeadPlan, pad_axis, plan_heads
from sharding.weights import AttentionWeights, LatentWeights, Leaf, Linear, MlpWeights, Norm


def _keep(x: Leaf, axis: int) -> Leaf:
    return x


@dataclasses.dataclass(frozen=True)
class Block:
    """What the blocks share.

    Attributes:
        layout: How it lies on the devices.
        hidden: Width of the residual, without padding.
        eps: Of the norm.
    """

    layout: Layout
    hidden: int
    eps: float = 1e-6

    def normal(self, params: dict[str, Any], x: Array) -> Array:
        """The input behind the block's norm, if it has one."""
        if params["norm"] is None:
            return x
        divided = self.layout.splits_residual
        return normalize(x, params["norm"], self.eps, self.hidden, divided=divided)

    def leave(self, params: dict[str, Any], features: Array) -> Array:
        """To the residual; what is returned is to be added to it."""
        return self.layout.leave(params["exit"], features)

    def _params(self, entry: Entry, last: Linear, norm: Norm | None) -> dict[str, Any]:
        return {
            "norm": None if norm is None else self.layout.norm(norm),
            "entry": entry,
            "exit": last,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBlock(Block):
    """Multi-head and grouped-query attention.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a query or key.
        value_dim: Width of a value.
        gives_latents: Keys and values are left as latents, for a cache of those; the layout must
            have `Layout.whole_latents`, and k and v factors.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    gives_latents: bool = False

    @property
    def plan(self) -> HeadPlan:
        """Which heads each device has; all of them on all where the layout does not split them."""
        devices = self.layout.devices if self.layout.splits_features else 1
        return plan_heads(self.heads, self.kv_heads, devices)

    def prepare(self, weights: AttentionWeights) -> dict[str, Any]:
        """Pads and divides weights; the result is a tree of `Placed`."""
        plan, last = self.plan, _keep
        linears = {"q": weights.q, "k": weights.k}
        if weights.v is not None:
            linears["v"] = weights.v
        spreads: dict[str, Spread] = dict.fromkeys(linears, _keep)
        if self.layout.splits_features:
            spreads = {"q": plan.spread_queries, "k": plan.spread_kv, "v": plan.spread_kv}
            last = plan.spread_queries
        entry = self.layout.entry(linears, spreads)
        return self._params(entry, self.layout.exit(weights.o, last), weights.norm)

    def enter(self, params: dict[str, Any], x: Float[Array, "*batch d"]) -> tuple[Any, ...]:
        """Returns q, k and v [*batch, heads of the device, width], not rotated.

        Where it `gives_latents`: q, whole latents of k and v, and what makes the device's heads of
        those: by ``k`` and ``v``, the second factors [rank, heads * width] and the biases, if any.
        """
        entry = params["entry"]
        latents = self.layout.latents(entry, self.normal(params, x))
        if self.gives_latents:
            q = self.layout.expand(entry, "q", latents["q"])
            u, bias = ({n: a for n, a in own.items() if n != "q"} for own in (entry.u, entry.bias))
            return _heads(q, self.head_dim), latents["k"], latents["v"], u, bias
        features = {n: self.layout.expand(entry, n, latents[n]) for n, _ in entry.ranks}
        q, k, v = features["q"], features["k"], features.get("v", features["k"])
        return _heads(q, self.head_dim), _heads(k, self.head_dim), _heads(v, self.value_dim)

    def between(self, ndim: int) -> tuple[PartitionSpec, ...]:
        """Partitions of what `enter` gives, for x of that many axes."""
        heads = head_spec(self.layout, ndim)
        if self.gives_latents:
            return heads, REPLICATED, REPLICATED, COLUMNS, PARTS
        return (heads,) * 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentBlock(Block):
    """Latent attention (MLA).

    Attributes:
        heads: Heads.
        rank: Width of the latent of keys and values.
        plain_dim: Dimensions of a query or key without position.
        rope_dim: Dimensions that rotate; keys share theirs.
        value_dim: Dimensions of a value.
        latent_eps: Of the norms of latents.
        gives_latents: As in `AttentionBlock`.
    """

    heads: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    latent_eps: float = 1e-6
    gives_latents: bool = False

    @property
    def plan(self) -> HeadPlan:
        """Which heads each device has; all of them on all where the layout does not split them."""
        devices = self.layout.devices if self.layout.splits_features else 1
        return plan_heads(self.heads, self.heads, devices)

    def prepare(self, weights: LatentWeights) -> dict[str, Any]:
        """Pads and divides weights; the result is a tree of `Placed`."""
        spread = self.plan.spread_queries if self.layout.splits_features else _keep
        linears = {"q": weights.q, "kv": weights.kv}
        entry = self.layout.entry(linears, dict.fromkeys(linears, spread), whole=True)
        small = {
            "q_norm": weights.q_norm,
            "kv_norm": weights.kv_norm,
            "q_latent_bias": weights.q_latent_bias,
            "kv_latent_bias": weights.kv_latent_bias,
        }
        params = self._params(entry, self.layout.exit(weights.o, spread), weights.norm)
        return params | replicated(small)

    def enter(self, params: dict[str, Any], x: Float[Array, "*batch d"]) -> tuple[Array, ...]:
        """Returns q, plain keys, the key that all heads share [*batch, 1, rope_dim], and values.

        Nothing is rotated yet: not the last `rope_dim` dimensions of q, nor the shared key. Where
        it `gives_latents`: q, the shared key, the whole latent [*batch, rank], and the second
        factor of the device's plain keys and values [rank, heads * (plain_dim + value_dim)].
        """
        entry = params["entry"]
        latents = self.layout.latents(entry, self.normal(params, x), whole=True)
        q, kv = latents["q"], latents["kv"]
        if params["q_latent_bias"] is not None:
            q = q + _expand(params["q_latent_bias"], q.ndim)
        if params["kv_latent_bias"] is not None:
            kv = kv + _expand(params["kv_latent_bias"], kv.ndim)
        if params["q_norm"] is not None:
            q = normalize(q, params["q_norm"], self.latent_eps, q.shape[-1], divided=False)
        latent, shared = jnp.split(kv, (self.rank,), axis=-1)
        latent = normalize(latent, params["kv_norm"], self.latent_eps, self.rank, divided=False)
        q = self.layout.expand(entry, "q", q, whole=True)
        q = _heads(q, self.plain_dim + self.rope_dim)
        if self.gives_latents:
            return q, shared[..., None, :], latent, entry.u["kv"]
        both = self.layout.expand(entry, "kv", latent, whole=True)
        keys_values = _heads(both, self.plain_dim + self.value_dim)
        plain, value = jnp.split(keys_values, (self.plain_dim,), axis=-1)
        return q, plain, shared[..., None, :], value

    def between(self, ndim: int) -> tuple[PartitionSpec, ...]:
        """Partitions of what `enter` gives, for x of that many axes."""
        heads = head_spec(self.layout, ndim)
        if self.gives_latents:
            return heads, REPLICATED, REPLICATED, COLUMNS
        return heads, heads, REPLICATED, heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpBlock(Block):
    """An MLP, gated or not.

    Attributes:
        activation: Of the gate, or of the only layer.
    """

    activation: Callable[[Array], Array]

    def prepare(self, weights: MlpWeights) -> dict[str, Any]:
        """Pads and divides weights; the result is a tree of `Placed`."""
        linears = {} if weights.gate is None else {"gate": weights.gate}
        linears["up"] = weights.up
        spread = self._spread if self.layout.splits_features else _keep
        entry = self.layout.entry(linears, dict.fromkeys(linears, spread))
        return self._params(entry, self.layout.exit(weights.down, spread), weights.norm)

    def __call__(
        self, params: dict[str, Any], x: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        """The whole block on a device; what is returned is to be added to the residual."""
        entry = params["entry"]
        latents = self.layout.latents(entry, self.normal(params, x))
        features = {n: self.layout.expand(entry, n, latents[n]) for n, _ in entry.ranks}
        if "gate" in features:
            hidden = self.activation(features["gate"]) * features["up"]
        else:
            hidden = self.activation(features["up"])
        return self.leave(params, hidden)

    def _spread(self, x: Leaf, axis: int) -> Leaf:
        # Rows of zeros in the last layer make padding harmless whatever activation(0) is.
        return pad_axis(x, axis, self.layout.devices)


def head_spec(layout: Layout, ndim: int) -> PartitionSpec:
    """Partition of [*batch, heads, width] for x of `ndim` axes."""
    if not layout.splits_features:
        return REPLICATED
    return PartitionSpec(*(None,) * (ndim - 1), AXIS, None)


def _heads(x: Float[Array, "*batch features"], width: int) -> Float[Array, "*batch heads width"]:
    return x.reshape(*x.shape[:-1], -1, width)


def _expand(vector: Array, ndim: int) -> Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)
