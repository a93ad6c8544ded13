"""The allocator against a plain model of it, under random operations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pw_jax.paging.allocator import OutOfPagesError, Owner, PageAllocator


@given(st.integers(2, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_no_page_is_lost_or_given_twice(pages, operations):
    allocator = PageAllocator(pages)
    held: list[tuple[Owner, np.ndarray]] = []
    for take, size in operations:
        if take:
            owner = Owner.KV if size % 2 else Owner.WEIGHT
            if size > allocator.free:
                with pytest.raises(OutOfPagesError):
                    allocator.take(size, owner)
            else:
                held.append((owner, allocator.take(size, owner)))
        elif held:
            owner, ids = held.pop(size % len(held))
            allocator.give(ids, owner)
        taken = np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in held)])
        assert len(np.unique(taken)) == len(taken)
        assert 0 not in taken
        assert allocator.free == pages - 1 - len(taken)
        for owner in (Owner.KV, Owner.WEIGHT):
            own = [ids for kind, ids in held if kind == owner]
            expected = np.sort(np.concatenate([np.zeros(0, np.int32), *own]))
            assert np.array_equal(allocator.owned_ids(owner), expected)


def test_wrong_returns_are_refused_and_change_nothing():
    allocator = PageAllocator(8)
    ids = allocator.take(3, Owner.KV)
    for wrong in (ids[[0, 0]], np.array([0], np.int32), np.array([7], np.int32)):
        with pytest.raises(ValueError, match="not KV"):
            allocator.give(wrong, Owner.KV)
    with pytest.raises(ValueError, match="not WEIGHT"):
        allocator.give(ids, Owner.WEIGHT)
    assert allocator.free == 4
    allocator.give(ids, Owner.KV)
    with pytest.raises(ValueError, match="not KV"):
        allocator.give(ids, Owner.KV)
