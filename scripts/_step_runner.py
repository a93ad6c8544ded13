"""Runs the steps of full_tables.py, several at a time, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from pw_jax.errors import UserError

SCRIPTS = Path(__file__).parent
TAIL = 12
"""Lines of its log that are shown when a step has failed."""


@dataclass(frozen=True)
class Job:
    """A step with its paths.

    Attributes:
        makes: File or folder that is there once it is done. A file is written to a folder
            `partial` beside it first, since some scripts write what they have after each setting.
        command: Script and arguments, with ``WRITES`` for where it writes.
        after: What must be there before it can start.
        on_cpu: Whether it leaves a GPU alone.
    """

    makes: Path
    command: tuple[str, ...]
    after: frozenset[Path]
    on_cpu: bool = False

    @property
    def writes(self) -> Path:
        """Where the script writes."""
        if self.makes.suffix != ".json":
            return self.makes
        return self.makes.parent / "partial" / self.makes.name


WRITES = "{writes}"


def call(
    command: Sequence[str | Path],
    compiled: Path,
    site: Path | None = None,
    log: Path | None = None,
    on_cpu: bool = False,
) -> None:
    """Runs one of our scripts.

    Args:
        command: Its name and arguments.
        compiled: Folder in which all steps share what XLA has compiled.
        site: Folder with packages that are not installed.
        log: Where its output goes; default to the terminal.
        on_cpu: Whether it leaves a GPU alone.

    Raises:
        UserError: It failed; it has said why.
    """
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    places = [str(SCRIPTS.parent), *([str(site)] if site is not None else [])]
    if "PYTHONPATH" in os.environ:
        places.append(os.environ["PYTHONPATH"])
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several share a device
        "JAX_COMPILATION_CACHE_DIR": str(compiled.absolute()),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        **({"JAX_PLATFORMS": "cpu"} if on_cpu else {}),
    }
    line = [sys.executable, str(SCRIPTS / words[0]), *words[1:]]
    if log is None:
        done = subprocess.run(line, env=environment, check=False)
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(
                line, env=environment, check=False, stdout=file, stderr=subprocess.STDOUT
            )
    if done.returncode:
        where = ""
        if log is not None:
            where = f"; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-TAIL:])
        raise UserError(f"{words[0]} failed with code {done.returncode}{where}")


def run_jobs(jobs: Sequence[Job], at_once: int, work: Path, site: Path) -> list[str]:
    """Runs each job once what it reads is there; those that a failed one leaves without are not.

    Args:
        jobs: In the order in which they are started as far as they can be.
        at_once: How many run together. With more than one their output goes to `work`/logs.
        work: Folder for models.
        site: Folder with packages that are not installed.

    Returns:
        What was not made, in words.
    """
    waiting, failures = list(jobs), []
    running: dict[Future[None], Job] = {}
    missing: set[Path] = {job.makes for job in jobs}
    with ThreadPoolExecutor(at_once) as pool:
        while waiting or running:
            for job in [job for job in waiting if not job.after & missing]:
                if len(running) == at_once:
                    break
                waiting.remove(job)
                log = work / "logs" / f"{job.makes.name}.txt" if at_once > 1 else None
                running[pool.submit(_run, job, work, site, log)] = job
            if not running:
                failures += [f"{job.makes}: what it reads was not made" for job in waiting]
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()
                if error is None:
                    missing.remove(job.makes)
                elif isinstance(error, UserError):
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    failures.append(str(job.makes))
                else:
                    raise error
    for folder in {job.writes.parent for job in jobs if job.writes != job.makes}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return failures


def _run(job: Job, work: Path, site: Path, log: Path | None) -> None:
    started = time.monotonic()
    job.writes.parent.mkdir(parents=True, exist_ok=True)
    words = [str(job.writes) if word == WRITES else word for word in job.command]
    call(words, work / "compiled", site, log, job.on_cpu)
    if job.writes != job.makes:
        job.writes.replace(job.makes)
    print(f"{job.makes.name}: {time.monotonic() - started:.0f} s", flush=True)
