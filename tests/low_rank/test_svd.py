"""Spectra and factors against what they promise, on inputs that break Cholesky factors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw_jax.low_rank.svd import factors, spectrum, truncation_loss
from pw_jax.low_rank.whitening import METHODS, InputStatistics, equal_tokens


def correlated(tokens, features, seed, spread=1.0):
    """Inputs whose channels are mixed and of very different size, as activations are."""
    draw = np.random.default_rng(seed)
    mix = draw.standard_normal((features, features)) * np.exp(
        spread * draw.standard_normal(features)
    )
    return draw.standard_normal((tokens, features)) @ mix


def scaling_of(inputs, method):
    statistics = InputStatistics(method, inputs.shape[1])
    for part in np.array_split(inputs, 3):
        statistics.add(part)
    return statistics.scaling()


def weight_of(shape, seed=0):
    return np.random.default_rng((seed, 1)).standard_normal(shape)


def output_error(weight, inputs, method, rank):
    """Squared error of the outputs, every token counted alike."""
    u, v = factors(weight, spectrum(weight, scaling_of(inputs, method)).left, rank)
    assert np.isfinite(u).all()
    assert np.isfinite(v).all()
    return np.square(equal_tokens(inputs) @ (weight - u @ v).T).sum()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (1, 7), (7, 1)])
def test_full_rank_is_exact(method, shape):
    weight, inputs = weight_of(shape), correlated(64, shape[1], 3)
    left = spectrum(weight, scaling_of(inputs, method)).left
    u, v = factors(weight, left, min(shape))
    np.testing.assert_allclose(u @ v, weight, atol=1e-12 * np.abs(weight).max())


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 11), tokens=st.integers(5, 90))
@settings(max_examples=40, deadline=None)
def test_whitened_loss_is_the_predicted_one_and_the_smallest(seed, rank, tokens):
    weight, inputs = weight_of((12, 24), seed), correlated(tokens, 24, seed)
    scaling = scaling_of(inputs, "whitened")
    found = spectrum(weight, scaling)
    u, v = factors(weight, found.left, rank)
    predicted = truncation_loss(found.energy)[rank]
    whole = found.energy.sum()
    assert np.square((weight - u @ v) @ scaling).sum() == pytest.approx(
        predicted, abs=1e-12 * whole
    )
    # the damping is all that the text's own error may differ by
    ours = output_error(weight, inputs, "whitened", rank)
    assert ours <= predicted + 1e-12 * whole
    assert predicted <= ours + 1e-5 * whole
    for method in ("svd", "asvd"):
        assert ours <= output_error(weight, inputs, method, rank) + 1e-5 * whole


@pytest.mark.parametrize("rank", [2, 6, 16, 24])
def test_each_method_beats_the_cruder_one_where_channels_differ(rank):
    """No theorem orders asvd and svd, so this is over many matrices with outlier channels."""
    errors = dict.fromkeys(METHODS, 0.0)
    for seed in range(12):
        weight, draw = weight_of((32, 40), seed), np.random.default_rng(seed)
        inputs = correlated(200, 40, seed, 0.0) * np.exp(1.5 * draw.standard_normal(40))[None]
        whole = np.square(equal_tokens(inputs) @ weight.T).sum()
        for method in METHODS:
            errors[method] += output_error(weight, inputs, method, rank) / whole
    assert errors["whitened"] <= errors["asvd"] <= errors["svd"]


@pytest.mark.parametrize("method", ["asvd", "whitened"])
def test_dead_channels_and_few_tokens(method):
    inputs = correlated(32, 64, 5)
    inputs[:, [0, 17, 63]] = 0.0
    weight = weight_of((48, 64))
    for rank in (1, 20, 40, 48):
        plain = output_error(weight, inputs, "svd", rank)
        assert output_error(weight, inputs, method, rank) <= plain * 1.001 + 1e-9
    u, v = factors(weight, spectrum(weight, scaling_of(inputs, method)).left, 48)
    np.testing.assert_allclose(u @ v, weight, atol=1e-12)


def test_what_the_text_leaves_open_is_decided_by_the_weights():
    """Ranks beyond those that the few tokens need must not be wasted on arbitrary directions."""
    inputs, weight = correlated(8, 64, 5), weight_of((48, 64))
    whitened = spectrum(weight, scaling_of(inputs, "whitened")).left
    u, v = factors(weight, whitened, 40)
    rest = weight - whitened[:, :8] @ (whitened[:, :8].T @ weight)
    best = truncation_loss(np.square(np.linalg.svd(rest, compute_uv=False)))[32]
    assert np.square(weight - u @ v).sum() <= best * 1.01


def test_an_ill_conditioned_gram_matrix():
    """Eigenvalues of the Gram matrix from 1e-12 to 1e6, where it has no Cholesky factor."""
    draw = np.random.default_rng(0)
    basis = np.linalg.qr(draw.standard_normal((40, 40)))[0]
    inputs = np.linalg.qr(draw.standard_normal((100, 40)))[0] * np.logspace(-6, 3, 40)[None]
    weight = weight_of((30, 40))
    ours = output_error(weight, inputs @ basis, "whitened", 10)
    assert ours <= output_error(weight, inputs @ basis, "svd", 10)


def test_a_huge_token_does_not_drown_the_others():
    inputs, weight = correlated(100, 20, 2), weight_of((16, 20))
    huge = inputs.copy()
    huge[0] *= 1e4
    ours = output_error(weight, inputs, "whitened", 6)
    u, v = factors(weight, spectrum(weight, scaling_of(huge, "whitened")).left, 6)
    theirs = np.square(equal_tokens(inputs) @ (weight - u @ v).T).sum()
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert not equal_tokens(np.zeros((2, 3))).any()


@pytest.mark.parametrize("method", METHODS)
def test_all_zero_inputs_fall_back_to_plain_svd(method):
    statistics = InputStatistics(method, 6)
    assert statistics.scaling() is None
    statistics.add(np.zeros((5, 6), np.float32))
    assert statistics.scaling() is None


def test_the_triangle_does_not_depend_on_how_tokens_come(monkeypatch):
    inputs = correlated(50, 9, 1)
    grams = []
    for chunk in (1, 7, 1000):
        monkeypatch.setattr("pw_jax.low_rank.whitening.CHUNK", chunk)
        statistics = InputStatistics("whitened", 9)
        for part in np.array_split(inputs, 11):
            statistics.add(part.astype(np.float32))
        assert statistics.tokens == 50
        grams.append(statistics.triangle.T @ statistics.triangle)
    wanted = equal_tokens(inputs.astype(np.float32).astype(np.float64))
    for gram in grams:
        np.testing.assert_allclose(gram, wanted.T @ wanted, rtol=1e-9, atol=1e-9 * gram.max())


def test_inputs_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        InputStatistics("whitened", 2).add(np.array([[1.0, np.nan]]))
