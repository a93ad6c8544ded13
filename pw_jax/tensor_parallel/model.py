"""A decoder over a mesh: called like the model that it was made of, and equal to it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pw_jax.errors import UserError
from pw_jax.models.config import KvShape, ModelConfig
from pw_jax.models.decoder import CausalLm, Output, cap_scores, scale_rows
from pw_jax.models.latent import LatentLayer, latent_layers
from pw_jax.models.memory import Memory
from pw_jax.models.moe import KERNEL_ACTIVATIONS, dense_expert_ffn, routing_mass
from pw_jax.models.opt import POSITION_OFFSET, Opt
from pw_jax.paging.memory import PagedMemory
from pw_jax.tensor_parallel.attend import attend
from pw_jax.tensor_parallel.weights import (
    LayerBlocks,
    LayerParts,
    Outside,
    blocks_of,
    layers_of,
    outside,
    prepare_layer,
    prepare_outside,
)
from sharding import parallel
from sharding.layouts import Layout, make_layout
from sharding.layouts.base import PARTS, REPLICATED
from sharding.mesh import AXIS, arrays_of, place, specs_of

Placing = Callable[[Any, Callable[[Any], Any], Any], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelModel:
    """A model in a layout; a pytree, whose arrays are divided over the mesh.

    Attributes:
        layers: Placed parameters, layer by layer.
        outside: Placed embedding, positions, last norm and head.
        blocks: Shapes of the blocks, layer by layer.
        latents: Layer by layer, what a cache of latents could keep and the heads that a device
            makes of it; None where devices have no whole latents.
        config: Of the model.
        ropes: Of the model, see `CausalLm.ropes`.
        layout: How it lies.
        mesh: Where; a model of shapes may have an abstract one.
    """

    layers: list[LayerParts]
    outside: Outside
    blocks: tuple[LayerBlocks, ...] = dataclasses.field(metadata={"static": True})
    latents: tuple[LatentLayer | None, ...] = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    ropes: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    mesh: Any = dataclasses.field(metadata={"static": True})

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """What a token leaves in each layer on a device, padded and copied heads included."""
        return tuple(
            dataclasses.replace(kv, kv_heads=blocks.attention.plan.groups)
            for kv, blocks in zip(self.config.kv_shapes, self.blocks, strict=True)
        )

    @property
    def latent_layers(self) -> dict[int, LatentLayer]:
        """The layers that can keep latents; each device then keeps them whole."""
        found = enumerate(self.latents)
        return {layer: latent for layer, latent in found if latent is not None}

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], memory: Memory
    ) -> Output:
        """Runs all layers; as the model itself, but for the width of the hidden states.

        Args:
            tokens: int32 token ids.
            positions: int32 place of each token in its own text.
            memory: Asked on each device for the heads of that device.
        """
        x = self._embed(tokens, positions)
        masses = []
        ropes = self.ropes(self.config, positions, x.dtype)
        for layer, rope in enumerate(ropes):
            x, memory, mass = self._layer(layer, x, rope, memory)
            masses += [] if mass is None else [mass]
        experts = self.config.expert_shape.experts if self.config.expert_shape else 0
        mass = jnp.stack(masses) if masses else jnp.zeros((0, experts), jnp.float32)
        return Output(self._norm(self.outside.norm, x), memory, mass)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token, float32; the vocabulary is divided over the mesh.

        Args:
            hidden: Of the tokens that need them, out of `Output.hidden`.
        """
        residual = self._residual(hidden.ndim)
        vocabulary = PartitionSpec(*(None,) * (hidden.ndim - 1), AXIS)

        def scores(head: Array, hidden: Array) -> Array:
            if self.layout.splits_residual:
                # Here only: the last tokens' hidden states cost less than their logits.
                axis = hidden.ndim - 1
                hidden = lax.all_gather(hidden, AXIS, axis=axis, tiled=True, to="invarying")
                hidden = hidden[..., : self.config.hidden_size]
            return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)

        head = self.outside.head
        mapped = jax.shard_map(
            scores, mesh=self.mesh, in_specs=(head.spec, residual), out_specs=vocabulary
        )
        return cap_scores(self.config, mapped(head.array, hidden)[..., : self.config.vocab_size])

    def _layer(
        self, layer: int, x: Array, rope: Any, memory: Memory
    ) -> tuple[Array, Memory, Array | None]:
        """One layer; its routing mass as well if it has experts."""
        blocks, parts = self.blocks[layer], self.layers[layer]
        specs = (REPLICATED, REPLICATED, memory_specs(memory))
        out, (_, _, memory) = parallel.attention_with_state(
            self.mesh,
            blocks.attention,
            parts.attention,
            x,
            attend(self.config, layer, self.latents[layer]),
            (rope, arrays_of(parts.heads), memory),
            specs,
        )
        x = x + self._after("attention", layer, out)
        out, mass, share = None, None, None
        if blocks.experts is not None:
            out, mass, share = self._experts(layer, x, memory)
        if blocks.mlp is not None:
            every = parallel.mlp(self.mesh, blocks.mlp, parts.mlp, x)
            every = self._after("mlp", layer, every)
            every = every if share is None else every * share
            out = every if out is None else out + every
        assert out is not None
        x = x + self._after("sum", layer, out)
        scalar = parts.scalar
        return x if scalar is None else x * scalar.array.reshape(1, 1, 1), memory, mass

    def _experts(self, layer: int, x: Array, memory: Memory) -> tuple[Array, Array, Array | None]:
        """What the routed experts add, their routing mass, and the share of the one for all."""
        shape, block = self.config.expert_shape, self.blocks[layer].experts
        assert shape is not None
        assert block is not None
        index = self.config.moe_layers.index(layer)

        def ffn(gate_up: Any, down: Any, tokens: Array, ids: Any, weights: Any, memory: Any):
            if gate_up is None:
                kind = KERNEL_ACTIVATIONS[shape.activation]
                return memory.expert_ffn(index, tokens, ids, weights, kind).astype(tokens.dtype)
            out = dense_expert_ffn(tokens, ids, weights, gate_up, down, shape.activation)
            return out.astype(tokens.dtype)

        params = self.layers[layer].experts
        out, expert_ids, weights, share = parallel.experts(
            self.mesh, block, params, x, ffn, memory, memory_specs(memory)
        )
        mass = routing_mass(expert_ids, weights, memory.token_mask.reshape(-1), shape.experts)
        return self._after("experts", layer, out), mass, share

    def _after(self, name: str, layer: int, out: Array) -> Array:
        """Behind a norm, where the model has one."""
        norms = self.layers[layer].after
        return self._norm(norms[name], out) if name in norms else out

    def _norm(self, norm: Any, x: Array) -> Array:
        return parallel.norm(self.mesh, self.blocks[0].attention, norm, x)

    def _embed(self, tokens: Array, positions: Array) -> Array:
        def look_up(parts: Outside, tokens: Array, positions: Array) -> Array:
            x = scale_rows(self.config, parts.embedding.at[tokens].get(mode="clip"))
            if parts.positions is None:
                return x
            return x + parts.positions.at[positions + POSITION_OFFSET].get(mode="clip")

        mapped = jax.shard_map(
            look_up,
            mesh=self.mesh,
            in_specs=(specs_of(self.outside), REPLICATED, REPLICATED),
            out_specs=self._residual(3),
        )
        return mapped(arrays_of(self.outside), tokens, positions)

    def _residual(self, ndim: int) -> PartitionSpec:
        return parallel.residual_spec(self.blocks[0].attention, ndim)


