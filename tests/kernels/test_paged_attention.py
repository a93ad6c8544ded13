from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import Case, lowered_for_h200, make_sequences

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.paged_attention import paged_attention

SMALL = {
    "demo_4_tokens_a_page": Case(9, 3, 64, (70, 0, 1)),
    "demo_16_tokens_a_page_chunk": Case(9, 3, 64, (70, 0, 3), chunk=8, page_words=4096),
    "ungrouped": Case(2, 2, 64, (33, 7)),
    "window_soft_cap": Case(4, 2, 64, (70, 5), window=20, soft_cap=2.0),
    "window_soft_cap_chunk": Case(4, 2, 64, (70, 5), chunk=40, window=20, soft_cap=2.0),
    "float32": Case(4, 2, 64, (50, 1), dtype="float32"),
    "float32_chunk": Case(4, 2, 32, (50, 1), chunk=8, dtype="float32", scale=1.0),
    "96_dimensions": Case(2, 1, 96, (20, 0)),
    "mixed_dtypes": Case(2, 1, 64, (20, 3), q_dtype="float32"),
    "mixed_dtypes_chunk": Case(2, 1, 64, (20, 3), chunk=4, q_dtype="float32"),
}
MODELS = {
    "qwen": {"heads": 16, "kv_heads": 16, "head_dim": 128},
    "mixtral": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "gemma_sliding": {"heads": 16, "kv_heads": 8, "head_dim": 256, "window": 1024, "scale": 1.0},
    "gemma_full": {"heads": 16, "kv_heads": 2, "head_dim": 512, "scale": 1.0},
    "llama": {"heads": 64, "kv_heads": 8, "head_dim": 128},
    "demo": {"heads": 9, "kv_heads": 3, "head_dim": 64},
}
# Splits in decode: 650 tokens make three of 256 tokens at least.
SPLITS = Case(4, 2, 64, (650, 300, 0), window=500)
LENGTHS = (2500, 0, 8, 1, 1999)
REAL = {
    f"{name}_{chunk}": Case(**shape, lengths=LENGTHS, chunk=chunk, page_words=16384)
    for name, shape in MODELS.items()
    for chunk in (1, 130)
} | {
    f"float32_{chunk}": Case(
        16, 16, 128, LENGTHS, chunk=chunk, page_words=16384, dtype="float32", soft_cap=30.0
    )
    for chunk in (1, 130)
}


def relative_error(out: jax.Array, expected: np.ndarray) -> float:
    difference = np.asarray(out, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


class PagedAttentionTests:
    """Cases that every implementation must pass."""

    implementation: ClassVar[Implementation]

    def check(self, case: Case, seed: int = 0):
        sequences = make_sequences(case, seed)
        out = paged_attention(
            sequences.q,
            sequences.pool,
            sequences.pages,
            sequences.positions,
            implementation=self.implementation,
            **case.options,
        )
        assert out.dtype == sequences.q.dtype
        assert not np.asarray(out, np.float32)[np.asarray(sequences.positions) < 0].any()
        limit = 1e-5 if case.dtype == "float32" else 1e-2
        assert relative_error(out, sequences.expected) < limit

    @pytest.mark.parametrize("name", SMALL)
    def test_small(self, name):
        self.check(SMALL[name])

    def test_several_splits(self):
        self.check(SPLITS)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the GPU runs the larger cases")
class TestXla(PagedAttentionTests):
    implementation = "xla"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter needs no GPU")
class TestPallasInterpreted(PagedAttentionTests):
    implementation = "pallas"


@pytest.mark.gpu
class TestPallasGpu(PagedAttentionTests):
    implementation = "pallas"

    @pytest.mark.parametrize("name", REAL)
    def test_real(self, name):
        self.check(REAL[name], seed=1)

    @pytest.mark.parametrize("page_words", [1024, 2048, 4096])
    @pytest.mark.parametrize("chunk", [1, 33])
    def test_demo_pages(self, page_words, chunk):
        lengths = (900, 0, 3)
        self.check(Case(**MODELS["demo"], lengths=lengths, chunk=chunk, page_words=page_words))

    def test_pool_above_4_gib(self):
        """64-bit offsets: the same pages, moved to the end of a large pool."""
        case = REAL["mixtral_1"]
        sequences = make_sequences(case, 2)
        first = 70_000
        count = sequences.pool.shape[0]
        large = jnp.full((first + count, case.page_words), 0x7FC07FC0, jnp.uint32)
        large = jax.jit(lambda x, y: x.at[first:].set(y), donate_argnums=0)(large, sequences.pool)
        out = paged_attention(
            sequences.q,
            large,
            sequences.pages + first,
            sequences.positions,
            implementation="pallas",
            **case.options,
        )
        assert relative_error(out, sequences.expected) < 1e-2


def attention_shapes(layout: KvLayout, heads: int, batch: int, chunk: int, pages: int) -> tuple:
    blocks = 8192 // layout.tokens_per_page
    return (
        jax.ShapeDtypeStruct((batch, chunk, heads, layout.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((pages, layout.page_words), jnp.uint32),
        jax.ShapeDtypeStruct((batch, blocks), jnp.int32),
        jax.ShapeDtypeStruct((batch, chunk), jnp.int32),
    )


@pytest.mark.parametrize("chunk", [1, 512])
@pytest.mark.parametrize("name", MODELS)
def test_lowers_for_h200(name, chunk):
    model = dict(MODELS[name])
    heads, window = model.pop("heads"), model.pop("window", None)
    scale = model.pop("scale", 0.1)
    for page_words, dtype in ((16384, "bfloat16"), (4096, "bfloat16"), (16384, "float32")):
        layout = KvLayout(**model, dtype=dtype, page_words=page_words)

        def attend(q, pool, pages, positions, layout=layout):
            return paged_attention(
                q, pool, pages, positions, layout=layout, scale=scale, window=window, soft_cap=50.0
            )

        text = lowered_for_h200(attend, *attention_shapes(layout, heads, 16, chunk, 100_000))
        assert text.count("xla.gpu.triton") == (2 if chunk == 1 else 1)  # "auto" took the kernels
