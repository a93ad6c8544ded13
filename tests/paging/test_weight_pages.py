"""The weight page table under random moves: what it says is always what the pool holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_expert_ffn.reference import dequantize_expert
from pw_jax.models.config import ExpertShape, KvShape
from pw_jax.paging.allocator import OutOfPagesError, Owner, PageAllocator
from pw_jax.paging.host_pages import HostPages
from pw_jax.paging.layout import ExpertFormat, PagingLayout, paging_layout
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.quantizer.format import QuantizedMatrix, dequantize
from sharding.placement import Placement, host_memory

LAYERS, EXPERTS = 2, 3
SHAPE = ExpertShape(EXPERTS, 2, 64, 32, "silu")


class Arrays(NamedTuple):
    planes: np.ndarray
    tables: dict[int, np.ndarray]
    scales: dict[int, np.ndarray]
    damage: np.ndarray


class Paged(NamedTuple):
    layout: PagingLayout
    allocator: PageAllocator
    table: WeightPageTable
    mover: Mover
    modules: dict[tuple[int, int], Arrays]


def random_module(generator: np.random.Generator, rows: int, columns: int) -> Arrays:
    widths = range(3, 9)
    return Arrays(
        generator.integers(0, 2**32, (EXPERTS, 8, rows, columns // 32), dtype=np.uint32),
        {
            bits: generator.integers(-120, 120, (EXPERTS, rows // 4, 1 << bits)).astype(
                np.int8 if bits <= 6 else np.int16
            )
            for bits in widths
        },
        {bits: generator.standard_normal((EXPERTS, rows), np.float32) for bits in widths},
        np.zeros((EXPERTS, len(widths))),
    )


@pytest.fixture
def paged() -> Paged:
    layout = paging_layout(
        (KvShape(2, 16),),
        kv_dtype="bfloat16",
        page_words=128,
        expert_shape=SHAPE,
        expert_format=ExpertFormat(3, 8, (4, 4)),
        moe_layers=LAYERS,
    )
    generator = np.random.default_rng(0)
    host, modules = HostPages(layout, host_memory()), {}
    assert layout.matrices is not None
    for layer in range(LAYERS):
        for module, matrix in enumerate(layout.matrices):
            modules[layer, module] = random_module(generator, matrix.rows, matrix.columns)
            host.add(layer, module, [modules[layer, module]])
    allocator = PageAllocator(600)
    pool = jnp.zeros((600, 128), jnp.uint32)
    table = WeightPageTable(layout, allocator, host)
    return Paged(layout, allocator, table, Mover(layout, pool, Placement.on_one_device()), modules)


def check(paged: Paged, pool: jax.Array) -> None:
    """Every block reads back as its committed width, and every page is accounted for."""
    owned = paged.allocator.owned_ids(Owner.WEIGHT)
    assert np.array_equal(paged.table.used_pages(), owned)
    assert paged.layout.matrices is not None
    for layer, expert, module in np.ndindex(LAYERS, EXPERTS, 2):
        arrays, matrix = paged.modules[layer, module], paged.layout.matrices[module]
        bits = int(paged.table.bits[layer, expert, module])
        quantized = QuantizedMatrix(
            arrays.planes[expert],
            {b: table[expert] for b, table in arrays.tables.items()},
            {b: scale[expert] for b, scale in arrays.scales.items()},
        )
        pages = paged.table.snapshot()[module].layer(layer)
        read = READ(pool, pages, jnp.int32(expert), matrix)
        np.testing.assert_array_equal(read, dequantize(quantized, bits))


READ = jax.jit(dequantize_expert, static_argnames="layout")


def test_random_moves_keep_pool_and_table_in_step(paged):
    generator = np.random.default_rng(1)
    bits = generator.integers(3, 9, (LAYERS, EXPERTS, 2)).astype(np.int8)
    pool = paged.mover.write(jnp.zeros((600, 128), jnp.uint32), paged.table.place(bits))
    check(paged, pool)
    for _ in range(60):
        block = tuple(int(generator.integers(n)) for n in (LAYERS, EXPERTS, 2))
        old, loading = int(paged.table.bits[block]), paged.table.loading
        target = int(generator.integers(3, 9))
        if block in loading:
            if generator.random() < 0.5:
                paged.table.commit_raise(block)
                pool = paged.mover.write(pool, paged.mover.take(block))
            else:
                paged.mover.take(block)
                paged.table.cancel_raise(block)
        elif target < old:
            pool = paged.mover.write(pool, paged.table.lower(block, target))
        elif target > old:
            paged.mover.start({block: paged.table.begin_raise(block, target)})
        check(paged, pool)


def test_a_raise_without_free_pages_changes_nothing(paged):
    pool = jnp.zeros((600, 128), jnp.uint32)
    low = np.full((LAYERS, EXPERTS, 2), 3, np.int8)
    pool = paged.mover.write(pool, paged.table.place(low))
    paged.allocator.take(paged.allocator.free - 1, Owner.KV)
    with pytest.raises(OutOfPagesError):
        paged.table.begin_raise((0, 0, 0), 8)
    assert not paged.table.loading
    check(paged, pool)


def test_lowering_needs_no_free_page(paged):
    pool = jnp.zeros((600, 128), jnp.uint32)
    high = np.full((LAYERS, EXPERTS, 2), 8, np.int8)
    pool = paged.mover.write(pool, paged.table.place(high))
    paged.allocator.take(paged.allocator.free, Owner.KV)
    pool = paged.mover.write(pool, paged.table.lower((1, 2, 1), 3))
    assert paged.allocator.free > 0
    check(paged, pool)


@pytest.mark.parametrize("bits", [2, 5, 9])
def test_impossible_moves_are_refused(paged, bits):
    paged.table.place(np.full((LAYERS, EXPERTS, 2), 5, np.int8))
    with pytest.raises(ValueError, match="cannot go"):
        paged.table.lower((0, 0, 0), bits)
    with pytest.raises(ValueError, match="cannot go"):
        paged.table.begin_raise((0, 0, 0), bits if bits != 9 else 4)
    paged.table.begin_raise((0, 0, 0), 7)
    with pytest.raises(ValueError, match="loading"):
        paged.table.lower((0, 0, 0), 3)


def test_a_snapshot_is_remade_only_after_a_change(paged):
    paged.table.place(np.full((LAYERS, EXPERTS, 2), 5, np.int8))
    first = paged.table.snapshot()
    assert paged.table.snapshot() is first
    paged.table.lower((0, 1, 0), 4)
    second = paged.table.snapshot()
    assert int(second[0].bits[0, 1]) == 4
    assert int(first[0].bits[0, 1]) == 5  # what a step was given does not change under it
