"""Layouts: what a page holds, and how much of it is wasted."""

import numpy as np
import pytest

from pallas_kernels.page_layout import KvLayout, MatrixLayout
from pw_jax.models.config import ExpertShape, KvShape
from pw_jax.paging.layout import ExpertFormat, choose_page_words, paging_layout

QWEN_KV = (KvShape(16, 128),) * 24
QWEN_EXPERTS = ExpertShape(60, 4, 2048, 1408, "silu")


@pytest.mark.parametrize(
    ("rows", "columns", "plane_pages", "rows_per_page"),
    [
        (2816, 2048, 11, 256),  # Qwen1.5-MoE gate_up
        (2048, 1408, 6, 352),  # and down
        (28672, 4096, 224, 128),  # Mixtral
        (4096, 14336, 114, 36),
        (1408, 2816, 8, 176),  # Gemma-4
        (2816, 704, 4, 704),
    ],
)
def test_real_shapes_in_64_kib_pages(rows, columns, plane_pages, rows_per_page):
    layout = MatrixLayout(rows, columns, 1, 3, 8, 16384)
    assert (layout.plane_pages, layout.rows_per_page) == (plane_pages, rows_per_page)
    assert layout.plane_pages * layout.rows_per_page >= rows
    assert layout.rows_per_page * layout.words_per_row <= layout.page_words
    assert layout.pages(3) < layout.pages(4) < layout.pages(8)


def test_plane_images_hold_every_row_once():
    layout = MatrixLayout(100, 96, 4, 3, 8, 128)
    planes = np.random.default_rng(0).integers(0, 2**32, (8, 100, 3), dtype=np.uint32)
    images = layout.plane_images(planes)
    assert images.shape == (8, layout.plane_pages, 128)
    for row in range(100):
        page, place = divmod(row, layout.rows_per_page)
        assert np.array_equal(images[:, page, 3 * place : 3 * place + 3], planes[:, :, :][:, row])


@pytest.mark.parametrize("bits", [3, 5, 6, 7, 8])
def test_table_images_hold_entries_then_scales(bits):
    layout = MatrixLayout(24, 32, 8, 3, 8, 128)
    generator = np.random.default_rng(bits)
    dtype = np.int8 if bits <= 6 else np.int16
    table = generator.integers(-100, 100, (3, 1 << bits)).astype(dtype)
    scale = generator.standard_normal(24, np.float32)
    words = layout.table_image(table, scale).reshape(-1)
    count = 3 << bits
    assert np.array_equal(words.view(dtype)[:count].reshape(3, -1), table)
    first = count * layout.entry_bytes(bits) // 4
    assert np.array_equal(words[first : first + 24].view(np.float32), scale)
    assert layout.table_image(table, scale).shape[0] == layout.table_pages(bits)


def test_kv_pages_hold_a_power_of_two_of_tokens():
    assert KvLayout(16, 128, "bfloat16", 16384).tokens_per_page == 8
    assert KvLayout(8, 128, "bfloat16", 16384).tokens_per_page == 16
    assert KvLayout(3, 64, "bfloat16", 1536).tokens_per_page == 8
    assert KvLayout(3, 64, "float32", 1536).tokens_per_page == 4


def test_large_models_get_large_pages_and_small_ones_little_waste():
    assert choose_page_words(QWEN_KV, kv_dtype="bfloat16", expert_shape=QWEN_EXPERTS) >= 8192
    small = ExpertShape(8, 4, 576, 128, "silu")
    words = choose_page_words((KvShape(3, 64),) * 30, kv_dtype="bfloat16", expert_shape=small)
    layout = paging_layout(
        (KvShape(3, 64),) * 30,
        kv_dtype="bfloat16",
        page_words=words,
        expert_shape=small,
        expert_format=ExpertFormat(3, 8, (8, 32)),
        moe_layers=30,
    )
    assert layout.matrices is not None
    used = sum(matrix.rows * matrix.words_per_row for matrix in layout.matrices)
    held = sum(matrix.plane_pages * words for matrix in layout.matrices)
    kv = layout.kv_groups[0].layout
    assert used / held * kv.tokens_per_page * kv.words_per_token / words > 0.85


def test_layers_of_one_shape_share_a_group():
    sliding, full = KvShape(8, 256, 1024), KvShape(2, 512)
    layout = paging_layout((sliding, sliding, full, sliding), kv_dtype="bfloat16", page_words=16384)
    assert [group.layers for group in layout.kv_groups] == [(0, 1, 3), (2,)]
    assert layout.group_of(3) == (0, 2)
    assert layout.kv_pages(17) == 3 * 3 + 2  # 8 and 16 tokens a page


@pytest.mark.parametrize("words", [0, 100, 129])
def test_pages_must_hold_whole_tables(words):
    with pytest.raises(ValueError, match="512"):
        MatrixLayout(32, 32, 1, 3, 8, words)


def test_rows_that_do_not_fit_a_page_are_refused():
    with pytest.raises(ValueError, match="does not fit"):
        MatrixLayout(32, 8192, 1, 3, 8, 128)
    with pytest.raises(ValueError, match="do not fit"):
        KvLayout(64, 128, "bfloat16", 128)
