"""A cache of latents against one of keys and values: the same texts, and nothing compiles."""

import dataclasses

import numpy as np
import pytest
from engine_doubles import TINY_DENSE, no_compilation

from pw_jax.engine.cache_choice import choose_cache
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import KvShape
from pw_jax.models.latent import LatentKvShape, latent_layers

TINY_OPT = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
TINY_MLA = {
    "model_type": "deepseek_v2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LLAMA_RANKS = {
    "model.layers.0.self_attn.k_proj": 9,
    "model.layers.0.self_attn.v_proj": 13,
    "model.layers.1.self_attn.k_proj": 11,
    "model.layers.1.self_attn.v_proj": 7,
}
OPT_RANKS = {
    f"model.decoder.layers.{layer}.self_attn.{name}_proj": 9 for layer in (0, 1) for name in "kv"
}
MODELS = {
    "llama": (TINY_DENSE, LLAMA_RANKS),
    "opt": (TINY_OPT, OPT_RANKS),
    "deepseek": (TINY_MLA, {}),
}
CONFIG = EngineConfig(
    memory_budget_bytes=2 << 20,
    slots=3,
    max_sequence_tokens=128,
    prefill_chunk=16,
    kv_dtype="float32",
    kv_cache="latent",
    latent_bucket_tokens=64,
)


def random_model(name: str):
    raw, ranks = MODELS[name]
    return registry.random_model(registry.read_config(raw), ranks=ranks)


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 95, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", ["llama", "deepseek", pytest.param("opt", marks=pytest.mark.slow)])
def test_same_texts_as_with_keys_and_values(name):
    """More prompts than slots: sequences join and leave, for 200 turns and more."""
    model = random_model(name)
    full = Engine(model, dataclasses.replace(CONFIG, kv_cache="full"))
    latent = Engine(model, CONFIG)
    assert latent.layout.kv_token_bytes < full.layout.kv_token_bytes
    texts = prompts(5, 20, 33, 7, 17, 1)
    expected = full.generate(texts, 80, stop_token_ids=())
    with no_compilation():
        found = latent.generate(texts, 80, stop_token_ids=())
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(1 for record in latent.trace if record.decoded_tokens) >= 160
    latent.check_pages()


def test_layers_of_other_ranks_have_pages_of_their_own():
    model = random_model("llama")
    config = dataclasses.replace(CONFIG, kv_cache="latent")
    kept = choose_cache(model.config, latent_layers(model), config)
    assert kept == (LatentKvShape(9, 13), LatentKvShape(11, 7))


def test_auto_takes_what_is_cheaper_in_bytes_and_in_time():
    """Full width, shapes only: MLA and OPT keep latents, keys that rotate are kept whole."""
    config = EngineConfig(slots=64, max_sequence_tokens=512)
    mla = registry.build_model(registry.read_config(TINY_MLA | {"kv_lora_rank": 8}))
    assert isinstance(choose_cache(mla.config, latent_layers(mla), config)[0], LatentKvShape)
    wide = TINY_DENSE | {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "kv"]
    model = registry.build_model(registry.read_config(wide), ranks=dict.fromkeys(names, 400))
    assert isinstance(choose_cache(model.config, latent_layers(model), config)[0], KvShape)
    plain = registry.build_model(registry.read_config(wide))
    assert not latent_layers(plain)


def test_a_model_without_latents_is_refused():
    model = registry.random_model(registry.read_config(TINY_DENSE))
    with pytest.raises(UserError, match="factored"):
        Engine(model, CONFIG)
