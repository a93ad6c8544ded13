"""Pages are found before they are needed, and no turn moves many blocks."""

from collections import defaultdict

import pytest
from test_engine import some_prompts
from test_pressure import FLOOR_3, pressed_engine

from pw_jax.engine.sequence import Request
from pw_jax.engine.trace import PlanEvent

MOVES = ("release", "restore", "commit")


@pytest.fixture(scope="module")
def run(experts) -> tuple[list[PlanEvent], list[int]]:
    """What moved while experts lost pages and got some back, and what was freed at once."""
    engine = pressed_engine(experts, 600)
    precision = engine.precision
    assert precision is not None
    relieve, at_once = precision.relieve, []

    def relieve_now(pool, pages):
        at_once.append(pages)
        return relieve(pool, pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "relieve", relieve_now)
        for prompt in some_prompts(20, 20, 20, 20):
            engine.submit(Request(tuple(prompt), 60))
        for _ in engine.run():
            engine.check_pages()
    assert any(record.mean_bits is not None and record.mean_bits < 4 for record in engine.trace)
    return precision.moves.events, at_once


def test_steps_find_their_pages_free(run):
    _, at_once = run
    assert not at_once


def test_a_turn_plans_or_moves_a_few_blocks(run):
    events, _ = run
    moved, planned, changed = defaultdict(int), set(), set()
    for event in events:
        if event.kind == "plan":
            planned.add(event.step)
        elif event.kind in MOVES:
            moved[event.step] += len(event.moves)
            if event.kind != "commit":  # what landed may be committed while the next is planned
                changed.add(event.step)
    assert {event.kind for event in events} >= {"plan", *MOVES}
    assert max(moved.values()) <= FLOOR_3.moves_per_turn
    assert sum(moved.values()) > 3 * FLOOR_3.moves_per_turn
    assert not planned & changed


def test_a_release_ahead_counts_what_the_next_step_takes(experts):
    engine = pressed_engine(experts, 2048)
    assert engine.precision is not None
    free, block = engine.allocator.free, engine._kv.block_pages
    engine._device.set_pool(
        engine.precision.advance(engine._device.caches.pool, needed=free - 5 * block)
    )
    assert not engine.precision.moves.events
    engine._device.set_pool(
        engine.precision.advance(engine._device.caches.pool, needed=free - 5 * block + 1)
    )
    assert [event.kind for event in engine.precision.moves.events] == ["plan"]
    assert engine.allocator.free == free
    engine._device.set_pool(
        engine.precision.advance(engine._device.caches.pool, needed=free - 5 * block + 1)
    )
    assert engine.precision.moves.events[-1].kind == "release"
    assert engine.allocator.free > free
    engine.check_pages()
