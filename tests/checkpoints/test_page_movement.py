"""The experiment on page movement, on a tiny model under a load that comes and goes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.mixed_widths import page_table
from checkpoints.page_movement import PHASES, PLANNER, Load, PageMovement, Turn
from pw_jax.models.memory import SequenceMemory

TOKENS = np.random.default_rng(2).integers(0, 96, (2, 32)).astype(np.int32)
LOAD = Load(sequences=4, tokens=64, comes=2, goes=7)
QUICK = dataclasses.replace(
    PLANNER, restore_residence_steps=4, release_watermark_blocks=0, restore_watermark_blocks=1
)


@pytest.fixture(scope="module")
def experiment(store) -> PageMovement:
    return PageMovement(store, LOAD, turn_tokens=2, fixed_bits=5.0, planner=QUICK)


@pytest.fixture(scope="module")
def turns(experiment) -> dict[bool, list[Turn]]:
    model = experiment._mixed.model
    positions = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), TOKENS.shape)
    out = model(jnp.asarray(TOKENS), positions, SequenceMemory(jnp.ones(TOKENS.shape, bool)))
    logits = np.asarray(model.logits(out.hidden), np.float64)
    reference = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    reference = reference.astype(np.float32)
    return {m: list(experiment.run(TOKENS, reference, moving=m)) for m in (False, True)}


def test_the_load_comes_and_goes():
    load = Load(sequences=2, tokens=32, comes=2, goes=5)
    assert [list(load.running(turn)) for turn in range(8)] == [
        [], [], [0], [0, 1], [0, 1], [0, 1], [1], []
    ]  # fmt: skip
    before, rising, peak, after = PHASES
    assert [load.phase(turn) for turn in range(8)] == [
        before, before, rising, peak, peak, after, after, after
    ]  # fmt: skip


@pytest.mark.slow
def test_fixed_widths_stay_and_moving_ones_follow_the_load(turns):
    fixed = {turn.mean_bits for turn in turns[False]}
    moving = [turn.mean_bits for turn in turns[True]]
    assert len(fixed) == 1
    assert min(moving) < moving[0]
    assert moving[-1] > min(moving)
    assert min(moving) >= fixed.pop() - 1
    for before, after in zip(turns[False], turns[True], strict=True):
        assert before.kv_pages == after.kv_pages


@pytest.mark.slow
def test_parent_bits_have_no_divergence(turns, experiment):
    """Texts given a few tokens at a time are what they are when given whole."""
    full = page_table(experiment._layout)[:, -1].sum() * 8
    at_parent = [turn for turn in turns[True] if turn.weight_pages == full]
    assert at_parent
    for turn in at_parent:
        assert turn.kl == pytest.approx([0, 0], abs=1e-5)
    assert np.mean([turn.kl for turn in turns[False]]) > 1e-4
