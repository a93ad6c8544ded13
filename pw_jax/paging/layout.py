"""The static side of paging: what a model's pages look like, computed from its shapes."""

from dataclasses import dataclass

from pallas_kernels.page_layout import (
    PAGE_WORD_MULTIPLE,
    KvLayout,
    LatentLayout,
    MatrixLayout,
)
from pw_jax.models.config import ExpertShape, KvShape
from pw_jax.models.latent import LatentKvShape

MODULES = ("gate_up", "down")
"""The two paged matrices of an expert; a block is (layer, expert, module)."""

LARGEST_PAGE_WORDS = 16384


@dataclass(frozen=True)
class ExpertFormat:
    """The any-precision format of a checkpoint's experts.

    Attributes:
        seed_bits: Lowest width.
        parent_bits: Highest width.
        rows_per_table: Rows that share a table, for gate_up and for down.
    """

    seed_bits: int
    parent_bits: int
    rows_per_table: tuple[int, int]


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV pages have one layout and one window, and so one page table.

    Attributes:
        layout: Layout of a page: of heads, or of the latents that heads come from.
        layers: Model layers of the group, in order.
        window: Sliding window of the group's layers, or None.
    """

    layout: KvLayout | LatentLayout
    layers: tuple[int, ...]
    window: int | None

    def blocks(self, tokens: int) -> int:
        """Pages a layer that ``tokens`` tokens of one sequence fill."""
        return -(-tokens // self.layout.tokens_per_page)


@dataclass(frozen=True)
class PagingLayout:
    """All layouts of one model in one pool.

    Attributes:
        page_words: uint32 words a page.
        kv_groups: Groups of layers, by KV layout.
        moe_layers: Number of layers with routed experts; 0 for a dense model or unpaged experts.
        experts: Experts a layer.
        matrices: Layouts of (gate_up, down), or None where experts are not paged.
    """

    page_words: int
    kv_groups: tuple[KvGroup, ...]
    moe_layers: int = 0
    experts: int = 0
    matrices: tuple[MatrixLayout, MatrixLayout] | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return 4 * self.page_words

    def group_of(self, layer: int) -> tuple[int, int]:
        """The group of a model layer, and the layer's index in the group."""
        for index, group in enumerate(self.kv_groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layer {layer} has no KV group")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that a token takes in the cache over all layers, page rounding apart.

        Latents are counted as they are: whole, also where heads would be divided over devices.
        """
        groups = self.kv_groups
        return sum(4 * group.layout.words_per_token * len(group.layers) for group in groups)

    @property
    def block_tokens(self) -> int:
        """Tokens whose pages are shared as a whole: what the largest page of any group holds."""
        return max(group.layout.tokens_per_page for group in self.kv_groups)

    def kv_pages(self, tokens: int) -> int:
        """Pages that a sequence of ``tokens`` tokens needs over all layers."""
        return sum(group.blocks(tokens) * len(group.layers) for group in self.kv_groups)


def _matrix_shapes(shape: ExpertShape) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * shape.ffn, shape.embed), (shape.embed, shape.ffn)


CacheShape = KvShape | LatentKvShape
"""What a layer keeps of a token."""


def cache_layout(
    shape: CacheShape, kv_dtype: str, page_words: int
) -> tuple[KvLayout | LatentLayout, int | None]:
    """The page layout of a layer, and its window.

    Raises:
        ValueError: A token does not fit a page.
    """
    if isinstance(shape, LatentKvShape):
        ranks = (shape.k_rank, shape.v_rank, shape.shared_dim)
        return LatentLayout(*ranks, kv_dtype, page_words), None
    return KvLayout(shape.kv_heads, shape.head_dim, kv_dtype, page_words), shape.window


def paging_layout(
    kv_shapes: tuple[CacheShape, ...],
    *,
    kv_dtype: str,
    page_words: int,
    expert_shape: ExpertShape | None = None,
    expert_format: ExpertFormat | None = None,
    moe_layers: int = 0,
) -> PagingLayout:
    """Builds the layouts of a model.

    Args:
        kv_shapes: What each layer keeps of a token.
        kv_dtype: ``"bfloat16"`` or ``"float32"``.
        page_words: uint32 words a page.
        expert_shape: Shape of the routed experts, if they are paged.
        expert_format: Their any-precision format.
        moe_layers: Layers with routed experts.

    Raises:
        ValueError: A row or a token does not fit a page.
    """
    by_shape: dict[CacheShape, list[int]] = {}
    for layer, shape in enumerate(kv_shapes):
        by_shape.setdefault(shape, []).append(layer)
    groups = []
    for shape, layers in by_shape.items():
        layout, window = cache_layout(shape, kv_dtype, page_words)
        groups.append(KvGroup(layout, tuple(layers), window))
    groups = tuple(groups)
    if expert_shape is None or expert_format is None:
        return PagingLayout(page_words, groups)
    gate_up, down = (
        MatrixLayout(
            rows,
            columns,
            rows_per_table,
            expert_format.seed_bits,
            expert_format.parent_bits,
            page_words,
        )
        for (rows, columns), rows_per_table in zip(
            _matrix_shapes(expert_shape), expert_format.rows_per_table, strict=True
        )
    )
    return PagingLayout(page_words, groups, moe_layers, expert_shape.experts, (gate_up, down))


def choose_page_words(
    kv_shapes: tuple[CacheShape, ...], *, kv_dtype: str, expert_shape: ExpertShape | None
) -> int:
    """The largest page (up to 64 KiB) that wastes little of what it holds.

    Rounding planes up to pages and tokens down to powers of two wastes space, and more so for small
    models. Among multiples of 512 bytes, the least waste is found, and the largest page within five
    percent of it is taken: large pages keep tables short and copies long.
    """

    def fill(page_words: int) -> float:
        """Used words over held words: the product for planes and for KV, in the worst group."""
        try:
            layout = paging_layout(kv_shapes, kv_dtype=kv_dtype, page_words=page_words)
            matrices = [
                MatrixLayout(rows, columns, 1, 3, 8, page_words)
                for rows, columns in (_matrix_shapes(expert_shape) if expert_shape else ())
            ]
        except ValueError:
            return 0.0
        kv = min(
            group.layout.words_per_token * group.layout.tokens_per_page / page_words
            for group in layout.kv_groups
        )
        held = sum(matrix.plane_pages * page_words for matrix in matrices)
        used = sum(matrix.rows * matrix.words_per_row for matrix in matrices)
        return kv * (used / held if held else 1.0)

    fills = {
        words: fill(words)
        for words in range(PAGE_WORD_MULTIPLE, LARGEST_PAGE_WORDS + 1, PAGE_WORD_MULTIPLE)
    }
    best = max(fills.values())
    return max(words for words, value in fills.items() if value >= best - 0.05)
