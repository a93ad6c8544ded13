"""Self-attention: projections and rotation here, everything about the past in the memory."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import LatentLayer, factored_latents, factored_layer, rotation_of
from pw_jax.models.layers import Linear, rotate
from pw_jax.models.memory import Memory


class SelfAttention(nnx.Module):
    """Grouped-query attention with a rotary embedding.

    Args:
        config: The model.
        layer: Index of the layer; the memory keeps its keys and values under it.
        dtype: Of the weights.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike):
        kv = config.kv_shapes[layer]
        width, bias = config.hidden_size, config.qkv_bias
        self.layer = layer
        self.heads = config.num_heads
        self.kv = kv
        self.scale = kv.head_dim**-0.5
        self.rotation = rotation_of(config.rope, kv.head_dim)
        self.q_proj = Linear(width, config.num_heads * kv.head_dim, bias=bias, dtype=dtype)
        self.k_proj = Linear(width, kv.kv_heads * kv.head_dim, bias=bias, dtype=dtype)
        self.v_proj = Linear(width, kv.kv_heads * kv.head_dim, bias=bias, dtype=dtype)
        self.o_proj = Linear(
            config.num_heads * kv.head_dim, width, bias=config.output_bias, dtype=dtype
        )

    @property
    def latent_layer(self) -> LatentLayer | None:
        """What a cache of latents could keep; None unless keys and values are factored."""
        return factored_layer(self.k_proj, self.v_proj, self.heads, self.kv, self.rotation)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Attends.

        Args:
            x: Normalised hidden states.
            rope: Cosines and sines of the tokens' positions (`layers.rope_tables`).
            memory: Holds the keys and values of earlier tokens.

        Returns:
            What to add to the residual, and the memory with the new keys and values.
        """
        heads = (*x.shape[:2], -1, self.kv.head_dim)
        q = rotate(self.q_proj(x).reshape(heads), rope)
        options = {"scale": self.scale, "window": self.kv.window}
        if self.latent_layer is None:
            k = rotate(self.k_proj(x).reshape(heads), rope)
            v = self.v_proj(x).reshape(heads)
            out, memory = memory.attend(self.layer, q, k, v, soft_cap=None, **options)
        else:
            latents = factored_latents(
                self.k_proj, self.v_proj, x, self.kv.head_dim, rope, self.rotation
            )
            out, memory = memory.attend_latents(self.layer, q, latents, **options)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), memory
