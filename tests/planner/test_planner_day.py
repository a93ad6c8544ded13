"""The planner over many steps: demand, moves in flight and routing all change."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.demand import pages_to_release, pages_to_restore, restorable
from pw_jax.planner.initial import initial_bits, total_pages
from pw_jax.planner.plan import PlanInputs, plan_release, plan_restore
from pw_jax.planner.routing import RoutingMass

# A gate_up plane takes 11 pages and a down plane 6; tables double with each bit.
PAGES = np.array(
    [[11 * b + 2**b // 16 for b in range(3, 9)], [6 * b + 2**b // 16 for b in range(3, 9)]]
)


def random_damage(generator, layers, experts):
    scale = generator.lognormal(0.0, 1.5, (layers, experts, 2, 1))
    return scale * np.cumprod(generator.uniform(0.2, 0.4, (layers, experts, 2, 6)), axis=-1)


@pytest.mark.parametrize("seed", range(3))
def test_page_accounts_stay_exact(seed):
    generator = np.random.default_rng(seed)
    layers, experts = 3, 8
    config = PlannerConfig(half_life_tokens=40.0, restore_residence_steps=3)
    routing = RoutingMass.uniform(layers, experts, config)
    damage = random_damage(generator, layers, experts)
    total = 2600
    bits = initial_bits(damage, PAGES, routing.multiplier(), routing.floors(), 2500)
    weight_pages, kv_pages = total_pages(bits, PAGES), 0
    last_change = np.full(bits.shape, -100)
    released = restored = 0
    for step in range(300):
        mass = generator.dirichlet(np.full(experts, 0.3), layers) * 16
        routing = routing.update(mass, 16)
        # KV grows for a hundred steps and shrinks for a hundred.
        change = int(generator.integers(0, 12)) * (1 if step // 100 % 2 == 0 else -1)
        free = total - weight_pages - kv_pages
        kv_pages += max(-kv_pages, min(change, free))
        free = total - weight_pages - kv_pages
        in_flight = generator.random(bits.shape) < 0.1
        floors = routing.floors()

        inputs = PlanInputs(bits, damage, PAGES, routing.multiplier(), floors, ~in_flight)
        wanted = pages_to_release(config, free, kv_block_pages=2)
        if wanted:
            plan = plan_release(inputs, wanted)
            assert plan.pages_released + plan.shortage >= wanted
            after = plan.apply(bits)
            assert (after >= np.minimum(bits, floors[..., None])).all()
            released += len(plan)
        else:
            rested = restorable(config, step, last_change, in_flight)
            inputs = dataclasses.replace(inputs, movable=rested)
            plan = plan_restore(inputs, pages_to_restore(config, free, kv_block_pages=2))
            after = plan.apply(bits)
            changed = after != bits
            assert (step - last_change[changed] >= 3).all()
            assert free + plan.pages_released >= 2 * config.restore_watermark_blocks or not len(
                plan
            )
            restored += len(plan)
        assert (after[in_flight] == bits[in_flight]).all()
        last_change[after != bits] = step
        bits = after
        weight_pages -= plan.pages_released
        assert weight_pages == total_pages(bits, PAGES)
        assert weight_pages + kv_pages <= total
    assert released
    assert restored


def test_watermarks():
    config = PlannerConfig(
        release_watermark_blocks=4, release_extra_blocks=0, restore_watermark_blocks=10
    )
    # Equation (7): one block above the mark, no more.
    assert pages_to_release(config, free_pages=4, kv_block_pages=1) == 1
    assert pages_to_release(config, free_pages=5, kv_block_pages=1) == 0
    assert pages_to_release(config, free_pages=0, kv_block_pages=6) == 30
    assert pages_to_release(config, free_pages=0, kv_block_pages=1, pending_pages=3) == 2
    assert pages_to_restore(config, free_pages=20, kv_block_pages=2) == 0
    assert pages_to_restore(config, free_pages=25, kv_block_pages=2) == 5
    assert pages_to_restore(config, free_pages=25, kv_block_pages=2, reserved_pages=4) == 1
    many = pages_to_restore(config, free_pages=9999, kv_block_pages=2)
    assert many == config.restore_pages_per_step < 9979
    more = dataclasses.replace(config, release_extra_blocks=3)
    assert pages_to_release(more, free_pages=9, kv_block_pages=2) == 7  # 5 + 3 blocks, 9 are there
    assert pages_to_release(more, free_pages=10, kv_block_pages=2) == 0
    most = dataclasses.replace(config, release_extra_blocks=99)
    assert pages_to_release(most, free_pages=9, kv_block_pages=2) == 11  # up to the restore mark
    for free, of in itertools.product(range(60), (config, more, most)):
        both = pages_to_release(of, free, 3), pages_to_restore(of, free, 3)
        assert min(both) == 0


def test_forty_thousand_steps_are_planned_quickly():
    """Takes about 7 ms; the bound is loose because test machines are busy."""
    generator = np.random.default_rng(0)
    layers, experts = 40, 100
    shape = (layers, experts, 2)
    damage = random_damage(generator, layers, experts)
    multiplier = generator.choice([1.0, 1.25, 2.0], shape[:2])
    floors, movable = np.full(shape[:2], 3), np.ones(shape, dtype=bool)
    inputs = PlanInputs(np.full(shape, 8), damage, PAGES, multiplier, floors, movable)
    wanted = 187_201
    seconds = []
    for _ in range(5):
        began = time.process_time()
        plan = plan_release(inputs, wanted)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1
    assert wanted <= plan.pages_released < wanted + PAGES[0, -1]
    assert plan.bound_gap < 1e-3 * plan.damage_added
