"""Statistics of activations against sums taken the plain way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_calibration import CONFIG, EXPERTS, HIDDEN, LAYERS, TOP_K, VOCABULARY, WIDTH

from pw_jax.activations import hessian, prompt_damages, routing_choices
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory

ONES = (
    np.ones((LAYERS, EXPERTS, WIDTH), np.float32),
    np.ones((LAYERS, EXPERTS, HIDDEN), np.float32),
)


@pytest.fixture(scope="module")
def model() -> CausalLm:
    return registry.random_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (3, 11)).astype(np.int32)


@pytest.fixture(scope="module")
def inputs(model, tokens):
    """x [S][L] -> (inputs [T, D], expert ids [T, k], weights [T, k]) by recording every layer."""
    recorded = []

    class Recorder:
        def __init__(self, experts):
            self.experts = experts

        def __call__(self, x, expert_ids, weights, memory, index):
            recorded.append(tuple(np.asarray(a) for a in (x, expert_ids, weights)))
            return self.experts(x, expert_ids, weights, memory, index)

    own = registry.random_model(CONFIG, seed=3)
    for layer in own.model.layers:
        layer.mlp.experts = Recorder(layer.mlp.experts)
    rows = []
    for row in tokens:
        recorded.clear()
        sequence = jnp.asarray(row)[None]
        positions = jnp.arange(len(row), dtype=jnp.int32)[None]
        own(sequence, positions, SequenceMemory(sequence >= 0))
        rows.append(list(recorded))
    return rows


def expert_weights(model, layer):
    experts = model.model.layers[layer].mlp.experts
    return np.asarray(experts.gate_up_proj[...]), np.asarray(experts.down_proj[...])


def hidden_of(model, layer, expert, x):
    gate, up = np.split(x @ expert_weights(model, layer)[0][expert].T, 2, axis=-1)
    return gate, up, np.asarray(jax.nn.silu(gate)) * up


def test_prompt_damages_are_sums_over_routed_tokens(model, tokens, inputs):
    generator = np.random.default_rng(1)
    errors = (
        generator.random((LAYERS, EXPERTS, WIDTH), np.float32),
        generator.random((LAYERS, EXPERTS, HIDDEN), np.float32),
    )
    seen = prompt_damages(model, tokens, errors)
    assert seen.damage.shape == (3, LAYERS, EXPERTS, 2)
    assert (seen.routed.sum(axis=2) == 11 * TOP_K).all()
    square = np.zeros((LAYERS, EXPERTS, WIDTH))
    for row, layer in np.ndindex(3, LAYERS):
        x, ids, weights = inputs[row][layer]
        length = np.linalg.norm(x, axis=1)
        expected = [length.sum(), (length**2).sum(), length.max()]
        np.testing.assert_allclose(seen.norms[row, layer], expected, rtol=1e-5)
        for expert in range(EXPERTS):
            mine = (ids == expert).any(axis=1)
            *_, hidden = hidden_of(model, layer, expert, x[mine])
            own = [
                (x[mine] ** 2 @ errors[0][layer, expert]).sum(),
                (hidden**2 @ errors[1][layer, expert]).sum(),
            ]
            np.testing.assert_allclose(seen.damage[row, layer, expert], own, rtol=1e-4, atol=1e-6)
            mass = weights[ids == expert].sum()
            np.testing.assert_allclose(seen.mass[row, layer, expert], mass, rtol=1e-4)
            square[layer, expert] += (x[mine] ** 2).sum(axis=0)
    np.testing.assert_allclose(seen.gate_up_square, square, rtol=1e-4, atol=1e-6)


def test_prompts_like_the_others_have_a_ratio_of_one(model, tokens):
    same = prompt_damages(model, np.stack([tokens[0]] * 3), ONES)
    np.testing.assert_allclose(same.log_ratio(), 0.0, atol=1e-5)
    assert np.abs(prompt_damages(model, tokens, ONES).log_ratio()).max() > 1e-3


def test_the_hessian_is_the_output_error_to_first_order(model, tokens, inputs):
    result = hessian(model, tokens)
    layer, expert = 1, int(np.argmax(result.tokens_seen[1]))
    down = np.zeros(HIDDEN)
    for row in range(3):
        x, ids, weights = inputs[row][layer]
        mine = (ids == expert).any(axis=1)
        gain = np.where(ids == expert, weights, 0).sum(axis=1)[mine]
        *_, hidden = hidden_of(model, layer, expert, x[mine])
        down += (gain[:, None] ** 2 * hidden**2).sum(axis=0)
    column = result.down_column[layer, expert] / WIDTH
    np.testing.assert_allclose(column, down, rtol=1e-4, atol=1e-9)
    for module in ("gate_up", "down"):
        rows, columns = (getattr(result, f"{module}_{axis}") for axis in ("row", "column"))
        np.testing.assert_allclose(rows.sum(axis=2), columns.sum(axis=2), rtol=1e-4)


def test_hessian_predicts_the_error_of_a_disturbed_matrix(model, tokens, inputs):
    """Disturb gate_up of one expert at random; compare what its output changes by."""
    result = hessian(model, tokens)
    layer, expert = 0, int(np.argmax(result.tokens_seen[0]))
    generator = np.random.default_rng(5)
    gate_up, down = (w[expert] for w in expert_weights(model, layer))
    fisher = np.outer(result.gate_up_row[layer, expert], result.gate_up_column[layer, expert])
    fisher /= result.gate_up_column[layer, expert].sum()
    found = predicted = 0.0
    for _ in range(30):
        change = 1e-3 * generator.standard_normal(gate_up.shape)
        predicted += (fisher * change**2).sum()
        for row in range(3):
            x, ids, weights = inputs[row][layer]
            mine = (ids == expert).any(axis=1)
            gain = np.where(ids == expert, weights, 0).sum(axis=1)[mine]

            def output(matrix, x=x[mine]):
                gate, up = np.split(x.astype(np.float64) @ matrix.T, 2, axis=-1)
                return (gate / (1 + np.exp(-gate)) * up) @ down.T.astype(np.float64)

            moved = output(gate_up + change) - output(gate_up)
            found += (gain[:, None] ** 2 * moved**2).sum()
    assert 0.4 < predicted / found < 2.5  # rank one, and gain and slope taken as independent


def test_bad_tokens_are_refused(model):
    with pytest.raises(UserError, match="token id 48"):
        prompt_damages(model, np.full((1, 4), VOCABULARY, np.int32), ONES)
    with pytest.raises(UserError, match="without dense routed experts"):
        hessian(registry.random_model(CONFIG, experts="paged"), np.zeros((1, 4), np.int32))


def test_choices_are_those_of_the_router(model, tokens, inputs):
    found = routing_choices(model, tokens)
    assert found.shape == (*tokens.shape, LAYERS, EXPERTS)
    assert (found.sum(axis=-1) == TOP_K).all()
    for sequence, layers in enumerate(inputs):
        for layer, (_, expert_ids, _) in enumerate(layers):
            chosen = np.take_along_axis(found[sequence, :, layer], expert_ids, axis=1)
            assert chosen.all()
