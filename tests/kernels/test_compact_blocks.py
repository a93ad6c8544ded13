"""The host's numbering of used pages, against its definition, and the interpolation of RoPE."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_reconstruct.compact import (
    bucket_sizes,
    compact_blocks,
    smallest_bucket,
)
from pallas_kernels.kv_reconstruct.nodes import Nodes, choose_nodes, tolerance_of


@st.composite
def batches(draw) -> tuple[np.ndarray, np.ndarray]:
    """Page tables with shared prefixes, and how many blocks of each are used."""
    batch, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    ids = draw(st.permutations(range(1, batch * blocks + 1)))
    pages = np.array(ids).reshape(batch, blocks)
    used = np.array(draw(st.lists(st.integers(0, blocks), min_size=batch, max_size=batch)))
    for row in range(1, batch):
        shared = draw(st.integers(0, min(used[row], used[row - 1])))
        pages[row, :shared] = pages[row - 1, :shared]
    return pages, used


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 4))
def test_every_used_page_has_one_number(batch, spare):
    pages, used = batch
    distinct = {pages[row, block] for row in range(len(pages)) for block in range(used[row])}
    capacity = len(distinct) + spare
    compact = compact_blocks(pages, used, capacity=capacity, columns=int(used.max()))
    named = pages[compact.sequence, compact.block]
    assert len(named) == capacity
    assert list(named[: len(distinct)]) == sorted(distinct)
    for row, count in enumerate(used):
        for block in range(count):
            number = compact.remap[row, block]
            assert named[number] == pages[row, block]
            assert compact.block[number] == block  # where its tokens are
    assert compact.remap.shape == (len(pages), used.max())
    assert {part.dtype for part in compact} == {np.dtype("int32")}


def test_single_block_and_first_page_above_zero():
    compact = compact_blocks(np.array([[7, 3]]), np.array([1]), capacity=2)
    assert compact.sequence.tolist() == [0, 0]
    assert compact.block.tolist() == [0, 0]
    assert compact.remap.tolist() == [[0, 0]]


def test_a_batch_that_shrinks_leaves_nothing_behind():
    pages = np.array([[5, 9, 2], [8, 1, 4]])
    for used in ([3, 2], [1, 0], [0, 0], [2, 3]):
        compact = compact_blocks(pages, np.array(used), capacity=6)
        for row, count in enumerate(used):
            assert not compact.remap[row, count:].any()


def test_too_small_a_bucket_is_refused():
    pages, used = np.arange(1, 7).reshape(2, 3), np.array([3, 1])
    with pytest.raises(ValueError, match="bucket of 3"):
        compact_blocks(pages, used, capacity=3)
    with pytest.raises(ValueError, match="2 columns"):
        compact_blocks(pages, used, capacity=6, columns=2)


@given(st.integers(1, 500), st.integers(2, 4))
def test_buckets_hold_everything_up_to_the_most(most, ratio):
    sizes = bucket_sizes(most, ratio)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(a < b <= ratio * a for a, b in pairwise(sizes))
    for wanted in {1, most, (most + 1) // 2}:
        index = smallest_bucket(sizes, wanted)
        assert sizes[index] >= wanted
        assert index == 0 or sizes[index - 1] < wanted
    with pytest.raises(ValueError, match="largest bucket"):
        smallest_bucket(sizes, most + 1)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interpolated_rotations_meet_the_exact_ones(theta, dtype):
    frequencies = tuple((theta ** -(np.arange(64) / 64)).tolist())
    tolerance = tolerance_of(dtype)
    nodes = choose_nodes(frequencies, 2048, 4, 1, tolerance)
    assert 0 < nodes.fast < 64  # some pairs are rebuilt, others not
    slow = np.array(frequencies[nodes.fast :])
    blocks = 2048 // nodes.block
    at_nodes = np.exp(1j * nodes.positions(blocks)[..., None] * slow)
    met = np.einsum("tm,xmd->xtd", nodes.weights(), at_nodes).reshape(-1, len(slow))
    exact = np.exp(1j * np.arange(2048)[:, None] * slow)
    assert np.abs(met - exact).max() < 1.01 * tolerance


def test_weights_of_one_node_are_one():
    assert Nodes(0, 5, 1).weights().tolist() == [[1.0]] * 5
