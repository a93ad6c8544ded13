from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import lowered_for_h200

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn import Activation, ModulePages, paged_expert_ffn
from pallas_kernels.paged_expert_ffn.reference import dequantize_expert
from pallas_kernels.random_experts import SHAPES, Shape, pages_needed, random_experts, shift_pages

WIDTHS = (3, 4, 5, 6, 7, 8)
ODD = Shape("odd", 6, 1408, 704, 4, 8)  # 44 and 22 words a row
DEQUANTIZE = jax.jit(dequantize_expert, static_argnums=3)
DEMO = Shape("demo", 6, 256, 128, 8, 8)


def random_choices(shape: Shape, tokens: int, top_k: int, seed: int) -> np.ndarray:
    """Choices of distinct experts; expert 1 is idle, token 0 has none (a lone token has one)."""
    rng = np.random.default_rng(seed)
    busy = np.delete(np.arange(shape.experts), 1)
    ids = np.stack([rng.permutation(busy)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[0, 0] = shape.experts
    if tokens > 1:
        ids[0], ids[1, 0] = shape.experts, shape.experts
    return ids


class Experts:
    """Random experts of one layer in one pool, and the layer in float64."""

    def __init__(self, shape: Shape, bits: tuple[int, ...], page_words: int, seed: int):
        self.layouts = [shape.layout(name, page_words) for name in ("gate_up", "down")]
        pools, self.modules = [], []
        for layout in self.layouts:
            # as many pages at every width: one compilation serves all of them
            spare = pages_needed(layout, (8,) * shape.experts) - pages_needed(layout, bits)
            pool, module = random_experts(layout, bits, seed, 16 + spare)
            self.modules.append(shift_pages(module, sum(len(one) for one in pools)))
            pools.append(pool)
        self.pool = jnp.concatenate(pools)

    def weight(self, module: int, expert: int) -> np.ndarray:
        arguments = (self.pool, self.modules[module], jnp.int32(expert))
        return np.asarray(DEQUANTIZE(*arguments, self.layouts[module]), np.float64)

    def expected(
        self, x: jax.Array, ids: np.ndarray, weights: np.ndarray, activation: Activation
    ) -> np.ndarray:
        tokens = np.asarray(x, np.float64)
        out = np.zeros(tokens.shape)
        for expert in range(self.modules[0].bits.shape[0]):
            token, choice = np.nonzero(ids == expert)
            if not token.size:
                continue
            gate, up = np.split(tokens[token] @ self.weight(0, expert).T, 2, axis=1)
            if activation == "silu":
                gate = gate / (1 + np.exp(-gate))
            else:
                inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
                gate = 0.5 * gate * (1 + np.tanh(inner))
            product = (gate * up) @ self.weight(1, expert).T
            np.add.at(out, token, product * weights[token, choice][:, None])
        return out


@cache
def compiled(
    implementation: Implementation,
    gate_up_layout: MatrixLayout,
    down_layout: MatrixLayout,
    activation: Activation,
):
    return jax.jit(
        partial(
            paged_expert_ffn,
            gate_up_layout=gate_up_layout,
            down_layout=down_layout,
            activation=activation,
            implementation=implementation,
        )
    )


class PagedExpertFfnTests:
    """Cases that every implementation must pass."""

    implementation: ClassVar[Implementation]
    limit: ClassVar[float] = 1e-3

    def check(
        self,
        shape: Shape,
        bits: tuple[int, ...],
        tokens: int,
        *,
        page_words: int = 1024,
        activation: Activation = "silu",
        dtype: str = "float32",
        seed: int = 0,
    ):
        experts = Experts(shape, bits, page_words, seed)
        ids = random_choices(shape, tokens, 2, seed)
        rng = np.random.default_rng(seed + 1)
        values = rng.normal(size=(tokens, shape.embed)) * rng.uniform(0.01, 10, (tokens, 1))
        values[:, 5] *= 100  # an outlier channel, as real activations have
        x = jnp.asarray(values, dtype)
        weights = rng.random((tokens, 2)).astype(np.float32)
        run = compiled(self.implementation, *experts.layouts, activation)
        arguments = (x, jnp.asarray(ids), jnp.asarray(weights))
        out = np.asarray(run(*arguments, experts.pool, *experts.modules), np.float64)
        expected = experts.expected(x, ids, weights, activation)
        assert not out[(ids == shape.experts).all(axis=1)].any()
        assert np.linalg.norm(out - expected) < self.limit * np.linalg.norm(expected)
        poisoned = self.poison(experts)
        again = np.asarray(run(*arguments, poisoned, *experts.modules), np.float64)
        np.testing.assert_array_equal(again, out)

    def poison(self, experts: Experts) -> jax.Array:
        """The pool with every page overwritten that no expert holds."""
        owned = np.zeros(len(experts.pool), bool)
        for module in experts.modules:
            owned[np.asarray(module.planes).reshape(-1)] = True
            owned[np.asarray(module.tables).reshape(-1)] = True
        owned[0] = False
        return jnp.where(jnp.asarray(owned)[:, None], experts.pool, jnp.uint32(0x7FC07FC0))

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_one_width(self, bits):
        self.check(DEMO, (bits,) * 6, 3, seed=bits)

    def test_mixed_widths_and_short_rows(self):
        self.check(ODD, WIDTHS, 5, page_words=16384, activation="gelu_tanh")

    def test_experts_with_more_tokens_than_a_unit(self):
        self.check(DEMO, WIDTHS, 30, seed=3)

    def test_prefill(self):
        self.check(DEMO, WIDTHS, 400, seed=4)


class TestXla(PagedExpertFfnTests):
    implementation = "xla"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="runs for real there")
class TestPallasInterpret(PagedExpertFfnTests):
    implementation = "pallas"

    @pytest.mark.slow
    def test_experts_with_more_tokens_than_a_unit(self):
        super().test_experts_with_more_tokens_than_a_unit()

    @pytest.mark.slow
    def test_prefill(self):
        super().test_prefill()


@pytest.mark.gpu
class TestPallasGpu(PagedExpertFfnTests):
    implementation = "pallas"

    @pytest.mark.parametrize(
        ("tokens", "activation"), [(1, "silu"), (16, "gelu_tanh"), (64, "silu"), (700, "gelu_tanh")]
    )
    def test_short_rows(self, tokens, activation):
        self.check(ODD, WIDTHS, tokens, page_words=16384, activation=activation, seed=tokens)

    @pytest.mark.parametrize("tokens", [3, 200])
    @pytest.mark.parametrize("bits", WIDTHS)
    def test_every_width(self, bits, tokens):
        self.check(ODD, (bits,) * 6, tokens, page_words=16384, dtype="bfloat16", seed=bits)

    def test_rows_that_do_not_fill_a_page(self):
        self.check(Shape("long rows", 6, 512, 14336, 1, 1), WIDTHS, 7, page_words=16384)


@pytest.mark.parametrize(
    "shape",
    # the quick one has the most experts and the shortest rows
    [SHAPES[-1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:-1])],
    ids=lambda shape: shape.model,
)
@pytest.mark.parametrize("tokens_an_expert", [1, pytest.param(16, marks=pytest.mark.slow), 128])
def test_lowers_for_h200(shape: Shape, tokens_an_expert: int):
    layouts = [shape.layout(name) for name in ("gate_up", "down")]
    pages = []
    for layout in layouts:
        sizes = (
            (shape.experts,),
            (shape.experts, layout.parent_bits, layout.plane_pages),
            (shape.experts, layout.most_table_pages),
        )
        arrays: list[Any] = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
        pages.append(ModulePages(*arrays))
    tokens = tokens_an_expert * shape.experts // 2
    function = partial(
        paged_expert_ffn,
        gate_up_layout=layouts[0],
        down_layout=layouts[1],
        activation="silu",
        implementation="pallas",
    )
    text = lowered_for_h200(
        function,
        jax.ShapeDtypeStruct((tokens, shape.embed), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, 2), jnp.int32),
        jax.ShapeDtypeStruct((tokens, 2), jnp.float32),
        jax.ShapeDtypeStruct((1000, layouts[0].page_words), jnp.uint32),
        *pages,
    )
    assert "mosaic_gpu" in text
