"""Loss through a cache of pages: of keys and values, of latents, and without a cache."""

import numpy as np
import pytest
from byte_language import CONFIG

from checkpoints.verify import mean_loss
from pw_jax.engine.config import EngineConfig
from pw_jax.errors import UserError
from pw_jax.evaluation.cached import cached_loss
from pw_jax.models import registry

RANKS = {
    f"model.layers.{layer}.self_attn.{name}_proj": rank
    for layer in range(CONFIG["num_hidden_layers"])
    for name, rank in (("k", 9), ("v", 13))
}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (3, 50)).astype(np.int32)


def config(kind):
    return EngineConfig(kv_cache=kind, kv_dtype="float32", prefill_chunk=16)


def test_latents_lose_nothing_and_take_less(tokens):
    model = registry.random_model(registry.read_config(CONFIG), ranks=RANKS)
    expected = mean_loss(model, tokens)
    found = {kind: cached_loss(model, tokens, config(kind)) for kind in ("full", "latent")}
    for one in found.values():
        assert one.loss.mean() == pytest.approx(expected, rel=1e-5)
    rounded = 12 + 16  # each part takes whole fours of words
    assert found["latent"].token_bytes == 4 * rounded * CONFIG["num_hidden_layers"]
    assert found["latent"].token_bytes < found["full"].token_bytes
    assert all(one.pool_bytes >= 150 * one.token_bytes for one in found.values())


def test_a_model_without_factors_has_no_latents(model, tokens):
    with pytest.raises(UserError, match="factored"):
        cached_loss(model, tokens, config("latent"))
