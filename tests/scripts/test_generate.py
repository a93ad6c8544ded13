"""scripts/generate.py as a user calls it: results, and one line for every mistake."""

import json
import shutil
from pathlib import Path

import pytest

PROMPT = ("--prompt", "hello there")
SIZES = ("--max-new-tokens", "5", "--max-sequence-tokens", "64", "--prefill-chunk", "16")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    from checkpoints.convert import convert

    return convert(source, tmp_path_factory.mktemp("converted") / "out")


def generate(command, model, *flags, prompt=PROMPT):
    return command("generate", "--model", str(model), *prompt, *SIZES, *flags)


def test_json_has_a_text_a_prompt_and_the_budget(command, converted, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\n{"prompt": "two and more"}\n')
    trace = tmp_path / "trace.jsonl"
    flags = ("--json", "-", "--trace", str(trace), "--memory-budget-mib", "3")
    code, out, _ = generate(command, converted, *flags, prompt=("--prompts", str(prompts)))
    report = json.loads(out)
    assert code == 0
    assert [g["prompt"] for g in report["generations"]] == ["one", "two and more"]
    assert [len(g["tokens"]) for g in report["generations"]] == [5, 5]
    assert report["budget_bytes"] == 3 << 20
    assert report["array_bytes"] + report["pool_bytes"] <= report["budget_bytes"]
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert records[-1]["free_pages"] > 0


def test_a_folder_of_hugging_face_works_too(command, source):
    code, out, _ = generate(command, source, "--json", "-")
    assert code == 0
    assert json.loads(out)["last_step"]["mean_bits"] is None


def test_text_and_table_for_people(command, converted):
    code, out, _ = generate(command, converted, "--stream")
    assert code == 0
    assert "hello there" in out
    assert "page pool" in out


def test_the_same_seed_draws_the_same_text(command, converted):
    flags = ("--temperature", "1.5", "--json", "-", "--seed")
    first, again, other = (
        json.loads(generate(command, converted, *flags, seed)[1])["generations"]
        for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("flags", [(), ("--no-prefix-sharing",)])
def test_samples_of_a_prompt_share_its_pages(command, converted, flags):
    options = ("--samples", "3", "--temperature", "1.5", "--page-kib", "0.5", "--json", "-", *flags)
    report = json.loads(generate(command, converted, *options, prompt=("--prompt", "x" * 40))[1])
    texts = [tuple(one["tokens"]) for one in report["generations"]]
    assert len(texts) == 3
    assert len(set(texts)) > 1
    assert (report["last_step"]["reused_tokens"] > 39) == (not flags)


@pytest.mark.parametrize(
    ("flags", "prompt", "words"),
    [
        ((), (), "no prompt"),
        ((), ("--prompt", ""), "empty"),
        ((), ("--prompts", "nowhere.txt"), "nowhere.txt"),
        ((), ("--prompt", "x" * 100), "maximum of 64"),
        (("--memory-budget-mib", "0.2"), PROMPT, "too small"),
        (("--temperature", "-1"), PROMPT, "temperature"),
        (("--top-p", "0"), PROMPT, "top_p"),
        (("--page-kib", "0.3"), PROMPT, "page_bytes"),
        (("--samples", "0"), PROMPT, "samples"),
        (("--min-bits", "0", "--slots", "0"), PROMPT, "slots"),
        (("--chat",), PROMPT, "chat template"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(command, converted, flags, prompt, words):
    code, out, err = generate(command, converted, *flags, prompt=prompt)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]


def test_a_missing_model_ends_in_one_line(command, tmp_path):
    code, _, err = generate(command, tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_an_unfinished_conversion_is_refused(command, converted, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "pw_jax.json").write_text((converted / "pw_jax.json").read_text())
    (partial / "tokenizer.json").write_text((converted / "tokenizer.json").read_text())
    code, _, err = generate(command, partial)
    assert code == 2
    assert "unfinished" in err


def test_dummy_weights_need_a_config_only(command, source, tmp_path):
    shutil.copy(source / "config.json", tmp_path)
    flags = ("--load-format", "dummy", "--memory-budget-mib", "3", "--json", "-")
    code, out, _ = generate(command, tmp_path, *flags)
    report = json.loads(out)
    assert code == 0
    assert report["last_step"]["mean_bits"] == 8
    assert len(report["generations"][0]["tokens"]) == 5