def memory_specs(memory: Memory) -> Any:
    """How a memory is divided: each device has a pool of pages, and all have the same tables."""
    if isinstance(memory, PagedMemory):
        whole = jax.tree.map(lambda _: REPLICATED, memory)
        return dataclasses.replace(whole, pool=PARTS)
    return REPLICATED


def parallelize(
    model: CausalLm, mesh: Mesh | AbstractMesh, layout: str, placing: Placing = place
) -> ParallelModel:
    """Distributes a model over a mesh.

    Args:
        model: With arrays, best on the host (``set_weights(on_host=True)``): no device then ever
            holds more than its share. Factored by `pw_jax.low_rank` in the layouts that need it.
        mesh: From `sharding.mesh.tensor_mesh`; one without devices is enough for shapes.
        layout: A name of `sharding.layouts.LAYOUTS`.
        placing: `sharding.mesh.abstract` makes a model of shapes out of one of shapes.

    Raises:
        UserError: The layout cannot hold a layer of the model.
    """
    prefix = "model.decoder.layers" if isinstance(model, Opt) else "model.layers"
    made = make_layout(layout, mesh.shape[AXIS])
    cache: dict[Any, Any] = {}  # the same object for equal blocks: compiled once
    blocks, params, latents = [], [], []
    found = latent_layers(model) if made.whole_latents else {}
    for index, layer in enumerate(layers_of(model)):
        fresh = blocks_of(model, made, index, gives_latents=index in found)
        own = cache.setdefault(fresh, fresh)
        name = f"{prefix}.{index}"
        try:
            params.append(placing(mesh, partial(prepare_layer, made, own, name), layer))
        except ValueError as problem:
            raise UserError(f"{name}: {problem}") from problem
        blocks.append(own)
        plan, whole = own.attention.plan, found.get(index)
        latents.append(
            None
            if whole is None
            else dataclasses.replace(whole, heads=plan.local_heads, kv_heads=plan.groups)
        )

    around = placing(mesh, partial(prepare_outside, made), outside(model))
    shapes = (tuple(blocks), tuple(latents))
    return ParallelModel(params, around, *shapes, model.config, type(model).ropes, made, mesh)
