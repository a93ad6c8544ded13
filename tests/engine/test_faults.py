"""Faults injected into every transition of a block; what was committed stays true."""

import dataclasses

import numpy as np
import pytest
from engine_doubles import MemoryExperts
from test_engine import CONFIG, some_prompts

from pw_jax.engine import precision as precision_module
from pw_jax.engine.engine import Engine
from pw_jax.paging.allocator import Owner
from pw_jax.planner.config import PlannerConfig

PLANNER = PlannerConfig(bucket_floors=(3, 3, 3), restore_residence_steps=0)


@pytest.fixture
def engine(experts: MemoryExperts) -> Engine:
    config = dataclasses.replace(CONFIG, memory_budget_bytes=2 << 20, planner=PLANNER)
    return Engine(experts.paged(), config, experts)


def precision_of(engine: Engine):
    assert engine.precision is not None
    return engine.precision, engine.precision._mover


def lower(engine: Engine, pages: int) -> int:
    precision, _ = precision_of(engine)
    pool, freed = precision.relieve(engine._device.caches.pool, pages)
    engine._device.set_pool(pool)
    engine.check_pages()
    return freed


def advance(engine: Engine, restore: bool = True) -> None:
    precision, _ = precision_of(engine)
    engine._device.set_pool(precision.advance(engine._device.caches.pool, restore=restore))
    engine.check_pages()


def begin_raises(engine: Engine) -> None:
    """One boundary plans, the next begins."""
    advance(engine)
    advance(engine)


def finish_raises(engine: Engine) -> None:
    precision, _ = precision_of(engine)
    for _ in range(200):
        advance(engine)
        if precision.mean_bits == 8:
            return
    raise AssertionError("precision never came back")


def broken(*arguments):
    raise RuntimeError("the copy failed")


def tokens(engine: Engine):
    return [g.tokens for g in engine.generate(some_prompts(7, 20), 8, stop_token_ids=())]


def test_a_failed_copy_of_a_lowering_changes_nothing(engine, monkeypatch):
    precision, mover = precision_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(mover, "send", broken)
        assert lower(engine, 5) == 0
    assert precision.mean_bits == 8
    assert precision.moves.failed > 0
    assert precision.moves.lowered == 0
    assert lower(engine, 5) >= 5


def test_a_copy_that_cannot_start_returns_its_pages(engine, monkeypatch):
    precision, mover = precision_of(engine)
    lower(engine, 10)
    free, bits = engine.allocator.free, precision.table.bits
    with monkeypatch.context() as patch:
        patch.setattr(mover, "start", broken)
        begin_raises(engine)
    assert precision.moves.failed > 0
    assert not precision.table.loading
    assert engine.allocator.free == free
    np.testing.assert_array_equal(precision.table.bits, bits)
    finish_raises(engine)


def test_a_copy_that_fails_on_its_way_leaves_the_old_width(engine, monkeypatch):
    precision, mover = precision_of(engine)
    lower(engine, 10)
    bits = precision.table.bits
    begin_raises(engine)
    loading = list(precision.table.loading)
    assert loading
    with monkeypatch.context() as patch:
        patch.setattr(mover, "settled", lambda due: ([], loading))
        advance(engine, restore=False)
    assert not precision.table.loading
    assert mover.staged_bytes == 0
    np.testing.assert_array_equal(precision.table.bits, bits)
    assert precision.moves.failed == len(loading)


def test_a_plan_superseded_while_loading_is_given_up_first(engine):
    precision, _ = precision_of(engine)
    lower(engine, 10)
    bits = precision.table.bits
    begin_raises(engine)
    reserved = len(precision.table.loading)
    assert reserved
    lower(engine, 1)
    assert len(precision.table.loading) < reserved
    np.testing.assert_array_equal(precision.table.bits, bits)
    assert precision.moves.events[-1].kind == "cancel"


def test_blocks_lowered_and_raised_in_consecutive_steps_read_right(engine):
    expected = tokens(engine)
    for _ in range(3):
        lower(engine, 40)
        begin_raises(engine)
        lower(engine, 10)
        finish_raises(engine)
    assert tokens(engine) == expected


def test_a_full_pool_starts_no_raise_and_breaks_nothing(engine):
    precision, _ = precision_of(engine)
    lower(engine, 10)
    advance(engine)  # plans raises
    held = engine.allocator.take(engine.allocator.free, Owner.RESERVED)
    bits = precision.table.bits
    pool = precision.advance(engine._device.caches.pool)
    engine._device.set_pool(pool)
    assert not precision.table.loading
    np.testing.assert_array_equal(precision.table.bits, bits)
    engine.allocator.give(held, Owner.RESERVED)
    finish_raises(engine)


def test_stopping_during_a_move_returns_what_it_had_reserved(engine):
    precision, mover = precision_of(engine)
    expected = tokens(engine)
    lower(engine, 30)
    free, bits = engine.allocator.free, precision.table.bits
    begin_raises(engine)
    assert engine.allocator.free < free
    precision.cancel_moves()
    engine.check_pages()
    assert engine.allocator.free == free
    assert mover.staged_bytes == 0
    np.testing.assert_array_equal(precision.table.bits, bits)
    finish_raises(engine)
    assert tokens(engine) == expected


def test_a_plan_that_found_nothing_waits_for_a_change(experts, monkeypatch):
    """Planning costs more than a step: with nothing new, it must not be done again."""
    planner = dataclasses.replace(PLANNER, restore_residence_steps=8)
    config = dataclasses.replace(CONFIG, memory_budget_bytes=2 << 20, planner=planner)
    engine = Engine(experts.paged(), config, experts)
    lower(engine, 10)
    plans = []
    plan_restore = precision_module.plan_restore
    monkeypatch.setattr(
        precision_module, "plan_restore", lambda *a: plans.append(a) or plan_restore(*a)
    )
    for _ in range(9):  # the lowered blocks come of age at the last of these
        advance(engine)
    assert len(plans) == 3  # the first, when the others come of age, and now
    finish_raises(engine)
    made = len(plans)
    for _ in range(20):
        advance(engine)
    assert len(plans) == made
