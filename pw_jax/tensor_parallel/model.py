"""A decoder over a mesh: called like the model that it was made of, and equal to it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pw_jax.errors import UserError
from pw_jax.models.config import KvShape, ModelConfig
from pw_jax.models.decoder import CausalLm, Output
from pw_jax.models.deepseek_v2 import DeepseekV2Config, pad_last, rotate_neighbours
from pw_jax.models.layers import rope_tables, rotate
from pw_jax.models.memory import Memory
from pw_jax.models.opt import POSITION_OFFSET, Opt
from pw_jax.tensor_parallel.weights import (
    Outside,
    attention_weights,
    blocks_of,
    layers_of,
    mlp_weights,
    outside,
)
from sharding import parallel
from sharding.blocks import AttentionBlock, LatentBlock, MlpBlock
from sharding.layouts import Layout, make_layout
from sharding.layouts.base import COLUMNS, REPLICATED, ROWS
from sharding.mesh import AXIS, Placed, arrays_of, place, specs_of
from sharding.norms import normalize
from sharding.padding import pad_axis

Blocks = tuple[AttentionBlock | LatentBlock, MlpBlock]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelModel:
    """A model in a layout; a pytree, whose arrays are divided over the mesh.

    Attributes:
        layers: Placed parameters of attention and MLP, layer by layer.
        outside: Placed embedding, positions, last norm and head.
        blocks: Shapes of the blocks, layer by layer.
        config: Of the model.
        layout: How it lies.
        mesh: Where.
    """

    layers: Any
    outside: Any
    blocks: tuple[Blocks, ...] = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """What each device keeps of a token in each layer, padded and copied heads included."""
        return tuple(
            dataclasses.replace(kv, kv_heads=attention.plan.groups)
            for kv, (attention, _) in zip(self.config.kv_shapes, self.blocks, strict=True)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        memory: Memory,
        memory_specs: Any = REPLICATED,
    ) -> Output:
        """Runs all layers; as the model itself, but for the width of the hidden states.

        Args:
            tokens: int32 token ids.
            positions: int32 place of each token in its own text.
            memory: Asked on each device for the heads of that device.
            memory_specs: Partitions of the memory over the mesh.
        """
        x = self._embed(tokens, positions)
        ropes = self._ropes(positions, x.dtype)
        specs = (REPLICATED, memory_specs)
        for index, ((attention, mlp), (first, second)) in enumerate(
            zip(self.blocks, self.layers, strict=True)
        ):
            attend = _attend(self.config, index, attention)
            out, (_, memory) = parallel.attention_with_state(
                self.mesh, attention, first, x, attend, (ropes, memory), specs
            )
            x = x + out
            x = x + parallel.mlp(self.mesh, mlp, second, x)
        return Output(self._last_norm(x), memory, jnp.zeros((0, 0), jnp.float32))

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
        return mapped(head.array, hidden)[..., : self.config.vocab_size]

    def _embed(self, tokens: Array, positions: Array) -> Array:
        def look_up(parts: Outside, tokens: Array, positions: Array) -> Array:
            x = parts.embedding.at[tokens].get(mode="clip")
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

    def _ropes(self, positions: Array, dtype: Any) -> Any:
        """Rotary tables, the same in all layers; None where positions are learned."""
        config = self.config
        if isinstance(config, DeepseekV2Config):
            return rope_tables(config.rope, config.latent.rope_dim, positions, jnp.float32)
        if config.rope.kind == "none":
            return None
        return rope_tables(config.rope, config.kv_shapes[0].head_dim, positions, dtype)

    def _last_norm(self, x: Array) -> Array:
        def norm(norm: Any, x: Array) -> Array:
            divided = self.layout.splits_residual
            width = self.config.hidden_size
            return normalize(x, norm, self.config.norm_eps, width, divided=divided)

        norms, residual = self.outside.norm, self._residual(x.ndim)
        mapped = jax.shard_map(
            norm, mesh=self.mesh, in_specs=(specs_of(norms), residual), out_specs=residual
        )
        return mapped(arrays_of(norms), x)

    def _residual(self, ndim: int) -> PartitionSpec:
        return parallel.residual_spec(self.blocks[0][1], ndim)


def parallelize(model: CausalLm | Opt, mesh: Mesh, layout: str) -> ParallelModel:
    """Distributes a model over a mesh.

    Args:
        model: With arrays; factored by `pw_jax.low_rank` in the layouts that need factors.
        mesh: From `sharding.mesh.tensor_mesh`.
        layout: A name of `sharding.layouts.LAYOUTS`.

    Raises:
        UserError: The layout cannot hold a layer of the model, or the layer has experts.
    """
    if isinstance(model, CausalLm) and type(model).embed is not CausalLm.embed:
        raise UserError(f"{model.config.model_type} models are not laid out over devices yet")
    prefix = "model.decoder.layers" if isinstance(model, Opt) else "model.layers"
    made = make_layout(layout, mesh.shape[AXIS])
    cache: dict[Blocks, Blocks] = {}  # the same object for equal layers: compiled once
    blocks, params = [], []
    for index, layer in enumerate(layers_of(model)):
        fresh = blocks_of(model, made, index)
        attention, mlp = cache.setdefault(fresh, fresh)
        name = f"{prefix}.{index}"
        try:
            params.append(
                (
                    place(mesh, attention.prepare, attention_weights(layer, name)),
                    place(mesh, mlp.prepare, mlp_weights(layer, name)),
                )
            )
        except ValueError as problem:
            raise UserError(f"{name}: {problem}") from problem
        blocks.append((attention, mlp))

    def prepare(parts: Outside) -> Outside:
        def columns(table: Any) -> Any:
            if table is None:
                return None
            if not made.splits_residual:
                return Placed(table, REPLICATED)
            return Placed(pad_axis(table, 1, made.devices), COLUMNS)

        head = Placed(pad_axis(parts.head, 0, made.devices), ROWS)
        return Outside(
            columns(parts.embedding), columns(parts.positions), made.norm(parts.norm), head
        )

    around = place(mesh, prepare, outside(model))
    return ParallelModel(params, around, tuple(blocks), model.config, made, mesh)


def _attend(config: ModelConfig, layer: int, block: AttentionBlock | LatentBlock) -> Any:
    """What a device does with its heads: rotate, and ask the memory."""
    kv = config.kv_shapes[layer]

    def ask(memory: Memory, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Memory]:
        return memory.attend(layer, q, k, v, scale=scale, window=kv.window, soft_cap=None)

    def grouped(q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        ropes, memory = state
        if ropes is not None:
            q, k = rotate(q, ropes), rotate(k, ropes)
        out, memory = ask(memory, q, k, v, kv.head_dim**-0.5)
        return out, (ropes, memory)

    def latent(q: Array, plain: Array, shared: Array, v: Array, state: Any) -> tuple[Array, Any]:
        assert isinstance(config, DeepseekV2Config)
        ropes, memory = state
        first, turning = jnp.split(q, (config.latent.plain_dim,), axis=-1)
        q = jnp.concatenate((first, rotate_neighbours(turning, ropes)), axis=-1)
        shared = rotate_neighbours(shared, ropes)
        shared = jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[-1]))
        k = jnp.concatenate((plain, shared), axis=-1)
        q, k, v = (pad_last(part, kv.head_dim) for part in (q, k, v))
        out, memory = ask(memory, q, k, v, config.latent.scale)
        return out[..., : config.latent.value_dim], (ropes, memory)

    return latent if isinstance(block, LatentBlock) else grouped
