"""What a forward pass reads and writes besides its weights, when everything lives in pages."""

from dataclasses import dataclass, field, replace
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.implementation import Implementation
from pallas_kernels.kv_reconstruct import CompactBlocks, latent_attention
from pallas_kernels.page_layout import KvLayout, LatentLayout
from pallas_kernels.page_write import write_kv, write_latents
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_expert_ffn import Activation, ModulePages, paged_expert_ffn
from pw_jax.models.latent import Latents
from pw_jax.models.layers import pad_last
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.observer import PromptObserver


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes, when compiling
@dataclass(frozen=True)
class PagedMemory:
    """The pool with the tables of B sequences; implements :class:`pw_jax.models.memory.Memory`.

    Attributes:
        pool: The page pool.
        kv_pages: For each KV group, the page of each block of each layer of each sequence.
        positions: Position of each token; negative for padding and empty slots.
        expert_pages: Pages of gate_up and of down of all MoE layers; None if experts are arrays.
        layout: Static layouts.
        implementation: Which kernels run.
        observer: Is shown the MoE inputs while the step is traced, if given.
        compact: For each KV group of latents, its used pages; None, or no entry, for all pages.
    """

    pool: UInt32[Array, "pages words"]
    kv_pages: tuple[Int32[Array, "layers B blocks"], ...]
    positions: Int32[Array, "B T"]
    expert_pages: tuple[ModulePages, ModulePages] | None
    layout: PagingLayout = field(metadata={"static": True})
    implementation: Implementation = field(default="auto", metadata={"static": True})
    observer: PromptObserver | None = field(default=None, metadata={"static": True})
    compact: tuple[CompactBlocks | None, ...] = ()

    @property
    def token_mask(self) -> Bool[Array, "B T"]:
        """True for real tokens."""
        return self.positions >= 0

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "B T N H"], "PagedMemory"]:
        """Writes the new keys and values, then attends over the sequences' pages."""
        _, layout, table = self._group(layer)
        assert isinstance(layout, KvLayout)
        pool = write_kv(
            self.pool,
            k.reshape(-1, *k.shape[2:]),
            v.reshape(-1, *v.shape[2:]),
            *self._places(layout, table),
            layout=layout,
            implementation=self.implementation,
        )
        out = paged_attention(
            q,
            pool,
            table,
            self.positions,
            layout=layout,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            implementation=self.implementation,
        )
        return out, replace(self, pool=pool)

    def attend_latents(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        latents: Latents,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B T N Hv"], "PagedMemory"]:
        """Keeps latents or heads, whichever the layer's pages are for, and attends."""
        index, layout, table = self._group(layer)
        if isinstance(layout, KvLayout):
            k, v = latents.heads()
            width = v.shape[-1]
            # Pages hold heads of one width; zeros change neither scores nor the values kept.
            q, k, v = (pad_last(part, layout.head_dim) for part in (q, k, v))
            out, memory = self.attend(layer, q, k, v, scale=scale, window=window, soft_cap=None)
            return out[..., :width], memory

        def rows(part: Array | None) -> Array | None:
            return None if part is None else part.reshape(-1, part.shape[-1])

        pool = write_latents(
            self.pool,
            latents.k.reshape(-1, latents.k.shape[-1]),
            rows(latents.v),
            rows(latents.shared),
            *self._places(layout, table),
            layout=layout,
        )
        out = latent_attention(
            q,
            pool,
            table,
            self.positions,
            latents.up,
            layout=layout,
            scale=scale,
            rotation=latents.rotation,
            compact=self.compact[index] if self.compact else None,
            implementation=self.implementation,
        )
        return out, replace(self, pool=pool)

    def _group(self, layer: int) -> tuple[int, KvLayout | LatentLayout, Int32[Array, "B blocks"]]:
        """The KV group of a layer, its page layout and the layer's page tables."""
        index, row = self.layout.group_of(layer)
        return index, self.layout.kv_groups[index].layout, self.kv_pages[index][row]

    def _places(
        self, layout: KvLayout | LatentLayout, table: Int32[Array, "B blocks"]
    ) -> tuple[Int32[Array, " M"], Int32[Array, " M"]]:
        """Page and place in it of each new token; page 0 for padding."""
        position = jnp.maximum(self.positions, 0)
        block, offset = position // layout.tokens_per_page, position % layout.tokens_per_page
        page = jnp.where(self.token_mask, jnp.take_along_axis(table, block, axis=1), 0)
        return page.reshape(-1), offset.reshape(-1)

    def expert_ffn(
        self,
        moe_index: int,
        x: Float[Array, "M D"],
        expert_ids: Int32[Array, "M k"],
        weights: Float32[Array, "M k"],
        activation: Activation,
    ) -> Float32[Array, "M D"]:
        """Multiplies tokens with their experts out of the pool; padding chooses no expert."""
        if self.expert_pages is None or self.layout.matrices is None:
            raise ValueError("the model wants paged experts and this memory holds none")
        gate_up, down = (pages.layer(moe_index) for pages in self.expert_pages)
        gate_up_layout, down_layout = self.layout.matrices
        real = self.token_mask.reshape(-1, 1)
        if self.observer is not None:
            self.observer.see(moe_index, x, expert_ids, real[:, 0], self.layout.experts)
        return paged_expert_ffn(
            x,
            jnp.where(real, expert_ids, self.layout.experts),
            weights,
            self.pool,
            gate_up,
            down,
            gate_up_layout=gate_up_layout,
            down_layout=down_layout,
            activation=activation,
            implementation=self.implementation,
        )
