"""Llama models with SmolLM's tokenizer in GGUF files."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from _gguf_file import Matrix
from _gguf_model import GgufModel


class GgufLlama(GgufModel):
    """A GGUF file of architecture llama, with a byte-level BPE tokenizer."""

    architecture = "llama"
    tokenizer_kind = ("gpt2", "smollm")
    layer_names: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    def convert(self, name: str, weight: Matrix) -> Matrix:
        """Undoes llama.cpp's interleaved rotary layout: Hugging Face pairs dims d and d + H/2."""
        if name not in ("attn_q", "attn_k"):
            return weight
        heads = self.heads if name == "attn_q" else self.kv_heads
        pairs = weight.shape[0] // heads // 2
        split = weight.reshape(heads, pairs, 2, weight.shape[1])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)

    def config(self) -> dict[str, Any]:
        """The contents of a Hugging Face ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self.file.field("tokenizer.ggml.tokens")),
            "hidden_size": self.embed,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.embed // self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.field("rope.freq_base"),
            "max_position_embeddings": self.field("context_length"),
            "tie_word_embeddings": self.is_tied,
            "attention_bias": False,
            "mlp_bias": False,
            **self.special_tokens(),
            "torch_dtype": "bfloat16",
        }

    def tokenizer(self) -> dict[str, Any]:
        """The contents of ``tokenizer.json``."""
        tokens: list[str] = self.file.field("tokenizer.ggml.tokens")
        merges: list[str] = self.file.field("tokenizer.ggml.merges")
        byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self.added_tokens(),
            "normalizer": None,
            # SmolLM was trained with one token a digit; transformers' own GGUF reader forgets it.
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    byte_level | {"add_prefix_space": False},
                ],
            },
            "post_processor": None,
            "decoder": byte_level | {"add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in merges],
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of ``tokenizer_config.json``, chat template included."""
        tokens: list[str] = self.file.field("tokenizer.ggml.tokens")
        special = self.special_tokens()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[special["bos_token_id"]],
            "eos_token": tokens[special["eos_token_id"]],
            "pad_token": tokens[special["pad_token_id"]],
            "unk_token": tokens[0],
            "model_max_length": self.field("context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": self.file.field("tokenizer.chat_template"),
        }
