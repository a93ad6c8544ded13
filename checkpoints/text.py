"""Text files into token sequences, for calibration and comparison."""

import hashlib
import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pw_jax.errors import UserError
from pw_jax.evaluation.encoding import begin_tokens

SEQUENCE = 256  # tokens; documents seldom reach much further back
SHORTEST = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model folder, as transformers has it."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{directory} has no tokenizer ({' or '.join(TOKENIZER_FILES)})")
    if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json")):
        if importlib.util.find_spec("sentencepiece") is None:
            raise UserError(
                f"{directory} has a tokenizer.model only, which is read by sentencepiece: install "
                f"the extra with pip install 'pw-jax[sentencepiece]', or add a tokenizer.json"
            )
        # Seen with transformers 5.24 and the 32k tokenizer.model of Mixtral's generation.
        warnings.warn(
            f"{directory} has a tokenizer.model only: transformers converts it, and may split runs "
            f"of spaces otherwise than sentencepiece does; add the model's tokenizer.json",
            stacklevel=2,
        )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not there
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers raises nearly every kind for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{directory}: cannot load the tokenizer: {reason}") from None


def read_documents(path: Path) -> list[str]:
    """The texts of a file: a .jsonl with ``"text"`` in each line, or one plain text.

    Raises:
        UserError: no such file, not UTF-8, not JSON lines, or nothing in it.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the text {path}: {error}") from None
    documents = [content]
    if path.suffix == ".jsonl":
        documents = []
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                documents.append(_text_of(line, f"{path} line {number}"))
    if not any(document.strip() for document in documents):
        raise UserError(f"the text {path} is empty")
    return documents


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f'{where} is not a JSON object with a "text"') from None
    if not isinstance(text, str):
        raise UserError(f'{where}: "text" is not a string')
    return text


def token_sequences(tokenizer: Any, documents: list[str], tokens: int) -> Int32[np.ndarray, "S T"]:
    """Cuts documents into sequences of equal length.

    Documents come in an order drawn once and for all, so that a file sorted by subject is sampled
    evenly; each gives its beginning, no more than one sequence unless there are too few documents.
    Every sequence starts with the tokenizer's begin token, if it sets one: such models are lost
    without it.

    Args:
        tokenizer: as from ``load_tokenizer``.
        documents: texts.
        tokens: how many to take, rounded down to whole sequences.

    Returns:
        Token ids; fewer than asked for if the documents hold no more.

    Raises:
        UserError: hardly any text.
    """
    begin = begin_tokens(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    length = min(SEQUENCE, tokens)
    count = max(tokens // length, 1)
    limit = max(length, -(-tokens // len(documents)))
    ids: list[int] = []
    for index in np.random.default_rng(0).permutation(len(documents)):
        start = documents[index][: 16 * limit]  # far more characters than tokens
        ids += tokenizer(start, add_special_tokens=False)["input_ids"][:limit] + end
        if len(ids) >= count * (length - len(begin)):
            break
    own = min(length - len(begin), len(ids))
    if own < SHORTEST:
        raise UserError(f"the text gives {len(ids)} tokens of {tokens}; at least {SHORTEST} needed")
    count = min(count, len(ids) // own)
    rows = np.asarray(ids[: count * own], np.int32).reshape(count, own)
    return np.concatenate([np.tile(np.asarray(begin, np.int32), (count, 1)), rows], axis=1)


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
