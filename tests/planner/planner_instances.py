"""Planner instances for the tests, and what brute force makes of them."""

import itertools

import numpy as np
from hypothesis import strategies as st

from pw_jax.planner.plan import PlanInputs

SEED_BITS = 3


def rising(draw, widths, largest_step, lowest=0):
    steps = draw(st.lists(st.integers(lowest, largest_step), min_size=widths, max_size=widths))
    return list(itertools.accumulate(steps))


@st.composite
def instances(draw, monotone=None):
    """Up to 6 blocks of 2..4 widths; whole-numbered damage, so that sums are exact.

    Equal pages at neighbouring widths, equal damages, damage that rises with the width, floors
    above the present bits and unmovable blocks all occur.
    """
    layers, experts = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (3, 1)]))
    widths = draw(st.integers(2, 4))
    shape = (layers, experts, 2)
    count = layers * experts * 2
    if draw(st.booleans()) if monotone is None else monotone:
        damage = [rising(draw, widths, 30)[::-1] for _ in range(count)]
    else:
        values = st.lists(st.integers(0, 60), min_size=widths, max_size=widths)
        damage = [draw(values) for _ in range(count)]
    pages = [rising(draw, widths, 8), rising(draw, widths, 8)]
    parent = SEED_BITS + widths - 1

    def whole(low, high, size):
        return np.array(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))

    return PlanInputs(
        bits=whole(SEED_BITS, parent, count).reshape(shape),
        damage=np.array(damage, dtype=np.float64).reshape(*shape, widths),
        pages=np.array(pages),
        multiplier=whole(1, 3, layers * experts).reshape(shape[:2]).astype(np.float64),
        floors=whole(SEED_BITS - 1, parent + 1, layers * experts).reshape(shape[:2]),
        movable=whole(0, 4, count).reshape(shape) > 0,
        prompt_factor=whole(1, 2, count).reshape(shape).astype(np.float64),
        seed_bits=SEED_BITS,
    )


def options(inputs, release):
    """For each block, the (bits, pages change, damage change) it may choose, staying included."""
    weight = inputs.multiplier[..., None] * inputs.prompt_factor
    chosen = []
    for index in np.ndindex(inputs.bits.shape):
        bits, module = int(inputs.bits[index]), index[2]
        damage = inputs.damage[index] * weight[index]
        pages = inputs.pages[module]
        if not inputs.movable[index]:
            widths = []
        elif release:
            floor = min(max(int(inputs.floors[index[:2]]), SEED_BITS), inputs.parent_bits)
            widths = list(range(floor, bits))
        else:
            widths = list(range(bits + 1, inputs.parent_bits + 1))
        here = damage[bits - SEED_BITS]
        if release and widths:
            here = min(here, min(damage[w - SEED_BITS] for w in widths))
        block = [(bits, 0, 0.0)]
        for w in widths:
            released = int(pages[bits - SEED_BITS] - pages[w - SEED_BITS])
            block.append((w, released, float(damage[w - SEED_BITS] - here)))
        chosen.append(block)
    return chosen


def all_outcomes(inputs, release):
    """Pages released and damage added of every combination of the blocks' options."""
    pages, damage = np.zeros(1, dtype=np.int64), np.zeros(1)
    for block in options(inputs, release):
        pages = (pages[:, None] + np.array([option[1] for option in block])).reshape(-1)
        damage = (damage[:, None] + np.array([option[2] for option in block])).reshape(-1)
    return pages, damage


def check_plan(inputs, plan, release):
    """What every plan must satisfy, and that its totals are those of its steps."""
    indices = np.ndindex(inputs.bits.shape)
    choice = dict(zip(indices, options(inputs, release), strict=True))
    pages, damage, seen = 0, 0.0, set()
    for step in plan:
        index = (step.layer, step.expert, step.module)
        assert index not in seen
        seen.add(index)
        assert step.from_bits == inputs.bits[index] != step.to_bits
        (option,) = [option for option in choice[index] if option[0] == step.to_bits]
        pages, damage = pages + option[1], damage + option[2]
    assert pages == plan.pages_released
    assert damage == plan.damage_added
    after = plan.apply(inputs.bits)
    module = np.arange(2)
    held = [inputs.pages[module, bits - SEED_BITS].sum() for bits in (inputs.bits, after)]
    assert held[0] - held[1] == plan.pages_released
