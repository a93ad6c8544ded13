"""Our models against transformers, through the golden files."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden import TINY, Forward, Golden, read

from pw_jax.models.moe import DenseExperts


@pytest.fixture(scope="module", params=TINY)
def golden(request) -> Golden:
    return read(request.param)


@pytest.fixture(scope="module")
def forward(golden) -> Forward:
    return Forward(golden.model())


def test_golden_files_are_there():
    assert {name.split("/")[0] for name in TINY} >= {
        "deepseek_v2",
        "deepseek_v2_lite",
        "gemma4",
        "gemma4_text",
        "llama",
        "llama_tied",
        "mixtral",
        "opt",
        "qwen2_moe",
    }


def test_float32_logits_match(golden, forward):
    logits, _ = forward(golden.tokens, golden.mask)
    assert golden.logits.std() > 1
    np.testing.assert_allclose(logits[golden.mask], golden.logits, rtol=0, atol=1e-4)


def test_bfloat16_logits_are_close(golden):
    logits, _ = Forward(golden.model(jnp.bfloat16))(golden.tokens, golden.mask)
    error = logits[golden.mask] - golden.logits
    # A near tie in a router may flip for single tokens, so the bound is on the mean.
    assert np.abs(error).mean() < 0.05 * golden.logits.std()


def test_greedy_tokens_match(golden, forward):
    new = golden.generated.shape[1]
    batch = len(golden.lengths)
    tokens = np.zeros((batch, int(golden.lengths.max()) + new), np.int32)
    tokens[:, : golden.tokens.shape[1]] = golden.tokens
    lengths = golden.lengths.copy()
    rows = np.arange(batch)
    for _ in range(new):
        mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
        logits, _ = forward(tokens, mask)
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(-1)
        lengths += 1
    ours = np.stack([tokens[b, length - new : length] for b, length in enumerate(lengths)])
    np.testing.assert_array_equal(ours, golden.generated)


def test_padding_changes_nothing(golden, forward):
    other = np.where(golden.mask, golden.tokens, golden.config.vocab_size - 1)
    logits, mass = forward(golden.tokens, golden.mask)
    logits_other, mass_other = forward(other, golden.mask)
    np.testing.assert_array_equal(logits[golden.mask], logits_other[golden.mask])
    np.testing.assert_array_equal(mass, mass_other)


def test_a_batch_equals_its_rows(golden, forward):
    together, _ = forward(golden.tokens, golden.mask)
    for row, length in enumerate(golden.lengths):
        alone, _ = forward(golden.tokens[row : row + 1], golden.mask[row : row + 1])
        np.testing.assert_allclose(together[row, :length], alone[0, :length], rtol=0, atol=1e-4)


def has_experts(layer) -> bool:
    """In the MLP, or beside it as in Gemma 4."""
    return any(
        isinstance(getattr(part, "experts", None), DenseExperts) for part in (layer, layer.mlp)
    )


def expert_scales(golden: Golden) -> np.ndarray:
    """What a family multiplies the weights of chosen experts by, [MoE layers or 1, E or 1]."""
    if golden.config.model_type == "gemma4_text":
        return np.stack(
            [layer.router.per_expert_scale[...] for layer in golden.model().model.layers]
        )
    return np.full((1, 1), getattr(golden.config, "routed_scale", 1.0))


def test_routing_mass_counts_real_tokens(golden, forward):
    _, mass = forward(golden.tokens, golden.mask)
    shape = golden.config.expert_shape
    if shape is None:
        assert mass.shape == (0, 0)
        return
    assert mass.shape == (len(golden.config.moe_layers), shape.experts)
    assert [has_experts(layer) for layer in golden.model().model.layers] == [
        i in golden.config.moe_layers for i in range(golden.config.num_layers)
    ]
    tokens = golden.mask.sum()
    mass = mass / expert_scales(golden)
    if golden.config.renormalize:
        np.testing.assert_allclose(mass.sum(1), tokens, rtol=1e-5)
    else:
        assert np.all((mass.sum(1) > 0.5 * tokens) & (mass.sum(1) < tokens))


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_permuted_heads_do_not_match(name):
    """Interleaved rotary pairs, the other layout in use, must not pass for ours."""
    golden = read("llama/reference")
    model = golden.model()
    weight = getattr(model.model.layers[0].self_attn, name).weight
    heads = weight[...].reshape(-1, golden.config.kv_shapes[0].head_dim, weight.shape[1])
    swapped = heads.reshape(heads.shape[0], 2, -1, heads.shape[2]).swapaxes(1, 2)
    weight.set_value(swapped.reshape(weight.shape))
    logits, _ = Forward(model)(golden.tokens, golden.mask)
    error = np.abs(logits[golden.mask] - golden.logits).max()
    assert error > 0.1
