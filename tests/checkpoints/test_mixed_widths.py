"""Dense experts at mixed widths against the same widths read out of the page pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.mixed_widths import (
    MixedWidths,
    expert_layout,
    host_pages,
    page_table,
    pages_held,
    second_half,
)
from pw_jax.models import registry
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.memory import PagedMemory
from pw_jax.paging.mover import Mover
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.planner.initial import total_pages
from sharding.placement import Placement

TOKENS = np.random.default_rng(1).integers(0, 96, 12).astype(np.int32)


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 9, (2, 4, 2))


def test_they_equal_paged_experts(store, bits):
    layout = expert_layout(store, "float32")
    model = registry.build_model(store.model_config, "paged", np.float32)
    model = registry.set_weights(model, store.load_dense(np.float32))
    allocator = PageAllocator(2000)
    table = WeightPageTable(layout, allocator, host_pages(store, layout))
    pool = jnp.zeros((2000, layout.page_words), jnp.uint32)
    pool = Mover(layout, pool, Placement.on_one_device()).write(
        pool, table.place(bits.astype(np.int8))
    )
    (group,) = layout.kv_groups
    blocks = group.blocks(len(TOKENS))
    own = allocator.take(2 * blocks, Owner.KV).reshape(2, 1, blocks)
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)[None]
    memory = PagedMemory(pool, (jnp.asarray(own),), positions, table.snapshot(), layout, "xla")
    hidden = model(jnp.asarray(TOKENS)[None], positions, memory).hidden[0, len(TOKENS) // 2 :]
    expected = jax.nn.log_softmax(model.logits(hidden))

    mixed = MixedWidths(store)
    index = jnp.asarray(mixed.index(bits))
    got = second_half(mixed.at(mixed.leaves, mixed.stacks, index), jnp.asarray(TOKENS))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    parent = second_half(mixed.model, jnp.asarray(TOKENS))
    assert np.abs(got - parent).max() > 1e-2  # the widths matter


def test_pages_held_are_those_of_the_table(store, bits):
    layout = expert_layout(store)
    held = pages_held(layout, host_pages(store, layout), bits)
    assert held == total_pages(bits, page_table(layout))
