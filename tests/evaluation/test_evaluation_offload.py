"""Misses of a cache of whole experts against an ordered dictionary."""

from collections import OrderedDict

import numpy as np
import pytest

from pw_jax.evaluation.offload import decode_steps, lru_misses

TOKENS, LAYERS, EXPERTS = 60, 3, 6


@pytest.fixture
def chosen():
    """Two experts a layer and token, some layers with favourites."""
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((TOKENS, LAYERS, EXPERTS))
    scores[:, 1] += np.arange(EXPERTS)
    return scores >= np.sort(scores, axis=-1)[..., -2:-1]


def plain_misses(chosen: np.ndarray, kept: int) -> list[int]:
    caches = [OrderedDict() for _ in range(LAYERS)]
    misses = []
    for step in chosen:
        misses.append(0)
        for cache, used in zip(caches, step, strict=True):
            wanted = np.flatnonzero(used)
            misses[-1] += sum(expert not in cache for expert in wanted)
            for expert in reversed(wanted):  # of equals the first counts as used last
                cache[expert] = True
                cache.move_to_end(expert)
            while len(cache) > kept:
                cache.popitem(last=False)
    return misses


@pytest.mark.parametrize("kept", range(EXPERTS + 1))
def test_misses_are_those_of_a_plain_lru_cache(chosen, kept):
    found = lru_misses(chosen, kept).tolist()
    assert found == plain_misses(chosen, kept)
    if kept == EXPERTS:
        assert sum(found) == chosen.any(axis=0).sum()  # each expert once
    if kept == 0:
        assert sum(found) == chosen.sum()


def test_a_step_of_a_batch_uses_what_any_sequence_uses(chosen):
    sequences = chosen.reshape(5, 12, LAYERS, EXPERTS)
    steps = decode_steps(sequences, 2)
    assert steps.shape == (2, 12, LAYERS, EXPERTS)
    np.testing.assert_array_equal(steps[1, 3], sequences[2, 3] | sequences[3, 3])
    with pytest.raises(ValueError, match="no batch of 6"):
        decode_steps(sequences, 6)
