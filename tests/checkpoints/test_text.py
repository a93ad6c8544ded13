"""Text into token sequences."""

import json
import sys

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from checkpoints.text import load_tokenizer, read_documents, sha256, token_sequences
from pw_jax.errors import UserError


class Letters:
    """A tokenizer with a token a letter."""

    eos_token_id = 0

    def __init__(self, begin=None):
        self.bos_token_id = begin

    def __call__(self, text, add_special_tokens=True):
        sets_one = add_special_tokens and self.bos_token_id is not None
        begin = [self.bos_token_id] if sets_one else []
        return {"input_ids": begin + [ord(letter) for letter in text]}


def test_documents(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo")
    assert read_documents(plain) == ["one\ntwo"]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "tw\u00f6", "more": 1}\n', encoding="utf-8")
    assert read_documents(lines) == ["one", "tw\u00f6"]


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_documents(path) == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "one"}\n{"other": 1}', 'line 2 is not a JSON object with a "text"'),
        (b'{"text": 1}', 'line 1: "text" is not a string'),
        (b"[1]", 'line 1 is not a JSON object with a "text"'),
        (b"nonsense", 'line 1 is not a JSON object with a "text"'),
        (b"\xff", "cannot read the text"),
        (b"\n", "is empty"),
    ],
)
def test_bad_texts(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_documents(path)


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="cannot read the text"):
        read_documents(tmp_path / "nope.txt")
    with pytest.raises(UserError, match="cannot read"):
        sha256(tmp_path / "nope.txt")
    with pytest.raises(UserError, match="has no tokenizer "):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_file_alone_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'pw-jax\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_file_alone_warns_that_spaces_may_split_otherwise(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with (
        pytest.warns(UserWarning, match="add the model's tokenizer.json"),
        pytest.raises(UserError, match="cannot load the tokenizer"),
    ):
        load_tokenizer(tmp_path)


def test_opt_texts_start_with_its_end_token(tmp_path):
    """Files as the hub has them: vocab.json, merges.txt and a bos that is also the eos."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
    ends = dict.fromkeys(["bos_token", "eos_token", "unk_token"], "</s>")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"}
    for name, content in {
        "config.json": {"model_type": "opt"},
        "vocab.json": vocab,
        "tokenizer_config.json": settings | ends,
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("two words")
    assert tokens[0] == tokenizer.eos_token_id == 2
    assert len(tokens) == 10
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "two words"


def test_many_documents_give_their_beginnings():
    documents = [chr(65 + index) * 1000 for index in range(20)]
    tokens = token_sequences(Letters(), documents, 1024)
    assert tokens.shape == (4, 256)
    assert tokens.dtype == np.int32
    assert len(np.unique(tokens)) >= 4
    np.testing.assert_array_equal(tokens, token_sequences(Letters(), documents, 1024))


def test_one_document_gives_all():
    tokens = token_sequences(Letters(), ["x" * 5000], 2048)
    assert tokens.shape == (8, 256)


def test_sequences_start_with_the_begin_token():
    documents = [chr(65 + index) * 1000 for index in range(20)]
    tokens = token_sequences(Letters(begin=1), documents, 1024)
    assert tokens.shape == (4, 256)
    assert (tokens[:, 0] == 1).all()
    assert (tokens[:, 1:] != 1).all()
    plain = token_sequences(Letters(), documents, 1024)
    np.testing.assert_array_equal(tokens[:, 1:].ravel(), plain.ravel()[: 4 * 255])
    assert token_sequences(Letters(begin=1), ["x" * 99], 2048).shape == (1, 101)


def test_little_text_gives_what_there_is():
    assert token_sequences(Letters(), ["x" * 300], 2048).shape == (1, 256)
    assert token_sequences(Letters(), ["x" * 99], 2048).shape == (1, 100)
    assert token_sequences(Letters(), ["x" * 400], 64).shape == (1, 64)
    with pytest.raises(UserError, match="gives 4 tokens of 2048"):
        token_sequences(Letters(), ["xyz"], 2048)
