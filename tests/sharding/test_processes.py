"""Layers over devices of two processes, joined by jax.distributed."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROCESSES = 2


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_two_processes_of_two_devices(layout):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, HERE / "process.py", f"{port}", f"{PROCESSES}", f"{index}", layout],
            cwd=HERE.parents[1],
            env={"PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu", "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    try:
        for process in running:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            assert float(out.split("error")[-1]) < 3e-5
    finally:
        for process in running:
            process.kill()
