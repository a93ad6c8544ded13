"""What a forward pass reads and writes besides weights: keys, values and, with pages, experts."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import causal_mask, masked_attention
from pw_jax.models.latent import Latents


@runtime_checkable
class Memory(Protocol):
    """The only door between a model and its caches. A pytree; every call returns the new one."""

    @property
    def token_mask(self) -> Bool[Array, "B T"]:
        """True for real tokens, False for padding."""
        ...

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K Hv"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "B T N Hv"], "Memory"]:
        """Stores k and v of the new tokens and attends to all that each query may see."""
        ...

    def attend_latents(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        latents: Latents,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B T N Hv"], "Memory"]:
        """The same for keys and values that come from latents; what is stored is its choice."""
        ...


@runtime_checkable
class ExpertMemory(Memory, Protocol):
    """A memory that also holds the routed experts."""

    def expert_ffn(
        self,
        moe_index: int,
        x: Float[Array, "M D"],
        expert_ids: Int[Array, "M k"],
        weights: Float[Array, "M k"],
        activation: str,
    ) -> Float[Array, "M D"]:
        """Weighted float32 sum of the chosen experts of the moe_index-th MoE layer."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceMemory:
    """Whole sequences at once and no cache: causal over the T tokens given.

    Attributes:
        token_mask: bool [B, T], True for real tokens. Padding may be on the right or between; no
            token attends to it.
    """

    token_mask: Any  # not Array: tree transformations build this class of shapes as well

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K Hv"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "B T N Hv"], "SequenceMemory"]:
        """Attends within the sequences; rows of padding are computed and mean nothing."""
        del layer
        index = jnp.arange(q.shape[1])
        mask = causal_mask(index, index, window)[None] & self.token_mask[:, None, :]
        return masked_attention(q, k, v, mask, scale=scale, soft_cap=soft_cap), self

    def attend_latents(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        latents: Latents,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B T N Hv"], "SequenceMemory"]:
        """Attends to the heads that the latents make."""
        k, v = latents.heads()
        return self.attend(layer, q, k, v, scale=scale, window=window, soft_cap=None)
