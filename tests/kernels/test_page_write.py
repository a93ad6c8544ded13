from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_pool import lowered_for_h200, words_of

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.page_write import write_kv, write_pages
from pallas_kernels.paged_attention import paged_attention

LAYOUTS = {
    "demo": KvLayout(3, 64, "bfloat16", 1024),
    "float32": KvLayout(2, 32, "float32", 512),
    "96_dimensions": KvLayout(1, 96, "bfloat16", 512),
    "mixtral": KvLayout(8, 128, "bfloat16", 16384),
}


def draw_pool(random: np.random.Generator, pages: int, words: int) -> np.ndarray:
    return random.integers(0, 2**32, (pages, words), dtype=np.uint32)


class PageWriteTests:
    """Cases that every implementation must pass."""

    implementation: ClassVar[Implementation]

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_kv(self, name):
        layout, random, tokens = LAYOUTS[name], np.random.default_rng(0), 7
        pool = draw_pool(random, 6, layout.page_words)
        k, v = random.normal(size=(2, tokens, layout.kv_heads, layout.head_dim))
        k, v = jnp.asarray(k, layout.dtype), jnp.asarray(v, layout.dtype)
        pages = np.array([5, 5, 1, 0, 2, 0, 3], np.int32)  # two of padding
        offsets = np.array([0, 1, layout.tokens_per_page - 1, 0, 1, 0, 0], np.int32)
        expected = pool.copy()
        shape = (2, layout.kv_heads, layout.tokens_per_page, layout.words_per_head)
        for token, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
            view = expected[page, : np.prod(shape)].reshape(shape)
            view[0, :, offset] = words_of(np.asarray(k[token]), layout)
            view[1, :, offset] = words_of(np.asarray(v[token]), layout)
        out = write_kv(
            jnp.asarray(pool),
            k,
            v,
            jnp.asarray(pages),
            jnp.asarray(offsets),
            layout=layout,
            implementation=self.implementation,
        )
        np.testing.assert_array_equal(np.asarray(out)[1:], expected[1:])

    def test_kv_takes_wider_input(self):
        layout = LAYOUTS["demo"]
        x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 64)), jnp.float32)
        where = jnp.ones((1,), jnp.int32)
        out = write_kv(
            jnp.zeros((2, 1024), jnp.uint32),
            x,
            x,
            where,
            where,
            layout=layout,
            implementation=self.implementation,
        )
        page = np.asarray(out)[1, : 6 * 4 * 32].reshape(2, 3, 4, 32)
        np.testing.assert_array_equal(
            page[0, :, 1], words_of(np.asarray(x[0].astype("bfloat16")), layout)
        )

    @pytest.mark.parametrize("words", [384, 1024, 16384])
    def test_pages(self, words):
        random = np.random.default_rng(2)
        pool, images = draw_pool(random, 9, words), draw_pool(random, 5, words)
        ids = np.array([8, 0, 1, 0, 4], np.int32)
        expected = pool.copy()
        expected[ids] = images
        out = write_pages(
            jnp.asarray(pool),
            jnp.asarray(ids),
            jnp.asarray(images),
            implementation=self.implementation,
        )
        np.testing.assert_array_equal(np.asarray(out)[1:], expected[1:])


class InPlaceTests:
    """A donated pool is written where it lies."""

    implementation: ClassVar[Implementation]

    def check(self, function, *operands):
        pool = jax.ShapeDtypeStruct((4096, 16384), jnp.uint32)
        compiled = jax.jit(function, donate_argnums=0).lower(pool, *operands).compile()
        memory, size = compiled.memory_analysis(), 4 * pool.size
        assert memory is not None
        assert memory.temp_size_in_bytes < size / 100
        assert memory.alias_size_in_bytes == size

    def test_kv_in_place(self):
        layout = LAYOUTS["mixtral"]
        token = jax.ShapeDtypeStruct((16, 8, 128), jnp.bfloat16)
        where = jax.ShapeDtypeStruct((16,), jnp.int32)

        def write(pool, k, v, pages, offsets):
            for _ in range(2):  # two layers of a step
                pool = write_kv(
                    pool, k, v, pages, offsets, layout=layout, implementation=self.implementation
                )
            return pool

        self.check(write, token, token, where, where)

    def test_layers_in_place(self):
        """Layers that write and then read one pool need no copy of it."""
        layout = LAYOUTS["mixtral"]
        options = {"layout": layout, "implementation": self.implementation}

        def layers(pool, q, pages, positions):
            for _ in range(3):
                k = q[:, 0, :8]
                pool = write_kv(pool, k, k, pages[:, 0], positions[:, 0], **options)
                q = paged_attention(q, pool, pages, positions, scale=0.1, **options)
            return pool, q

        shapes = ((2, 1, 32, 128), jnp.bfloat16), ((2, 2), jnp.int32), ((2, 1), jnp.int32)
        self.check(layers, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))

    def test_pages_in_place(self):
        def write(pool, ids, images):
            return write_pages(pool, ids, images, implementation=self.implementation)

        shapes = ((16,), jnp.int32), ((16, 16384), jnp.uint32)
        self.check(write, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="tested on the CPU")
class TestXla(PageWriteTests, InPlaceTests):
    implementation = "xla"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter needs no GPU")
class TestPallasInterpreted(PageWriteTests):
    implementation = "pallas"


@pytest.mark.gpu
class TestPallasGpu(PageWriteTests, InPlaceTests):
    implementation = "pallas"


@pytest.mark.gpu
class TestXlaGpu(PageWriteTests, InPlaceTests):
    implementation = "xla"


@pytest.mark.parametrize("name", LAYOUTS)
def test_kv_lowers_for_h200(name):
    layout = LAYOUTS[name]
    token = jax.ShapeDtypeStruct((512, layout.kv_heads, layout.head_dim), layout.dtype)
    where = jax.ShapeDtypeStruct((512,), jnp.int32)
    pool = jax.ShapeDtypeStruct((100_000, layout.page_words), jnp.uint32)

    def write(pool, k, v, pages, offsets):
        return write_kv(pool, k, v, pages, offsets, layout=layout, implementation="pallas")

    text = lowered_for_h200(write, pool, token, token, where, where)
    assert "xla.gpu.triton" in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize("words", [16384, 384])
def test_pages_lower_for_h200(words):
    pool, ids = jax.ShapeDtypeStruct((100_000, words), jnp.uint32), jnp.zeros((64,), jnp.int32)
    images = jax.ShapeDtypeStruct((64, words), jnp.uint32)

    def write(pool, ids, images):
        return write_pages(pool, ids, images, implementation="pallas")

    text = lowered_for_h200(write, pool, ids, images)
    assert "xla.gpu.triton" in text
    assert "output_operand_alias" in text
