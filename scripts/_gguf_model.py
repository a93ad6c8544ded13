"""What all architectures of GGUF files share on the way to a Hugging Face folder."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from _gguf_file import GgufFile, Matrix

OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN, OWN_TOKEN = 3, 4  # the GGUF token types of <bos> and its like, and of added words


class GgufModel(abc.ABC):
    """The tensors, config and tokenizer of a GGUF file as Hugging Face has them.

    Attributes:
        architecture: the ``general.architecture`` of the files.
        tokenizer_kind: their ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``.
        layer_names: Hugging Face's name of each tensor of a layer.
    """

    architecture: ClassVar[str]
    tokenizer_kind: ClassVar[tuple[str, str]]
    layer_names: ClassVar[Mapping[str, str]]

    def __init__(self, file: GgufFile):
        """Checks that the file is of this kind.

        Raises:
            UserError: it is not.
        """
        self.name = file.name
        self.file = file
        file.expect("general.architecture", self.architecture)
        file.expect("tokenizer.ggml.model", self.tokenizer_kind[0])
        file.expect("tokenizer.ggml.pre", self.tokenizer_kind[1])
        self.heads: int = self.field("attention.head_count")
        self.kv_heads: int = self.field("attention.head_count_kv")
        self.embed: int = self.field("embedding_length")
        self.ffn: int = self.field("feed_forward_length")
        self.layers: int = self.field("block_count")

    @abc.abstractmethod
    def convert(self, name: str, weight: Matrix) -> Matrix:
        """A weight in Hugging Face's layout.

        Args:
            name: the GGUF tensor's, without layer and suffix: ``attn_q``.
            weight: as the file has it.
        """

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """The contents of a Hugging Face ``config.json``."""

    @abc.abstractmethod
    def tokenizer(self) -> dict[str, Any]:
        """The contents of ``tokenizer.json``."""

    @abc.abstractmethod
    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of ``tokenizer_config.json``, chat template included."""

    def field(self, key: str) -> Any:
        """A field of the architecture: ``block_count`` is ``llama.block_count``."""
        return self.file.field(f"{self.architecture}.{key}")

    def layer(self, index: int) -> dict[str, Matrix]:
        """The tensors of one layer, float32, under Hugging Face names such as ``mlp.up_proj``."""
        return {
            f"{name}.weight": self.convert(
                gguf_name, self.file.read(f"blk.{index}.{gguf_name}.weight")
            )
            for gguf_name, name in self.layer_names.items()
        }

    def other_tensors(self) -> dict[str, Matrix]:
        """Embedding, last norm and, where it is not tied, the head: float32."""
        return {
            f"{name}.weight": self.convert(gguf_name, self.file.read(f"{gguf_name}.weight"))
            for gguf_name, name in OTHER_NAMES.items()
            if gguf_name != "output" or not self.is_tied
        }

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return not self.file.has("output.weight")

    @property
    def norm_eps(self) -> float:
        """Of the RMS norms; stored as float32, 9.99999974e-06 for 1e-5."""
        return float(f"{self.field('attention.layer_norm_rms_epsilon'):.6g}")

    def special_tokens(self) -> dict[str, int]:
        """Token ids under the names of ``generation_config.json``."""
        return {
            "bos_token_id": self.file.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.file.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.file.field("tokenizer.ggml.padding_token_id"),
        }

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that a tokenizer finds before anything else, as ``tokenizer.json`` has them."""
        tokens: list[str] = self.file.field("tokenizer.ggml.tokens")
        types: list[int] = self.file.field("tokenizer.ggml.token_type")
        return [
            {"id": index, "content": token, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False, "special": kind == CONTROL_TOKEN}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL_TOKEN, OWN_TOKEN)
        ]
