"""Mixture-of-experts layers: a router, and experts as arrays or as pages of the memory."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import on_gpu
from pw_jax.errors import UserError
from pw_jax.models.config import ExpertShape, ModelConfig
from pw_jax.models.layers import ACTIVATIONS, GatedMlp, Linear
from pw_jax.models.memory import ExpertMemory, Memory

ExpertStore = Literal["dense", "paged"]

KERNEL_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""How `pallas_kernels.paged_expert_ffn` calls the activations that it knows."""


class Router(nnx.Module):
    """Softmax over all experts in float32, then the exact top k.

    Args:
        shape: Experts to choose from.
        renormalize: Divide the chosen weights by their sum (Mixtral does, Qwen1.5-MoE does not).
        dtype: Of the weight.
    """

    def __init__(self, shape: ExpertShape, *, renormalize: bool, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((shape.experts, shape.embed), dtype))
        self.top_k = shape.top_k
        self.renormalize = renormalize

    def __call__(self, x: Float[Array, "M D"]) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
        """Chooses experts.

        Returns:
            Expert ids int32 and their weights float32, the largest first.
        """
        logits = jnp.einsum("md,ed->me", x, self.weight[...])
        weights, expert_ids = jax.lax.top_k(
            jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.top_k
        )
        if self.renormalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return expert_ids, weights


class DenseExperts(nnx.Module):
    """Experts as two arrays: gate_up_proj [E, 2F, D] (gate rows first) and down_proj [E, D, F]."""

    def __init__(self, shape: ExpertShape, *, dtype: DTypeLike):
        self.gate_up_proj = nnx.Param(jnp.zeros((shape.experts, 2 * shape.ffn, shape.embed), dtype))
        self.down_proj = nnx.Param(jnp.zeros((shape.experts, shape.embed, shape.ffn), dtype))
        self.activation = shape.activation

    def __call__(
        self,
        x: Float[Array, "M D"],
        expert_ids: Int[Array, "M k"],
        weights: Float[Array, "M k"],
        memory: Memory,
        moe_index: int,
    ) -> Float[Array, "M D"]:
        """Weighted float32 sum of the chosen experts; the memory is not used."""
        del memory, moe_index
        arrays = self.gate_up_proj[...], self.down_proj[...]
        return dense_expert_ffn(x, expert_ids, weights, *arrays, self.activation)


def dense_expert_ffn(
    x: Float[Array, "M D"],
    expert_ids: Int[Array, "M k"],
    weights: Float[Array, "M k"],
    gate_up_proj: Float[Array, "E rows D"],
    down_proj: Float[Array, "E D F"],
    activation: str,
) -> Float[Array, "M D"]:
    """Weighted float32 sum of the chosen experts, or of a part of their hidden units.

    Args:
        x: Tokens.
        expert_ids: Chosen experts.
        weights: Their weights, float32.
        gate_up_proj: Gate rows, then up rows.
        down_proj: From the same hidden units.
        activation: Key of `ACTIVATIONS`.
    """
    # Fewer choices than experts: read the chosen ones only. Else nearly all are chosen by some
    # token, and every expert sees every token: as many bytes, and sums that a GPU does not wait
    # for. On two CPU cores, 8 experts of 128 and top 4, the whole product takes 0.4 ms for 4 tokens
    # and 6 to 16 ms for 512; sorting plus `jax.lax.ragged_dot` 1.2 and 33 ms or more.
    few = expert_ids.size < gate_up_proj.shape[0] and on_gpu()
    product = chosen_experts if few else all_experts
    return product(x, expert_ids, weights, gate_up_proj, down_proj, activation)


def all_experts(
    x: Float[Array, "M D"],
    expert_ids: Int[Array, "M k"],
    weights: Float[Array, "M k"],
    gate_up_proj: Float[Array, "E rows D"],
    down_proj: Float[Array, "E D F"],
    activation: str,
) -> Float[Array, "M D"]:
    """Multiplies all experts; those that a token did not choose get weight zero."""
    gate_up = jnp.einsum("md,efd->emf", x, gate_up_proj)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    hidden = ACTIVATIONS[activation](gate) * up
    out = jnp.einsum("emf,edf->emd", hidden, down_proj)
    spread = spread_weights(expert_ids, weights, out.shape[0])
    return jnp.einsum("emd,me->md", out.astype(jnp.float32), spread)


