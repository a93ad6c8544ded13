"""Experts give pages to the KV cache in mid-generation, and get them back."""

import dataclasses

import numpy as np
import pytest
from engine_doubles import MemoryExperts, no_compilation
from test_engine import CONFIG, some_prompts

from pw_jax.engine.engine import Engine
from pw_jax.engine.sequence import Request
from pw_jax.paging.allocator import Owner
from pw_jax.planner.config import PlannerConfig

FLOOR_3 = PlannerConfig(bucket_floors=(3, 3, 3), restore_residence_steps=4)


def pressed_engine(experts: MemoryExperts, kib: int, planner: PlannerConfig = FLOOR_3) -> Engine:
    config = dataclasses.replace(CONFIG, memory_budget_bytes=kib << 10, planner=planner)
    return Engine(experts.paged(), config, experts)


def run_checked(engine: Engine) -> list[np.ndarray]:
    """Runs until idle, accounting for every page after each step; the widths after each step."""
    assert engine.precision is not None
    widths = []
    while not engine.idle:
        engine.step()
        engine.check_pages()
        widths.append(engine.precision.table.bits)
    return widths


def test_widths_fall_from_eight_to_three_and_rise_again(experts):
    engine = pressed_engine(experts, 530)
    assert engine.precision is not None
    assert engine.precision.mean_bits == 8
    sequences = [engine.submit(Request(tuple(p), 60)) for p in some_prompts(40, 40, 40, 20)]
    with no_compilation():
        widths = run_checked(engine)
    assert min(w.min() for w in widths) == 3
    assert [len(s.generated) for s in sequences] == [60] * 4
    assert engine.precision.moves.raised > 0
    assert widths[-1].mean() > min(w.mean() for w in widths)
    assert engine.allocator.owned(Owner.KV) == 0


def test_floors_hold_and_the_youngest_is_preempted_instead(experts):
    floors = PlannerConfig(bucket_floors=(6, 6, 6))
    engine = pressed_engine(experts, 520, floors)
    sequences = [engine.submit(Request(tuple(p), 60)) for p in some_prompts(40, 40, 40)]
    widths = run_checked(engine)
    assert min(w.min() for w in widths) >= 6
    assert sum(s.preemptions for s in sequences) > 0
    assert sequences[0].preemptions == 0
    assert [len(s.generated) for s in sequences] == [60] * 3


def test_a_preempted_sequence_equals_one_that_was_not(experts):
    """Widths are held fixed, so that only the preemption can make a difference."""
    fixed = PlannerConfig(bucket_floors=(8, 8, 8))
    prompts = some_prompts(40, 40, 40)
    roomy, pressed = pressed_engine(experts, 2048, fixed), pressed_engine(experts, 530, fixed)
    expected = roomy.generate(prompts, 60, stop_token_ids=())
    got = pressed.generate(prompts, 60, stop_token_ids=())
    assert sum(g.preemptions for g in got) > 0
    assert sum(g.preemptions for g in expected) == 0
    assert [g.tokens for g in got] == [g.tokens for g in expected]


def test_reused_pages_do_not_leak_into_others(experts):
    """Poison: free pages hold NaN patterns; nobody may notice."""
    engine = pressed_engine(experts, 2048)
    prompts = some_prompts(5, 33)
    expected = engine.generate(prompts, 12, stop_token_ids=())
    free = engine.allocator.owned_ids(Owner.FREE)
    pool = engine._device.caches.pool.at[np.append(free, 0)].set(np.uint32(0x7FC07FC0))
    engine._device.set_pool(pool)
    again = engine.generate(prompts, 12, stop_token_ids=())
    assert [g.tokens for g in again] == [g.tokens for g in expected]


def test_the_pool_is_never_copied(experts):
    engine = pressed_engine(experts, 64 << 10)
    assert engine.plan.pool_bytes > 60 << 20
    assert engine.temporary_bytes < engine.plan.pool_bytes // 100


@pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_unpaged_experts_run_the_same_engine(experts, kv_dtype):
    config = dataclasses.replace(CONFIG, kv_dtype=kv_dtype, page_bytes=2048)
    engine = Engine(experts.model, config)
    assert engine.precision is None
    generations = engine.generate(some_prompts(4, 9), 5, stop_token_ids=())
    assert [len(g.tokens) for g in generations] == [5, 5]
    engine.check_pages()
