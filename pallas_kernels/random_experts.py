"""Random any-precision experts in a pool, for benchmarks and tests of kernels."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn import ModulePages

IntLike = int | jax.Array
PAGE_WORDS = 16384
SEED_BITS, PARENT_BITS = 3, 8


@dataclass(frozen=True)
class Shape:
    """A model's expert matrices: gate_up ``[2F, D]`` and down ``[D, F]``."""

    model: str
    experts: int
    embed: int
    ffn: int
    gate_up_rows_per_table: int
    down_rows_per_table: int

    def layout(self, module: str, page_words: int = PAGE_WORDS) -> MatrixLayout:
        """The page layout of ``gate_up`` or ``down``."""
        if module == "gate_up":
            sizes = (2 * self.ffn, self.embed, self.gate_up_rows_per_table)
        else:
            sizes = (self.embed, self.ffn, self.down_rows_per_table)
        return MatrixLayout(*sizes, SEED_BITS, PARENT_BITS, page_words)


SHAPES = (
    Shape("Mixtral-8x7B", 8, 4096, 14336, 1, 1),
    Shape("Qwen1.5-MoE", 60, 2048, 1408, 2, 4),
    Shape("Gemma-4-26B-A4B", 128, 2816, 704, 2, 8),
)


def random_pages(
    layout: MatrixLayout, bits: tuple[int, ...], pool_pages: int, first: int, seed: int
) -> ModulePages:
    """Page ids of experts of the given widths, scattered over ``[first, pool_pages)``.

    Ids of planes that a width does not have stay 0, as a planner leaves them.
    """
    experts = len(bits)
    ids = np.random.default_rng(seed).permutation(np.arange(first, pool_pages))
    planes = np.zeros((experts, layout.parent_bits, layout.plane_pages), np.int32)
    tables = np.zeros((experts, layout.most_table_pages), np.int32)
    start = 0
    for expert, width in enumerate(bits):
        for target in (planes[expert, :width], tables[expert, : layout.table_pages(width)]):
            target[...] = ids[start : start + target.size].reshape(target.shape)
            start += target.size
    return ModulePages(jnp.asarray(bits, jnp.int32), jnp.asarray(planes), jnp.asarray(tables))


def pages_needed(layout: MatrixLayout, bits: tuple[int, ...]) -> int:
    """Pages that experts of the given widths hold."""
    return sum(layout.pages(width) for width in bits)


@partial(jax.jit, static_argnames=("pages", "page_words"))
def random_pool(seed: IntLike, pages: int, page_words: int) -> jax.Array:
    """A pool of random words: every plane and every table entry is uniform."""
    return jax.random.bits(jax.random.key(seed), (pages, page_words), jnp.uint32)


@partial(jax.jit, static_argnames=("layout",), donate_argnames=("pool",))
def set_scales(
    pool: jax.Array, module: ModulePages, seed: IntLike, layout: MatrixLayout
) -> jax.Array:
    """Writes row scales that make weights of a usual size, at each expert's width."""
    experts = module.bits.shape[0]
    spread = jax.random.uniform(jax.random.key(seed), (experts, layout.rows), jnp.float32, 0.5, 1.5)
    starts = jnp.asarray(
        [layout.table_words(width) - layout.rows for width in layout.widths], jnp.int32
    )
    entry_sizes = jnp.asarray(
        [127.0 if layout.entry_bytes(width) == 1 else 32767.0 for width in layout.widths],
        jnp.float32,
    )
    choice = module.bits - layout.seed_bits
    scale = spread * (0.05 / entry_sizes[choice])[:, None]
    word = starts[choice][:, None] + jnp.arange(layout.rows, dtype=jnp.int32)[None, :]
    page = jnp.take_along_axis(module.tables, word // layout.page_words, axis=1)
    value = lax.bitcast_convert_type(scale, jnp.uint32)
    return pool.at[page, word % layout.page_words].set(value)


def random_experts(
    layout: MatrixLayout, bits: tuple[int, ...], seed: int, poison: int = 16
) -> tuple[jax.Array, ModulePages]:
    """A pool with experts of the given widths and ``poison`` spare pages of random words."""
    pages = pages_needed(layout, bits) + 1 + poison
    module = random_pages(layout, bits, pages, 1, seed)
    pool = random_pool(seed, pages, layout.page_words)
    return set_scales(pool, module, seed + 1, layout), module


def shift_pages(module: ModulePages, pages: int) -> ModulePages:
    """The same pages, ``pages`` further on in a longer pool; unused entries stay 0."""
    planes, tables = (jnp.where(x > 0, x + pages, 0) for x in (module.planes, module.tables))
    return ModulePages(module.bits, planes, tables)
