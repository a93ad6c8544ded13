"""A tiny config, a tokenizer of single bytes, and a reference."""

from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


class ByteTokenizer:
    """One token a byte, but "th" is one token too: encoding parts is not encoding the whole."""

    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    joined = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = list(text.replace("th", chr(self.joined)).encode())
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": first + ids}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode().replace(chr(self.joined), "th")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, of numpy."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
