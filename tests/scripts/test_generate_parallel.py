"""scripts/generate.py --tp: the same texts over several devices, and over several processes."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from checkpoints.low_rank import decompose
from checkpoints.low_rank_options import DecomposeOptions
from pw_jax.models import registry

ROOT = Path(__file__).parents[2]
SIZES = ("--max-new-tokens", "8", "--max-sequence-tokens", "64", "--prefill-chunk", "16")
PROMPTS = ("--prompt", "hello there", "--prompt", "a")
PROCESSES = 2


@pytest.fixture(scope="module")
def factored(source, tmp_path_factory) -> Path:
    """A decomposed OPT with a tokenizer of single bytes."""

    folder = tmp_path_factory.mktemp("opt")
    raw = json.loads((ROOT / "tests/golden/opt/config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(raw))
    model = registry.random_model(registry.read_config(raw))
    save_file(weights_of(model), folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    options = DecomposeOptions(0.8, method="svd", allotment="uniform", dtype="float32")
    return decompose(folder, folder / "out", options).directory


def weights_of(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


def texts(out: str) -> list[list[int]]:
    return [generation["tokens"] for generation in json.loads(out)["generations"]]


def test_over_devices_and_over_processes(factored, command, tmp_path):
    flags = ("--model", str(factored), *SIZES, *PROMPTS, "--json")
    code, out, error = command("generate", *flags, "-")
    assert code == 0, error
    alone = texts(out)
    code, out, error = command("generate", *flags, "-", "--tp", "3", "--layout", "sharded")
    assert code == 0, error
    assert texts(out) == alone
    written = over_processes(tmp_path, flags)
    assert [file.name for file in written] == ["0.json"]  # the others do not report
    assert texts(written[0].read_text()) == alone


@pytest.mark.slow
def test_dummy_weights_over_devices(command, tmp_path):
    raw = json.loads((ROOT / "tests/golden/llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 1}))
    flags = ("--model", str(tmp_path), "--load-format", "dummy", "--ratio", "0.8", *SIZES)
    code, out, error = command("generate", *flags, *PROMPTS, "--json", "-", "--tp", "3")
    assert code == 0, error
    assert [len(tokens) for tokens in texts(out)] == [8, 8]


def over_processes(folder: Path, flags: tuple[str, ...]) -> list[Path]:
    """What some processes write, started as srun starts them."""
    job = free_job()
    environment = {
        **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(PROCESSES),
        "SLURM_LOCALID": "0",
    }
    script = (sys.executable, ROOT / "scripts" / "generate.py")
    running = [
        subprocess.Popen(
            [*script, *flags, folder / f"{index}.json", "--tp", "4", "--distributed"],
            env=environment | {"SLURM_PROCID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    try:
        for process in running:
            _, error = process.communicate(timeout=400)
            assert process.returncode == 0, error
        return sorted(folder.glob("*.json"))
    finally:
        for process in running:
            process.kill()


def free_job() -> int:
    """A job number out of which JAX makes a port that is free."""
    for job in np.random.default_rng().permutation(4096):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("localhost", 65535 - 4096 + 1 + int(job)))
            return int(job)
    raise AssertionError("no free port")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "99"), "xla_force_host_platform_device_count=99"),
        (("--layout", "dense"), "--layout needs --tp"),
        (("--distributed",), "--distributed needs --tp"),
        (("--tp", "2", "--layout", "dense"), "multiply the factors first"),
        (("--ratio", "0.8"), "--ratio needs --load-format dummy"),
    ],
)
def test_mistakes(factored, command, flags, words):
    code, out, error = command("generate", "--model", str(factored), *SIZES, *PROMPTS, *flags)
    assert code == 2
    assert not out
    assert words in error
