"""scripts/full_tables.py: inputs survive being cut up, and every step's flags are real."""

import argparse
import shlex
from pathlib import Path

import pytest

from checkpoints.olmo_eval import TASKS
from pw_jax.errors import UserError


def test_parts_are_joined(load, tmp_path):
    tables = load("full_tables")
    whole = tmp_path / "made"
    (whole / "files" / "requests").mkdir(parents=True)
    (whole / "files" / "requests" / "one").write_bytes(b"x" * 20_000)
    with tables.tarfile.open(tmp_path / "all", "w") as tar:
        tar.add(whole / "files", arcname="files")
    content = (tmp_path / "all").read_bytes()
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for number in range(0, len(content), 8192):
        (inputs / f"inputs.tar.{number // 8192:03d}").write_bytes(content[number : number + 8192])
    second = (inputs / "inputs.tar.001").rename(tmp_path / "late")
    with pytest.raises(UserError, match="not all"):
        tables.join(inputs)
    second.rename(inputs / "inputs.tar.001")
    files = tables.join(inputs)
    assert (files / "requests" / "one").read_bytes() == b"x" * 20_000
    assert tables.join(inputs) == files


@pytest.mark.parametrize("size", ["full", "small"])
def test_every_step_parses(load, size):
    tables = load("full_tables")
    names = {"inputs": "in", "work": "work", "out": "out", "wheel": "wheel"}
    names = tables.SIZES[size]._asdict() | names
    made = set()
    for step in tables.STEPS:
        makes = step.makes.format(**names)
        words = step.command.format(**names, makes=makes).split()
        assert makes in words
        for word in words:  # what a step reads is there by then
            assert (
                not word.startswith(("work/", "out/"))
                or word == makes
                or word in made
                or ("spectra" in word)
            ), shlex.join(words)
        made.add(makes)
        if hasattr(load(words[0].removesuffix(".py")), "parse"):
            load(words[0].removesuffix(".py")).parse(words[1:])
    assert set(tables.SIZES["full"].tasks.split()) >= set(TASKS)


def test_steps_that_are_done_are_left_out(command, load, monkeypatch, tmp_path):
    tables, runner = load("full_tables"), load("_step_runner")
    (tmp_path / "in" / "files").mkdir(parents=True)
    called = []

    def call(words, *_):
        called.append(str(words[0]))

    monkeypatch.setattr(tables, "call", call)
    monkeypatch.setattr(runner, "call", call)
    for name in ("demo_moe", "smollm2", "trained"):
        (tmp_path / "work" / name).mkdir(parents=True)
    (tmp_path / "work" / "trained" / "training.json").write_text("{}")
    flags = ("--inputs", tmp_path / "in", "run", "--work", tmp_path / "work")
    code, _, _ = command("full_tables", *flags, "--out", tmp_path / "out", "--only", "model")
    assert code == 0
    assert called == ["convert.py", "calibrate.py", "make_tables.py"]
    assert (tmp_path / "out" / "training.json").read_text() == "{}"
    code, _, error = command("full_tables", *flags, "--jobs", "0")
    assert code == 2
    assert "--jobs must be at least 1, not 0" in error
    code, _, error = command("full_tables", "--inputs", tmp_path / "absent", "run")
    assert code == 2
    assert "0 parts" in error


@pytest.mark.parametrize("at_once", [1, 3])
def test_steps_wait_for_what_they_read(load, monkeypatch, tmp_path, at_once):
    runner = load("_step_runner")
    started = []

    def call(words, *_):
        name, writes = words
        started.append(name)
        if name == "broken":
            raise UserError("broken is broken")
        Path(writes).write_text("{}")

    monkeypatch.setattr(runner, "call", call)
    paths = {name: tmp_path / f"{name}.json" for name in ("a", "broken", "b", "left", "last")}

    def job(name, *reads):
        return runner.Job(
            paths[name], (name, runner.WRITES), frozenset(paths[read] for read in reads)
        )

    jobs = [job("b", "a"), job("left", "broken"), job("a"), job("broken"), job("last", "b")]
    failures = runner.run_jobs(jobs, at_once, tmp_path, tmp_path)
    assert set(started) == {"a", "b", "broken", "last"}
    assert started.index("a") < started.index("b") < started.index("last")
    assert failures == [str(paths["broken"]), f"{paths['left']}: what it reads was not made"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "last.json"]


def test_a_step_that_fails_shows_its_log(load, tmp_path):
    runner = load("_step_runner")
    log = tmp_path / "logs" / "one.txt"
    with pytest.raises(UserError, match=r"(?s)failed with code 2.*give --prepare"):
        runner.call(("train_demo_moe.py", "--model", "m", "--tokens", "t"), tmp_path, None, log)


def test_a_step_can_leave_the_gpu_alone(load, monkeypatch, tmp_path):
    runner = load("_step_runner")
    seen = []
    monkeypatch.setattr(
        runner.subprocess,
        "run",
        lambda line, env, check: (
            seen.append(env.get("JAX_PLATFORMS")) or argparse.Namespace(returncode=0)
        ),
    )
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    runner.call(("one.py",), tmp_path)
    runner.call(("one.py",), tmp_path, on_cpu=True)
    assert seen == [None, "cpu"]


def test_spectra_are_made_by_one_step(load):
    steps = {step.makes: step for step in load("_table_steps").STEPS}
    assert steps["{work}/svd_0.9"].after == ""
    assert steps["{work}/svd_0.6"].after == "{work}/svd_0.9"
    assert steps["{work}/whitened_uniform_0.9"].after == "{work}/whitened_0.9"
