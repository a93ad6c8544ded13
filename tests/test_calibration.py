"""Calibration against gradients taken the plain way, one unpadded sequence at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pw_jax.calibration import Calibration, calibrate
from pw_jax.errors import UserError
from pw_jax.layered_gradients import LayeredGradients
from pw_jax.models import registry
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.quantizer.damage import damage
from pw_jax.quantizer.nested import quantize_matrix

LAYERS, EXPERTS, TOP_K, WIDTH, HIDDEN, VOCABULARY = 2, 5, 2, 32, 32, 48
RAW = {
    "model_type": "qwen2_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": True,
}
CONFIG = registry.read_config(RAW)
LENGTHS = (9, 12, 5)


@pytest.fixture(scope="module")
def model() -> CausalLm:
    return registry.random_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


@pytest.fixture(scope="module")
def padded(sequences) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((len(LENGTHS), max(LENGTHS)), 7, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return tokens, mask


@pytest.fixture(scope="module")
def measured(model, padded) -> Calibration:
    return calibrate(model, *padded)


@pytest.fixture(scope="module")
def gradients(model, sequences) -> list[dict[str, np.ndarray]]:
    """Gradient of each sequence's loss for every parameter, by dotted name."""
    graph, state = nnx.split(model)

    @jax.jit
    def gradient(state, tokens):
        def loss(state):
            running = nnx.merge(graph, state)
            positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
            hidden = running(tokens[None], positions, SequenceMemory(tokens[None] >= 0)).hidden
            logits = running.logits(hidden)[0]
            total = jnp.array(0.0)
            for place in range(len(tokens) - 1):
                total -= jax.nn.log_softmax(logits[place])[tokens[place + 1]]
            return total

        return jax.grad(loss)(state)

    found = []
    for sequence in sequences:
        flat = nnx.to_flat_state(gradient(state, jnp.asarray(sequence)))
        found.append({".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat})
    return found


@pytest.mark.parametrize(("module", "name"), [("gate_up", "gate_up_proj"), ("down", "down_proj")])
def test_marginals_sum_squared_sequence_gradients(measured, gradients, module, name):
    for layer in range(LAYERS):
        key = f"model.layers.{layer}.mlp.experts.{name}"
        square = np.sum([one[key].astype(np.float64) ** 2 for one in gradients], axis=0)
        assert square.max() > 0
        rows = getattr(measured, f"{module}_row")[layer]
        columns = getattr(measured, f"{module}_column")[layer]
        np.testing.assert_allclose(rows, square.sum(axis=2), rtol=1e-3, atol=1e-9)
        np.testing.assert_allclose(columns, square.sum(axis=1), rtol=1e-3, atol=1e-9)
        np.testing.assert_allclose(rows.sum(axis=1), columns.sum(axis=1), rtol=1e-4)


def test_routing_counts_real_tokens_only(measured, model, sequences):
    mass = np.zeros((LAYERS, EXPERTS))
    for sequence in sequences:
        tokens = jnp.asarray(sequence)[None]
        positions = jnp.arange(len(sequence), dtype=jnp.int32)[None]
        mass += model(tokens, positions, SequenceMemory(tokens >= 0)).routing_mass
    np.testing.assert_allclose(measured.routing_mass, mass, rtol=1e-5)
    assert measured.tokens_seen.dtype == np.int32
    np.testing.assert_array_equal(measured.tokens_seen.sum(axis=1), sum(LENGTHS) * TOP_K)
    np.testing.assert_array_equal(measured.tokens_seen > 0, measured.routing_mass > 0)


def test_what_stands_in_the_padding_does_not_matter(measured, model, padded):
    tokens, mask = padded
    again = calibrate(model, np.where(mask, tokens, 31), mask)
    for name, values in measured.as_arrays().items():
        np.testing.assert_allclose(again.as_arrays()[name], values, rtol=1e-5, err_msg=name)


def test_sequences_are_reported_and_shapes_are_as_stated(model, padded):
    seen = []
    result = calibrate(model, *padded, report=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    shapes = {name: values.shape for name, values in result.as_arrays().items()}
    assert shapes == {
        "gate_up_row": (LAYERS, EXPERTS, 2 * HIDDEN),
        "gate_up_column": (LAYERS, EXPERTS, WIDTH),
        "down_row": (LAYERS, EXPERTS, WIDTH),
        "down_column": (LAYERS, EXPERTS, HIDDEN),
        "routing_mass": (LAYERS, EXPERTS),
        "tokens_seen": (LAYERS, EXPERTS),
    }


def test_an_expert_that_no_token_chose_is_as_sensitive_as_its_layer(model, sequences):
    result = calibrate(model, sequences[0][None, :2])
    layer, expert = np.argwhere(result.tokens_seen == 0)[0]
    assert result.gate_up_row[layer, expert].sum() == 0
    shrunk = result.conditional()
    total = result.routing_mass[layer].sum()
    np.testing.assert_allclose(
        shrunk.down_column[layer, expert], result.down_column[layer].sum(axis=0) / total, rtol=1e-5
    )
    for values in shrunk.as_arrays().values():
        assert np.isfinite(values).all()


def test_conditional_marginals_follow_the_formula(measured):
    shrunk = measured.conditional(shrink_tokens=4.0)
    mass = measured.routing_mass[1]
    expert = int(np.argmax(mass))
    own = measured.gate_up_column[1, expert] / mass[expert]
    layer = measured.gate_up_column[1].sum(axis=0) / mass.sum()
    seen = measured.tokens_seen[1, expert]
    expected = (seen * own + 4 * layer) / (seen + 4)
    np.testing.assert_allclose(shrunk.gate_up_column[1, expert], expected, rtol=1e-5)
    sums = (shrunk.gate_up_row.sum(axis=2), shrunk.gate_up_column.sum(axis=2))
    np.testing.assert_allclose(*sums, rtol=1e-4)


def test_calibrated_weights_lower_the_damage(measured, model):
    expert = int(np.argmax(measured.tokens_seen[0]))
    weight = model.model.layers[0].mlp.experts.gate_up_proj[...][expert]
    row, column = measured.gate_up_row[0, expert], measured.gate_up_column[0, expert]
    plain = quantize_matrix(weight, name="plain", rows_per_table=2)
    weighted = quantize_matrix(
        weight, name="weighted", rows_per_table=2, row_weight=row, column_weight=column
    )
    before, after = (damage(weight, matrix, row, column) for matrix in (plain, weighted))
    assert (after[:3] < before[:3]).all()


def test_bad_input_is_refused(model):
    good = np.zeros((1, 4), np.int32)
    with pytest.raises(UserError, match="token id 48"):
        calibrate(model, np.full((1, 4), VOCABULARY, np.int32))
    with pytest.raises(UserError, match="at least 2 tokens"):
        calibrate(model, good[:, :1])
    with pytest.raises(UserError, match="at least 2 tokens"):
        calibrate(model, good[:0])
    with pytest.raises(UserError, match="without dense routed experts"):
        calibrate(registry.random_model(CONFIG, experts="paged"), good)
    broken = registry.random_model(CONFIG, seed=1)
    broken.model.norm.weight.set_value(jnp.full((WIDTH,), jnp.nan))
    with pytest.raises(UserError, match="loss on calibration sequence 0"):
        calibrate(broken, good)


def test_only_one_layer_has_gradients_at_a_time(model):
    """XLA's own account: less than the gradients of two layers, whatever the number of layers."""
    experts = model.model.layers[0].mlp.experts
    layer = experts.gate_up_proj[...].nbytes + experts.down_proj[...].nbytes
    needed = LayeredGradients(model).temporary_bytes(tokens=4)
    assert layer <= needed < 2 * layer
    deeper = registry.read_config({**RAW, "num_hidden_layers": 6})
    assert LayeredGradients(registry.random_model(deeper)).temporary_bytes(tokens=4) == needed


def test_a_bfloat16_model_gives_nearly_the_same(model, padded, measured):
    graph, state = nnx.split(model)
    rounded = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    found = calibrate(rounded, *padded)
    for name in ("gate_up_row", "down_column"):  # a near-tie may send a token to another expert
        exact, ours = (
            getattr(measured, name).sum(axis=(1, 2)),
            getattr(found, name).sum(axis=(1, 2)),
        )
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, exact, rtol=0.1)
