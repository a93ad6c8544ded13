"""DeepSeek-V2: latent attention (MLA), and experts chosen in groups beside shared ones."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_reconstruct import UpProjections
from pw_jax.low_rank.layers import whole_weight
from pw_jax.models.config import ExpertShape, ModelConfig
from pw_jax.models.decoder import CausalLm, DecoderLayer
from pw_jax.models.latent import LatentKvShape, LatentLayer, Latents
from pw_jax.models.layers import GatedMlp, Linear, RmsNorm, rope_tables, rotate
from pw_jax.models.memory import Memory
from pw_jax.models.moe import ExpertStore, Router, SparseMoe

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Latent attention.

    Attributes:
        query_rank: Width of the queries' latent; None where queries come from the hidden state.
        rank: Width of the latent that keys and values are expanded from.
        plain_dim: Dimensions of a query or key without position.
        rope_dim: Dimensions that rotate; keys share theirs between all heads.
        value_dim: Dimensions of a value.
        scale: Multiplies the scores.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float

    def up_projections(self, both: Float[Array, "features R"]) -> UpProjections:
        """The weight that gives heads their plain keys and values, as one for each."""
        both = both.reshape(-1, self.plain_dim + self.value_dim, self.rank)
        return UpProjections(*jnp.split(both, (self.plain_dim,), axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(ModelConfig):
    """What only DeepSeek-V2 has.

    Attributes:
        latent: Shape of the attention.
        shared_experts_ffn: Hidden width of the MLP that every token uses beside its experts.
        routed_scale: Multiplies the weights of the chosen experts.
        expert_groups: Groups that the experts are divided into.
        top_groups: Groups that a token may choose from: those of the most probable experts.
    """

    latent: LatentShape
    shared_experts_ffn: int
    routed_scale: float = 1.0
    expert_groups: int = 1
    top_groups: int = 1


class LatentAttention(nnx.Module):
    """Attention whose keys and values are expanded from one small latent a token.

    The memory is given the latents; whether it keeps them or the heads they make is its choice.
    """

    def __init__(self, config: DeepseekV2Config, layer: int, *, dtype: DTypeLike):
        shape, width, heads = config.latent, config.hidden_size, config.num_heads
        query = heads * (shape.plain_dim + shape.rope_dim)
        self.layer = layer
        self.kv = config.kv_shapes[layer]
        self.shape = shape
        if shape.query_rank is None:
            self.q_proj = Linear(width, query, dtype=dtype)
        else:
            self.q_a_proj = Linear(width, shape.query_rank, bias=config.qkv_bias, dtype=dtype)
            self.q_a_layernorm = RmsNorm(shape.query_rank, LATENT_EPS, dtype=dtype)
            self.q_b_proj = Linear(shape.query_rank, query, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(
            width, shape.rank + shape.rope_dim, bias=config.qkv_bias, dtype=dtype
        )
        self.kv_a_layernorm = RmsNorm(shape.rank, LATENT_EPS, dtype=dtype)
        self.kv_b_proj = Linear(
            shape.rank, heads * (shape.plain_dim + shape.value_dim), dtype=dtype
        )
        self.o_proj = Linear(heads * shape.value_dim, width, bias=config.output_bias, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Returns what to add to the residual, and the memory with the new keys and values."""
        q = self.queries(x, rope)
        out, memory = memory.attend_latents(
            self.layer, q, self.latents(x, rope), scale=self.shape.scale, window=None
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1)), memory

    def queries(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array]
    ) -> Float[Array, "B T N H"]:
        """Queries, their plain dimensions first."""
        if self.shape.query_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], -1, self.shape.plain_dim + self.shape.rope_dim)
        plain, turning = jnp.split(q, (self.shape.plain_dim,), axis=-1)
        return jnp.concatenate((plain, rotate_neighbours(turning, rope)), axis=-1)

    @property
    def latent_layer(self) -> LatentLayer:
        """What a cache of latents keeps."""
        shape = self.shape
        kept = LatentKvShape(shape.rank, 0, shape.rope_dim)
        heads = self.kv.kv_heads
        return LatentLayer(kept, heads, heads, shape.plain_dim, shape.value_dim, None)

    def latents(self, x: Float[Array, "B T D"], rope: tuple[Array, Array]) -> Latents:
        """The normalised latent of each token, and the rotated key that all heads share."""
        latent, turning = jnp.split(self.kv_a_proj_with_mqa(x), (self.shape.rank,), axis=-1)
        turned = rotate_neighbours(turning[:, :, None], rope)[:, :, 0]
        up = self.shape.up_projections(whole_weight(self.kv_b_proj))
        return Latents(self.kv_a_layernorm(latent), None, turned, up, None, None)


