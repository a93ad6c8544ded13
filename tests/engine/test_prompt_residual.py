"""Prompt statistics out of prefill, and what the planner makes of them."""

import dataclasses

import numpy as np
import pytest
from engine_doubles import MemoryExperts, no_compilation
from test_engine import CONFIG, some_prompts

from pw_jax.activations import prompt_damages
from pw_jax.engine.engine import Engine
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.engine.sequence import Request
from pw_jax.errors import UserError
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.residual import Heads

LAYERS, EXPERTS, WIDTH = 2, 4, 64


@pytest.fixture(scope="module")
def calibrated(experts) -> MemoryExperts:
    generator = np.random.default_rng(4)
    heads = Heads(
        center=np.zeros((LAYERS, 3)),
        scale=np.ones((LAYERS, 3)),
        weights=0.1 * generator.standard_normal((LAYERS, 2, 4)),
        r_squared=np.ones((LAYERS, 2)),
        kept=np.ones((LAYERS, 2), bool),
    )
    error = generator.random((LAYERS, EXPERTS, WIDTH), np.float32)
    square = generator.random((LAYERS, EXPERTS, WIDTH), np.float32) + 0.5
    own = MemoryExperts(experts.model)
    object.__setattr__(own, "prompt_calibration", PromptCalibration(error, square, heads))
    return own


def engine_with(experts: MemoryExperts, **planner) -> Engine:
    config = dataclasses.replace(CONFIG, planner=PlannerConfig(**planner))
    return Engine(experts.paged(), config, experts)


def test_prefill_sums_equal_those_of_whole_forward_passes(calibrated):
    engine = engine_with(calibrated, prompt_residual="direct")
    assert engine.precision is not None
    (prompt,) = some_prompts(40)  # three chunks of 16, the last one padded
    sequence = engine.submit(Request(tuple(prompt), 4))
    while not sequence.generated:
        engine.step()
    sums = engine.precision.prompts._prompts[sequence.number]
    weight = engine.precision.prompts.column_weight
    assert weight is not None
    unused = np.zeros((LAYERS, EXPERTS, 32), np.float32)
    tokens = np.array([prompt], np.int32)
    expected = prompt_damages(calibrated.dequantized(8), tokens, (weight, unused))
    assert sums.tokens == 40
    np.testing.assert_array_equal(sums.routed, expected.routed[0])
    np.testing.assert_allclose(sums.norms, expected.norms[0], rtol=1e-4)
    assert sums.ratio is not None
    np.testing.assert_allclose(sums.ratio, expected.damage[0, :, :, 0], rtol=1e-3)


def test_a_token_like_those_of_calibration_has_a_ratio_of_one(calibrated):
    calibration = calibrated.prompt_calibration
    assert calibration is not None
    ratio = (calibration.column_weight() * calibration.mean_square).sum(axis=-1)
    np.testing.assert_allclose(ratio, 1.0, rtol=1e-5)
    nothing = calibration._replace(column_error=0 * calibration.column_error)
    ratio = (nothing.column_weight() * calibration.mean_square).sum(axis=-1)
    np.testing.assert_allclose(ratio, 1.0, rtol=1e-5)


@pytest.mark.parametrize("mode", ["direct", pytest.param("heads", marks=pytest.mark.slow)])
def test_the_factor_lives_as_long_as_its_sequences(calibrated, mode):
    engine = engine_with(calibrated, prompt_residual=mode)
    assert engine.precision is not None
    assert engine.precision.prompts.factor() is None
    engine.generate(some_prompts(5), 3)
    sequences = [engine.submit(Request(tuple(p), 6)) for p in some_prompts(20, 33)]
    factors = []
    with no_compilation():
        while not engine.idle:
            engine.step()
            factors.append(engine.precision.prompts.factor())
    seen = [factor for factor in factors if factor is not None]
    assert seen
    assert seen[0].shape == (LAYERS, EXPERTS, 2)
    assert all(((factor >= 0.5) & (factor <= 2)).all() for factor in seen)
    assert factors[-1] is None
    assert all(len(s.generated) == 6 for s in sequences)


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_statistics(calibrated):
    prompts = some_prompts(9, 30)
    plain, direct = (
        engine_with(calibrated, prompt_residual=mode).generate(prompts, 10, stop_token_ids=())
        for mode in ("off", "direct")
    )
    assert [g.tokens for g in plain] == [g.tokens for g in direct]


@pytest.mark.slow
def test_what_the_device_holds_for_it_is_in_the_budget(calibrated):
    plain, direct = (engine_with(calibrated, prompt_residual=m) for m in ("off", "direct"))
    assert direct.plan.array_bytes - plain.plan.array_bytes == 4 * LAYERS * EXPERTS * WIDTH


def test_without_a_calibration_it_is_refused(experts):
    with pytest.raises(UserError, match=r"scripts/calibrate\.py"):
        engine_with(experts, prompt_residual="direct")
    with pytest.raises(UserError, match=r"scripts/calibrate\.py"):
        engine_with(experts, kind="oracle")
