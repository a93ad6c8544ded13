"""scripts/evaluate.py on a tiny checkpoint, held at several sizes."""

import json

import numpy as np
import pytest

from checkpoints.convert import convert
from checkpoints.held import load_held
from checkpoints.manifest import ConvertOptions
from checkpoints.store import dequantized_model, open_store
from pw_jax.errors import UserError
from pw_jax.evaluation.forward import Forward


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    texts = [f"line {number} of a text about {number**2} things, " * 30 for number in range(9)]
    path.write_text("\n".join(json.dumps({"text": one}) for one in texts))
    return path


@pytest.fixture(scope="module")
def converted(source, text, tmp_path_factory):
    options = ConvertOptions(calibration=text, calibration_tokens=256)
    return convert(source, tmp_path_factory.mktemp("converted") / "out", options)


TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)
MASK = np.arange(24)[None] < np.array([[24], [17]])


@pytest.fixture(scope="module")
def held(converted):
    return {
        name: load_held(open_store(converted), "float32", name, bits=4.5)
        for name in ("full", "uniform")
    }


def test_held_widths_fill_the_pages_of_a_uniform_width(held):
    sizes = [one.memory.expert_pages for one in held.values()]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02
    for one in held.values():
        assert one.bits.min() >= 3
        assert one.mean_bits == pytest.approx(4.5, abs=0.1)
    assert set(np.unique(held["uniform"].bits)) == {4, 5}
    assert (held["full"].bits != held["uniform"].bits).any()


def test_memory_is_measured_as_predicted(converted, held):
    memory = held["full"].memory
    assert memory.live == pytest.approx(memory.predicted, rel=0.02)
    same = load_held(open_store(converted), "float32", "full", budget_bytes=memory.predicted)
    assert same.memory.live == pytest.approx(memory.predicted, rel=0.02)


def test_pages_and_dequantised_experts_agree(converted, held):
    pages = load_held(open_store(converted), "float32", "full", bits=4.5, through_pages=True)
    dense = held["full"]
    assert pages.bits is not None
    assert len(np.unique(pages.bits)) > 1
    np.testing.assert_array_equal(pages.bits, dense.bits)
    ours, theirs = (np.asarray(held.forward.hidden(TOKENS, MASK)) for held in (pages, dense))
    np.testing.assert_allclose(ours[MASK], theirs[MASK], atol=2e-4)
    _, lowest = dequantized_model(open_store(converted), 3, np.float32)
    assert np.abs(np.asarray(Forward(lowest).hidden(TOKENS, MASK)) - theirs)[MASK].max() > 1e-2


def test_a_width_that_is_not_held_is_refused(converted):
    with pytest.raises(UserError, match="holds 3 to 8 bits, not 2"):
        load_held(open_store(converted), "float32", "uniform", bits=2.0)


def test_a_table_is_measured_in_one_run(command, source, converted, text, tmp_path):
    out = tmp_path / "results" / "out.json"
    flags = ("--checkpoint", converted, "--source", source, "--json", out)
    measured = ("--text", text, "--text-tokens", 512, "--tasks", "passkey:256", "--limit", 2)
    sizes = ("--planner", "uniform", "--bits", 3, 8)
    code, shown, error = command("evaluate", *flags, *measured, *sizes)
    assert code == 0, error
    assert "text.jsonl" in shown
    record = json.loads(out.read_text())
    assert record["command"].startswith("python scripts/evaluate.py --checkpoint out")
    plain, low, high = record["results"]
    assert plain["held"] == "source"
    assert plain["through"] == "arrays"
    assert (low["mean_bits"], high["mean_bits"]) == (3.0, 8.0)
    kl = [one["texts"]["text.jsonl"]["metrics"]["kl"] for one in record["results"]]
    assert kl[0]["mean"] == pytest.approx(0, abs=1e-6)
    assert kl[1]["low"] > kl[2]["high"] > 0
    assert len(low["texts"]["text.jsonl"]["items"]["kl"]) == kl[1]["count"]
    keys = high["tasks"]["passkey_256"]
    assert keys["questions"] == 2
    assert keys["metrics"]["bits_per_byte"]["mean"] > 0
    assert low["memory"]["expert_pages"] < high["memory"]["expert_pages"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tasks", "lambada", "--bits", 4, "--requests", "absent.whl"), "pip download"),
        (("--tasks", "lambada"), "give --bits or --budget"),
        (("--bits", 4), "give --tasks or --text"),
        (("--tasks", "passkey", "--bits", 4), "passkey:TOKENS"),
    ],
)
def test_missing_inputs_end_in_one_line(command, converted, tmp_path, flags, message):
    code, _, error = command(
        "evaluate", "--checkpoint", converted, "--json", tmp_path / "x", *flags
    )
    assert code == 2
    assert message in error


def test_dense_folders_have_no_pages(command, source, text, tmp_path):
    flags = ("--checkpoint", source, "--text", text, "--text-tokens", 64, "--json", tmp_path / "x")
    code, _, error = command("evaluate", *flags, "--bits", 4)
    assert code == 2
    assert "has no pages" in error
    code, _, _ = command("evaluate", *flags)
    assert code == 0
    (result,) = json.loads((tmp_path / "x").read_text())["results"]
    assert result["memory"]["live"] == pytest.approx(result["memory"]["predicted"], rel=0.02)