class GroupedRouter(Router):
    """Softmax over all experts; the top k out of the groups with the most probable experts."""

    def __init__(self, config: DeepseekV2Config, shape: ExpertShape, *, dtype: DTypeLike):
        super().__init__(shape, renormalize=config.renormalize, dtype=dtype)
        self.groups = config.expert_groups
        self.top_groups = config.top_groups
        self.scale = config.routed_scale

    def __call__(self, x: Float[Array, "M D"]) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
        """Returns expert ids int32, the most probable first, and their weights float32."""
        factors = (x.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        # A GPU would round float32 factors to 10 bits.
        logits = jnp.einsum("md,ed->me", *factors, precision=jax.lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits, axis=-1)
        if self.top_groups < self.groups:
            grouped = scores.reshape(scores.shape[0], self.groups, -1)
            _, best = jax.lax.top_k(grouped.max(axis=-1), self.top_groups)
            kept = jax.nn.one_hot(best, self.groups, dtype=scores.dtype).sum(axis=1)
            scores = (grouped * kept[..., None]).reshape(scores.shape)
        weights, expert_ids = jax.lax.top_k(scores, self.top_k)
        if self.renormalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return expert_ids, weights * jnp.float32(self.scale)


class DeepseekV2Moe(SparseMoe):
    """Routed experts, and an MLP that every token uses without a gate."""

    def __init__(
        self, config: DeepseekV2Config, layer: int, *, experts: ExpertStore, dtype: DTypeLike
    ):
        super().__init__(config, layer, experts=experts, dtype=dtype)
        assert config.expert_shape is not None
        self.gate = GroupedRouter(config, config.expert_shape, dtype=dtype)
        self.shared_experts = GatedMlp(
            config.hidden_size,
            config.shared_experts_ffn,
            config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
        )

    def __call__(
        self, x: Float[Array, "B T D"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Float[Array, " E"]]:
        """Returns what to add to the residual, and the routing mass of each routed expert."""
        out, mass = super().__call__(x, memory)
        return out + self.shared_experts(x), mass


class DeepseekV2Layer(DecoderLayer):
    """The shared layer with its own attention and experts."""

    attention_type: type = LatentAttention
    moe_type: type = DeepseekV2Moe


class DeepseekV2(CausalLm):
    """The shared decoder; only some dimensions of a head rotate."""

    config: DeepseekV2Config
    layer_type: type = DeepseekV2Layer

    @staticmethod
    def ropes(
        config: ModelConfig, positions: Int[Array, "B T"], dtype: DTypeLike
    ) -> tuple[tuple[Array, Array], ...]:
        """Cosines and sines of the positions in float32: heads are rotated in it."""
        del dtype
        assert isinstance(config, DeepseekV2Config)
        tables = rope_tables(config.rope, config.latent.rope_dim, positions, jnp.float32)
        return (tables,) * config.num_layers


def rotate_neighbours(
    x: Float[Array, "B T N H"], rope: tuple[Array, Array]
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (2d, 2d + 1) of every head, in float32.

    The pairs come out as (d, d + H / 2). Queries and keys agree on that, so scores do not change.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    halves = jnp.concatenate((pairs[..., 0], pairs[..., 1]), axis=-1)
    return rotate(halves, rope).astype(x.dtype)
