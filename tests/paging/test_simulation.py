"""The weight page table through 100,000 random operations, on the host alone."""

import jax.numpy as jnp
import numpy as np

from pw_jax.models.config import ExpertShape, KvShape
from pw_jax.paging.allocator import OutOfPagesError, Owner, PageAllocator
from pw_jax.paging.host_pages import HostPages
from pw_jax.paging.layout import ExpertFormat, paging_layout
from pw_jax.paging.weight_pages import WeightPageTable

OPERATIONS = 100_000
CHECK_EVERY = 100
LAYERS, EXPERTS, FLOOR, PAGES = 2, 3, 4, 300


class NoCopies(HostPages):
    """Host pages of the right shapes and no content."""

    def __init__(self, layout):
        self._plane_images = [jnp.zeros((m.plane_pages, 1), jnp.uint32) for m in layout.matrices]
        self._table_images = [
            {bits: jnp.zeros((m.table_pages(bits), 1), jnp.uint32) for bits in m.widths}
            for m in layout.matrices
        ]

    def plane(self, block, plane):
        return self._plane_images[block[2]]

    def table(self, block, bits):
        return self._table_images[block[2]][bits]


def test_no_page_is_lost_or_owned_twice_and_no_floor_is_broken():
    layout = paging_layout(
        (KvShape(2, 16),),
        kv_dtype="bfloat16",
        page_words=128,
        expert_shape=ExpertShape(EXPERTS, 2, 64, 32, "silu"),
        expert_format=ExpertFormat(3, 8, (4, 4)),
        moe_layers=LAYERS,
    )
    allocator = PageAllocator(PAGES)
    table = WeightPageTable(layout, allocator, NoCopies(layout))
    table.place(np.full((LAYERS, EXPERTS, 2), FLOOR, np.int8))
    generator = np.random.default_rng(0)
    draws = generator.integers(0, 1 << 30, (OPERATIONS, 3))
    kv: list[np.ndarray] = []
    refused = raised = lowered = cancelled = 0
    for number, (kind, pick, amount) in enumerate(draws.tolist()):
        block = (pick % LAYERS, pick // 7 % EXPERTS, pick // 77 % 2)
        old, target = int(table._bits[block]), FLOOR + amount % (9 - FLOOR)
        loading = block in table._raises
        try:
            if kind % 4 == 0:
                kv.append(allocator.take(1 + amount % 12, Owner.KV))
            elif kind % 4 == 1 and kv:
                allocator.give(kv.pop(pick % len(kv)), Owner.KV)
            elif loading and amount % 2:
                table.commit_raise(block)
                raised += 1
            elif loading:
                table.cancel_raise(block)
                cancelled += 1
            elif target < old:
                table.lower(block, target)
                lowered += 1
            elif target > old:
                table.begin_raise(block, target)
        except OutOfPagesError:
            refused += 1
        if number % CHECK_EVERY == 0:
            check(table, allocator, kv)
    assert min(refused, raised, lowered, cancelled) > 1000, (refused, raised, lowered, cancelled)


def check(table: WeightPageTable, allocator: PageAllocator, kv: list[np.ndarray]) -> None:
    used = table.used_pages()
    assert len(np.unique(used)) == len(used)  # nobody's page is somebody else's
    assert np.array_equal(used, allocator.owned_ids(Owner.WEIGHT))
    held = np.sort(np.concatenate([*kv, np.zeros(0, np.int32)]))
    assert np.array_equal(held, allocator.owned_ids(Owner.KV))
    assert len(used) + len(held) + allocator.free + 1 == allocator.pages
    for layer, expert, module in np.ndindex(LAYERS, EXPERTS, 2):
        bits = int(table._bits[layer, expert, module])
        assert bits >= FLOOR
        planes = table._planes[module][layer, expert]
        assert (planes[:bits] > 0).all()  # committed bits are resident
        assert (planes[bits:] == 0).all()
        tables = table._tables[module][layer, expert]
        assert (tables > 0).sum() == table._matrices[module].table_pages(bits)