def chosen_experts(
    x: Float[Array, "M D"],
    expert_ids: Int[Array, "M k"],
    weights: Float[Array, "M k"],
    gate_up_proj: Float[Array, "E rows D"],
    down_proj: Float[Array, "E D F"],
    activation: str,
) -> Float[Array, "M D"]:
    """Multiplies each choice with its own expert.

    Sums of products, not a matrix product: XLA reads the experts inside the sum, where it would
    copy them out first for a matrix product.
    """

    def product(inputs: Float[Array, "#M #k K"], matrices: Float[Array, "E N K"]):
        terms = matrices[expert_ids].astype(jnp.float32) * inputs[:, :, None].astype(jnp.float32)
        return terms.sum(axis=-1).astype(inputs.dtype)

    gate, up = jnp.split(product(x[:, None], gate_up_proj), 2, axis=-1)
    out = product(ACTIVATIONS[activation](gate) * up, down_proj)
    return (out.astype(jnp.float32) * weights[..., None]).sum(axis=1)


class PagedExperts(nnx.Module):
    """Experts that live in pages; has no arrays of its own."""

    def __init__(self, shape: ExpertShape):
        if shape.activation not in KERNEL_ACTIVATIONS:
            known = ", ".join(sorted(KERNEL_ACTIVATIONS))
            raise UserError(f"paged experts have no activation {shape.activation!r}, only {known}")
        self.activation = KERNEL_ACTIVATIONS[shape.activation]

    def __call__(
        self,
        x: Float[Array, "M D"],
        expert_ids: Int[Array, "M k"],
        weights: Float[Array, "M k"],
        memory: Memory,
        moe_index: int,
    ) -> Float[Array, "M D"]:
        """Weighted float32 sum of the chosen experts.

        Raises:
            TypeError: The memory holds no experts.
        """
        if not isinstance(memory, ExpertMemory):
            raise TypeError(f"paged experts need a memory with pages, got {type(memory).__name__}")
        return memory.expert_ffn(moe_index, x, expert_ids, weights, self.activation)


def make_experts(
    shape: ExpertShape, store: ExpertStore, *, dtype: DTypeLike
) -> DenseExperts | PagedExperts:
    """Experts of either kind."""
    return DenseExperts(shape, dtype=dtype) if store == "dense" else PagedExperts(shape)


class SparseMoe(nnx.Module):
    """Router and experts, with an optional gated expert that every token uses.

    Args:
        config: The model; must have routed experts.
        layer: Index of the layer, one of ``config.moe_layers``.
        experts: Where the experts' weights are.
        dtype: Of the weights.
    """

    def __init__(self, config: ModelConfig, layer: int, *, experts: ExpertStore, dtype: DTypeLike):
        shape = config.expert_shape
        if shape is None:
            raise ValueError("a model without routed experts has no SparseMoe layers")
        self.gate = Router(shape, renormalize=config.renormalize, dtype=dtype)
        self.experts = make_experts(shape, experts, dtype=dtype)
        self.has_shared_expert = config.shared_expert_ffn is not None
        if config.shared_expert_ffn is not None:
            self.shared_expert = GatedMlp(
                shape.embed, config.shared_expert_ffn, shape.activation, dtype=dtype
            )
            self.shared_expert_gate = Linear(shape.embed, 1, dtype=dtype)
        self.moe_index = config.moe_layers.index(layer)
        self.num_experts = shape.experts

    def __call__(
        self, x: Float[Array, "B T D"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Float[Array, " E"]]:
        """Routes every token.

        Returns:
            What to add to the residual, and the routing mass of each expert: the sum over real
            tokens of the weight that the expert was given.
        """
        flat = x.reshape(-1, x.shape[-1])
        expert_ids, weights = self.gate(flat)
        out = self.experts(flat, expert_ids, weights, memory, self.moe_index).astype(x.dtype)
        if self.has_shared_expert:
            out = out + jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        mass = routing_mass(expert_ids, weights, memory.token_mask.reshape(-1), self.num_experts)
        return out.reshape(x.shape), mass


def spread_weights(
    expert_ids: Int[Array, "M k"], weights: Float[Array, "M k"], experts: int
) -> Float[Array, "M E"]:
    """Weight of every expert for every token, zero where it was not chosen."""
    # Not a scatter: on a GPU its additions come in any order, and results would vary.
    chosen = jax.nn.one_hot(expert_ids, experts, dtype=weights.dtype)
    return (chosen * weights[..., None]).sum(axis=1)


def routing_mass(
    expert_ids: Int[Array, "M k"],
    weights: Float[Array, "M k"],
    token_mask: Bool[Array, " M"],
    experts: int,
) -> Float[Array, " E"]:
    """Sum of each expert's weights over real tokens."""
    real = jnp.where(token_mask[:, None], weights, jnp.zeros_like(weights))
    return spread_weights(expert_ids, real, experts).sum(axis=0)
