from functools import partial
from typing import ClassVar

import jax
import numpy as np
import pytest
from latent_pool import Case, make_sequences
from paged_pool import lowered_for_h200

from pallas_kernels.implementation import Implementation
from pallas_kernels.kv_reconstruct import (
    Mode,
    UpProjections,
    compact_blocks,
    latent_attention,
)

LENGTHS = (70, 0, 1, 33)
CASES = {
    "mha_37": Case(2, 2, 16, (37, 37), LENGTHS),
    "gqa_ranks_differ": Case(4, 2, 32, (37, 96), LENGTHS, bias=True),
    "shared_prefix_160": Case(4, 4, 16, (160, 37), (40, 13, 0, 12), shared_blocks=3),
    "no_rope": Case(4, 4, 16, (37, 24), LENGTHS, theta=None, bias=True),
    "mla": Case(4, 4, 16, (48, 0), LENGTHS, shared_dim=8, value_dim=12, theta=None),
    "bfloat16": Case(4, 2, 32, (37, 96), LENGTHS, dtype="bfloat16"),
    "bfloat16_mla": Case(
        4, 4, 16, (48, 0), LENGTHS, shared_dim=8, value_dim=12, theta=None, dtype="bfloat16"
    ),
    "float32_pages_of_a_bfloat16_model": Case(2, 1, 16, (37, 20), (9, 3), up_dtype="bfloat16"),
}
LONG = (700, 0, 8, 1, 650)
REAL = {
    "llama_70b": Case(64, 8, 128, (546, 546), LONG, dtype="bfloat16", page_words=8832),
    "llama_70b_tp8": Case(8, 1, 128, (546, 500), LONG, dtype="bfloat16", page_words=8832),
    "llama_65b_tp8": Case(8, 8, 128, (2457, 2457), LONG, dtype="bfloat16", page_words=9856),
    "opt": Case(8, 8, 128, (300, 160), LONG, theta=None, bias=True, dtype="bfloat16",
                page_words=4096),
    "deepseek_v2_lite": Case(
        16, 16, 128, (512, 0), LONG, shared_dim=64, theta=None, dtype="bfloat16", page_words=9216
    ),
}  # fmt: skip
CHUNKS = {
    "chunk": Case(4, 2, 32, (37, 96), LENGTHS, chunk=8, bias=True),
    "chunk_mla": Case(4, 4, 16, (48, 0), LENGTHS, chunk=5, shared_dim=8, value_dim=12, theta=None),
    "chunk_bfloat16": Case(4, 2, 32, (37, 96), LENGTHS, chunk=8, dtype="bfloat16"),
}


CORE: list[tuple[str, Mode]] = [
    ("shared_prefix_160", "rebuild"),
    ("gqa_ranks_differ", "fused"),
    ("bfloat16", "fused"),
    ("mha_37", "absorbed"),
    ("bfloat16_mla", "absorbed"),
]
MORE: list[tuple[str, Mode]] = [
    ("mla", "rebuild"),
    ("bfloat16", "rebuild"),
    ("shared_prefix_160", "fused"),
    ("float32_pages_of_a_bfloat16_model", "fused"),
    ("gqa_ranks_differ", "absorbed"),
    ("bfloat16", "absorbed"),
    ("no_rope", "absorbed"),
    ("mla", "auto"),
]


def relative_error(out: jax.Array, expected: np.ndarray) -> float:
    difference = np.asarray(out, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


class LatentAttentionTests:
    """Cases that every implementation must pass."""

    implementation: ClassVar[Implementation]

    def check(self, case: Case, mode: Mode, *, compact: bool = False, seed: int = 0):
        sequences = make_sequences(case, seed)
        counted = None
        if compact:
            used = case.used()
            counted = compact_blocks(
                np.asarray(sequences.pages), used, capacity=int(used.sum()) + 3,
                columns=int(used.max()),
            )  # fmt: skip
        options = {"mode": mode, "implementation": self.implementation, **case.options}
        attend = jax.jit(partial(latent_attention, **options))
        arrays = (sequences.q, sequences.pool, sequences.pages, sequences.positions)
        with jax.default_matmul_precision("highest"):  # else a GPU rounds float32 to TF32
            out = attend(*arrays, sequences.up, compact=counted)
        assert out.dtype == sequences.q.dtype
        assert not np.asarray(out, np.float32)[np.asarray(sequences.positions) < 0].any()
        low = "bfloat16" in (case.dtype, case.up_dtype)
        assert relative_error(out, sequences.expected) < (1e-2 if low else 1e-5)

    @pytest.mark.parametrize(("name", "mode"), CORE)
    def test_core(self, name, mode):
        self.check(CASES[name], mode, compact=name == "shared_prefix_160")


class MoreTests(LatentAttentionTests):
    """The other combinations, which the interpreter is too slow for."""

    @pytest.mark.parametrize(("name", "mode"), MORE)
    def test_more(self, name, mode):
        self.check(CASES[name], mode, compact=mode != "rebuild")

    @pytest.mark.parametrize("name", CHUNKS)
    def test_chunks(self, name):
        self.check(CHUNKS[name], "auto", compact=name == "chunk")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the GPU runs the larger cases")
class TestXla(MoreTests):
    implementation = "xla"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter needs no GPU")
class TestPallasInterpreted(LatentAttentionTests):
    implementation = "pallas"


@pytest.mark.gpu
class TestPallasGpu(MoreTests):
    implementation = "pallas"

    @pytest.mark.parametrize("mode", ["rebuild", "fused", "absorbed"])
    @pytest.mark.parametrize("name", REAL)
    def test_real(self, name, mode):
        if (name, mode) != ("deepseek_v2_lite", "fused"):  # it has a key that is not rebuilt
            self.check(REAL[name], mode, compact=mode == "rebuild", seed=1)


@pytest.mark.parametrize("name", REAL)
def test_lowers_for_h200(name):
    """The decode step of each mode; 2 kernels of attention are what ``rebuild`` has."""
    case = REAL[name]
    layout, value_dim = case.layout, case.value_dim or case.head_dim
    k_rank, v_rank = case.ranks[0], case.ranks[1] or case.ranks[0]
    width = case.head_dim + case.shared_dim

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    up = UpProjections(
        array(case.kv_heads, case.head_dim, k_rank), array(case.kv_heads, value_dim, v_rank)
    )
    shapes = (
        array(64, 1, case.heads, width),
        array(100_000, case.page_words, dtype="uint32"),
        array(64, 8192 // layout.tokens_per_page, dtype="int32"),
        array(64, 1, dtype="int32"),
        up,
    )
    absorbed = 2 if case.rotation is not None else 3
    for mode, kernels in {"rebuild": 2, "fused": 3, "absorbed": absorbed}.items():
        if (name, mode) == ("deepseek_v2_lite", "fused"):
            continue
        text = lowered_for_h200(partial(latent_attention, mode=mode, **case.options), *shapes)
        assert text.count("xla.gpu.triton") == kernels
