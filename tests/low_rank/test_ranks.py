"""Ratios into ranks: budgets are met, and spent where they save the most."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.errors import UserError
from pw_jax.low_rank.ranks import (
    allot,
    break_even,
    kept_parameters,
    read_ranks,
    uniform_ranks,
    wasteful,
)
from pw_jax.low_rank.svd import truncation_loss

SHAPES = {"q": (64, 64), "k": (16, 64), "up": (160, 64), "down": (64, 160)}


def energies(shapes, seed=0, decay=0.1):
    draw = np.random.default_rng(seed)
    return {
        name: np.sort(draw.exponential(size=min(shape)))[::-1]
        * np.exp(-decay * draw.uniform() * np.arange(min(shape)))
        for name, shape in shapes.items()
    }


def total_loss(ranks, spectra):
    losses = {name: truncation_loss(energy) for name, energy in spectra.items()}
    return sum(losses[name][rank] / losses[name][0] for name, rank in ranks.items())


@pytest.mark.parametrize("ratio", [0.9, 0.8, 0.6, 0.4])
def test_a_ratio_is_the_fraction_kept(ratio):
    whole = kept_parameters({}, SHAPES)
    assert whole == 64 * 64 + 16 * 64 + 2 * 160 * 64
    ranks = allot(energies(SHAPES), SHAPES, ratio)
    assert ratio - 0.01 < kept_parameters(ranks, SHAPES) / whole <= ratio
    assert not wasteful(ranks, SHAPES)
    uniform = uniform_ranks(SHAPES, ratio)
    assert ratio - 0.03 < kept_parameters(uniform, SHAPES) / whole <= ratio
    assert uniform["q"] == int(ratio * 32)


def test_everything_kept_is_everything_whole():
    assert allot(energies(SHAPES), SHAPES, 1.0) == {}
    assert uniform_ranks(SHAPES, 1.0) == {}


@given(seed=st.integers(0, 10**6), ratio=st.floats(0.15, 1))
@settings(max_examples=60, deadline=None)
def test_allotment_is_no_worse_than_uniform(seed, ratio):
    spectra = energies(SHAPES, seed)
    ranks = allot(spectra, SHAPES, ratio)
    assert kept_parameters(ranks, SHAPES) <= ratio * kept_parameters({}, SHAPES)
    assert all(1 <= rank <= break_even(SHAPES[name]) for name, rank in ranks.items())
    slack = max(energy[0] / energy.sum() for energy in spectra.values())  # one rank of rounding
    assert total_loss(ranks, spectra) <= total_loss(uniform_ranks(SHAPES, ratio), spectra) + slack


def test_against_every_choice_there_is():
    shapes = {"a": (6, 8), "b": (8, 6)}
    for seed in range(20):
        spectra = energies(shapes, seed, 1.0)
        budget = int(0.7 * kept_parameters({}, shapes))
        choices = [
            {name: rank for name, rank in zip(shapes, pair, strict=True) if rank}
            for pair in itertools.product(range(4), repeat=2)
        ]
        best = min(
            total_loss(ranks, spectra)
            for ranks in choices
            if kept_parameters(ranks, shapes) <= budget
        )
        ours = total_loss(allot(spectra, shapes, 0.7), spectra)
        step = max(energy[0] / energy.sum() for energy in spectra.values())
        assert best - 1e-12 <= ours <= best + step


def test_q_k_and_v_may_differ_and_needy_matrices_get_more():
    shapes = {"flat": (64, 64), "steep": (64, 64)}
    flat, steep = np.ones(64), np.exp(-0.5 * np.arange(64))
    ranks = allot({"flat": flat, "steep": steep}, shapes, 0.6)
    assert ranks["steep"] < 32
    assert ranks.get("flat", 64) > ranks["steep"]


def test_wasteful_ranks_are_found():
    assert break_even((64, 64)) == 31
    assert break_even((1, 7)) == 0
    assert wasteful({"q": 31, "k": 13}, SHAPES) == ["k"]
    assert wasteful({"q": 32}, SHAPES) == ["q"]


def test_a_matrix_without_energy_takes_rank_one():
    ranks = allot({**energies(SHAPES), "q": np.zeros(64)}, SHAPES, 0.5)
    assert ranks["q"] == 1


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.2])
def test_ratios_that_are_no_fraction(ratio):
    with pytest.raises(UserError, match="fraction of parameters kept"):
        allot(energies(SHAPES), SHAPES, ratio)
    with pytest.raises(UserError, match="fraction of parameters kept"):
        uniform_ranks(SHAPES, ratio)


def test_a_ratio_below_rank_one():
    with pytest.raises(UserError, match="too small"):
        allot(energies(SHAPES), SHAPES, 0.01)


def test_read_ranks():
    assert read_ranks({"a": 3, "b": None}, "ranks.json") == {"a": 3}
    with pytest.raises(UserError, match=r"ranks.json: the rank of a"):
        read_ranks({"a": 3.5}, "ranks.json")
