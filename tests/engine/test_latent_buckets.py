"""Which size of page tables a step over latents takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.engine.buckets import UsedTables
from pw_jax.engine.compiled import no_new_pages
from pw_jax.engine.reuse import no_reuse
from pw_jax.models.config import KvShape
from pw_jax.models.latent import LatentKvShape
from pw_jax.paging.layout import paging_layout

LAYOUT = paging_layout(
    (LatentKvShape(16, 16), KvShape(1, 16), LatentKvShape(8, 8), LatentKvShape(8, 8)),
    kv_dtype="float32",
    page_words=128,
)
TOKENS = [group.layout.tokens_per_page for group in LAYOUT.kv_groups]
SLOTS, MOST = 5, 128
BLOCKS = tuple(group.blocks(MOST) for group in LAYOUT.kv_groups)


def tables(least: int) -> UsedTables:
    return UsedTables(LAYOUT, SLOTS, BLOCKS, MOST, least)


def test_few_sizes_and_one_where_nothing_is_rebuilt():
    made = tables(16)
    assert TOKENS == [4, 4, 8]
    assert [size.columns for size in made.prefill] == [
        (tokens // 4, None, tokens // 8) for tokens in (16, 32, 64, 128)
    ]
    assert [size.columns for size in made.decode] == [
        *(size.columns for size in made.prefill),
        (32, None, 16),
    ]
    assert [size.capacity for size in made.decode] == [
        *((5 * tokens // 4, None, 5 * tokens // 8) for tokens in (16, 32, 64)),
        (3 * 32, None, 3 * 16),
        (5 * 32, None, 5 * 16),
    ]
    assert len(tables(MOST).decode) == len(tables(MOST).prefill) == 1
    full = paging_layout((KvShape(1, 16),), kv_dtype="float32", page_words=128)
    whole = UsedTables(full, SLOTS, (32,), MOST, 16)
    assert whole.decode == whole.prefill
    assert whole.decode_size(np.full(SLOTS, 9, np.int32)) == (0, (None,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, MOST), min_size=SLOTS, max_size=SLOTS), st.booleans())
def test_the_smallest_size_that_holds_what_is_used(lengths, shared):
    made = tables(16)
    for group, table in made._tables.items():
        table[:] = np.random.default_rng(0).permutation(table.size).reshape(table.shape) + 1
        if shared:
            table[1:, : 32 // TOKENS[group]] = table[0, : 32 // TOKENS[group]]
    index, compact = made.decode_size(np.array(lengths, np.int32))
    fits = []
    for size in made.decode:
        fits.append(True)
        for group, table in made._tables.items():
            used = [-(-length // TOKENS[group]) for length in lengths]
            pages = {table[row, block] for row in range(SLOTS) for block in range(used[row])}
            columns, capacity = size.columns[group], size.capacity[group]
            assert columns is not None
            assert capacity is not None
            fits[-1] &= len(pages) <= capacity and max(used) <= columns
    assert index == fits.index(True)
    assert compact[1] is None
    for group, table in made._tables.items():
        found = compact[group]
        assert found is not None
        assert found.remap.shape == (SLOTS, made.decode[index].columns[group])
        assert len(found.sequence) == made.decode[index].capacity[group]
        for row, length in enumerate(lengths):
            for block in range(-(-length // TOKENS[group])):
                number = found.remap[row, block]
                assert table[found.sequence[number], found.block[number]] == table[row, block]


def test_the_host_has_the_tables_that_the_device_has():
    made = tables(16)
    new = no_new_pages(LAYOUT, 3, BLOCKS)
    new[2].slots[:2], new[2].blocks[:2], new[2].pages[:2] = (4, 1), (0, 15), ((7, 8), (9, 10))
    made.take_in(new)
    expected = np.zeros((SLOTS, 16), np.int32)
    expected[4, 0], expected[1, 15] = 7, 9
    assert np.array_equal(made._tables[2], expected)
    arguments = no_reuse(LAYOUT, BLOCKS)
    arguments.slot[...] = 1
    arguments.pages[2][:, :2] = ((3, 4), (5, 6))
    made.take_over(arguments)
    expected[1] = [3, 4, *[0] * 14]
    assert np.array_equal(made._tables[2], expected)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 4), (16, 4), (17, 8), (128, 32)])
def test_prefill_looks_at_no_more_than_its_sequence_needs(tokens, columns):
    made = tables(16)
    assert made.prefill[made.prefill_size(tokens)].columns[0] == columns
