"""Gemma 3 text models in GGUF files."""

from collections.abc import Mapping
from typing import Any, ClassVar

from _gguf_file import Matrix
from _gguf_model import GgufModel
from numpy import float32

FULL_EVERY = 6  # GGUF leaves out what all published models share: five sliding layers to a full one
SLIDING_THETA = 1e4


class GgufGemma3(GgufModel):
    """A GGUF file of architecture gemma3, with a sentencepiece tokenizer."""

    architecture = "gemma3"
    tokenizer_kind = ("llama", "default")
    layer_names: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k": "self_attn.k_proj",
        "attn_k_norm": "self_attn.k_norm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def convert(self, name: str, weight: Matrix) -> Matrix:
        """Norms are stored with the one that Hugging Face's model adds; q and k as they are."""
        return weight - float32(1) if name.endswith("norm") else weight

    def config(self) -> dict[str, Any]:
        """The contents of a Hugging Face ``config.json``."""
        head_dim = self.field("attention.key_length")
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": len(self.file.field("tokenizer.ggml.tokens")),
            "hidden_size": self.embed,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": head_dim,
            "query_pre_attn_scalar": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.field("rope.freq_base"),
            "rope_local_base_freq": SLIDING_THETA,
            "sliding_window": self.field("attention.sliding_window"),
            "layer_types": [
                "sliding_attention" if (layer + 1) % FULL_EVERY else "full_attention"
                for layer in range(self.layers)
            ],
            "max_position_embeddings": self.field("context_length"),
            "tie_word_embeddings": self.is_tied,
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            **self.special_tokens(),
            "torch_dtype": "bfloat16",
        }

    def tokenizer(self) -> dict[str, Any]:
        """The contents of ``tokenizer.json``.

        A sentencepiece file has no list of merges but a score a token: of all neighbours that make
        a token, those that make the best one merge first.
        """
        tokens: list[str] = self.file.field("tokenizer.ggml.tokens")
        scores: list[float] = self.file.field("tokenizer.ggml.scores")
        added = self.added_tokens()
        vocab = {token: index for index, token in enumerate(tokens)}
        apart = {
            token["id"] for token in added
        }  # found before merging starts, and never made by it
        merges = []
        for index in sorted(set(range(len(tokens))) - apart, key=lambda i: (-scores[i], i)):
            token = tokens[index]
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
            merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        start = tokens[self.special_tokens()["bos_token_id"]]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": start, "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [
                    {"SpecialToken": {"id": start, "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": start, "type_id": 1}},
                    {"Sequence": {"id": "B", "type_id": 1}},
                ],
                "special_tokens": {start: {"id": start, "ids": [vocab[start]], "tokens": [start]}},
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": tokens[self.file.field("tokenizer.ggml.unknown_token_id")],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": merges,
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of ``tokenizer_config.json``."""
        tokens: list[str] = self.file.field("tokenizer.ggml.tokens")
        special = self.special_tokens()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[special["bos_token_id"]],
            "eos_token": tokens[special["eos_token_id"]],
            "pad_token": tokens[special["pad_token_id"]],
            "unk_token": tokens[self.file.field("tokenizer.ggml.unknown_token_id")],
            "model_max_length": self.field("context_length"),
            "clean_up_tokenization_spaces": False,
        }
