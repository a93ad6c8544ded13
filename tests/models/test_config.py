"""Reading config.json: both generations of files, and clear complaints."""

import pytest

from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import KvShape, RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": [128001, 128009],
}
QWEN = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "rope_theta": 1000000.0,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
}
OLD_LLAMA = {  # as the first conversions of LLaMA-65B have it
    "architectures": ["LLaMAForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_sequence_length": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": -1,
}


def test_the_oldest_llama_files():
    config = registry.read_config(OLD_LLAMA)
    assert config.kv_shapes == (KvShape(64, 128),) * 80
    assert config.rope == RopeConfig(10000.0)
    assert config.norm_eps == 1e-6
    assert registry.read_config(OLD_LLAMA | {"rms_norm_eps": 1e-5}).norm_eps == 1e-5
    assert config.max_positions == 2048
    assert config.pad_token_id is None
    assert config.eos_token_ids == (2,)


def test_mixtral_defaults():
    config = registry.read_config(MIXTRAL)
    assert config.renormalize
    assert config.rope == RopeConfig(1e6)
    assert config.moe_layers == tuple(range(32))
    assert config.expert_shape is not None
    assert (config.expert_shape.top_k, config.expert_shape.ffn) == (2, 14336)
    assert not config.qkv_bias
    assert config.kv_shapes == (KvShape(8, 128),) * 32
    windowed = registry.read_config(MIXTRAL | {"sliding_window": 4096})
    assert {kv.window for kv in windowed.kv_shapes} == {4096}


def test_opt_defaults():
    config = registry.read_config(OPT)
    assert config.kv_shapes == (KvShape(56, 128),) * 48
    assert config.tie_word_embeddings
    assert config.qkv_bias
    assert config.mlp_bias
    assert config.max_positions == 2048
    assert config.rope.kind == "none"
    assert not registry.read_config(OPT | {"enable_bias": False}).output_bias


def test_full_llama():
    config = registry.read_config(LLAMA)
    assert config.kv_shapes == (KvShape(8, 128),) * 80
    assert config.eos_token_ids == (128001, 128009)
    assert config.moe_layers == ()
    assert config.expert_shape is None
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING},
        },
    ],
)
def test_rope_in_every_generation_of_files(fields):
    config = registry.read_config(LLAMA | fields)
    assert config.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
def test_plain_rope(scaling):
    assert registry.read_config(LLAMA | {"rope_scaling": scaling}).rope == RopeConfig(5e5)


def test_qwen_defaults():
    config = registry.read_config(QWEN)
    assert config.qkv_bias
    assert not config.output_bias
    assert not config.renormalize
    assert config.moe_layers == tuple(range(24))
    assert config.expert_shape is not None
    assert config.expert_shape.ffn == 1408
    assert config.kv_shapes[0].window is None


def test_dense_layers_of_qwen():
    config = registry.read_config(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.moe_layers == tuple(i for i in range(1, 24, 2) if i != 3)


def test_sliding_windows_of_qwen():
    fields = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    config = registry.read_config(QWEN | fields)
    windows = [kv.window for kv in config.kv_shapes]
    assert windows == [7, None, 7] + [None] * 21


def test_one_end_token_or_none():
    assert registry.read_config(QWEN | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert registry.read_config(QWEN | {"eos_token_id": None}).eos_token_ids == ()


def test_head_dim_may_differ_from_the_quotient():
    assert registry.read_config(LLAMA | {"head_dim": 64}).kv_shapes[0].head_dim == 64


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_missing_field_is_named(name):
    raw = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(UserError, match=f"my.json: required field '{name}' is missing"):
        registry.read_config(raw, "my.json")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (LLAMA | {"vocab_size": "many"}, "'vocab_size' must be a positive integer"),
        (LLAMA | {"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer"),
        (LLAMA | {"rms_norm_eps": -1}, "'rms_norm_eps' must be a positive number"),
        (LLAMA | {"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
        (LLAMA | {"num_key_value_heads": 7}, "not a multiple of num_key_value_heads"),
        (LLAMA | {"num_attention_heads": 48}, "not a multiple of num_attention_heads"),
        (LLAMA | {"head_dim": 7}, "must be even"),
        (LLAMA | {"hidden_act": "mish"}, "activation 'mish' is not supported"),
        (LLAMA | {"eos_token_id": "</s>"}, "'eos_token_id' must be a token id"),
        (LLAMA | {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        (
            LLAMA | {"rope_scaling": {"type": "yarn"}},
            "'original_max_position_embeddings' is missing",
        ),
        (LLAMA | {"rope_scaling": {"type": "llama3"}}, "required field 'factor' is missing"),
        (LLAMA | {"rope_scaling": 8}, "'rope_scaling' must be an object"),
        (QWEN | {"num_experts_per_tok": 61}, "exceeds num_experts"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "exceeds num_local_experts"),
        (MIXTRAL | {"sliding_window": 0}, "'sliding_window' must be a positive integer"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim must be 7168, 512"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before must be True, False"),
        (OPT | {"ffn_dim": None}, "required field 'ffn_dim' is missing"),
        (QWEN | {"mlp_only_layers": "1"}, "'mlp_only_layers' must be a list"),
        ({"model_type": "gpt2"}, "'gpt2' .* known: .*llama, mixtral, opt, qwen2_moe"),
        ({}, "model_type None is not supported"),
    ],
)
def test_bad_fields_are_named(raw, message):
    with pytest.raises(UserError, match=message):
        registry.read_config(raw)
