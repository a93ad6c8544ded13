"""scripts/plot_trace.py on a written trace."""

import json

import numpy as np
import pytest

STEPS = [
    {"weight_pages": 8, "kv_pages": 1, "lowered": 0, "raised": 0, "preemptions": 0},
    {"weight_pages": 5, "kv_pages": 4, "lowered": 3, "raised": 0, "preemptions": 1},
    {"weight_pages": 7, "kv_pages": 1, "lowered": 3, "raised": 2, "preemptions": 1},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"event": "release", "step": 2, "moves": []}]
    for number, step in enumerate(STEPS, start=1):
        lines.append({"event": "step", "step": number, "free_pages": 1, "mean_bits": 8.0, **step})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_pages_bits_and_moves_are_drawn(load, trace, monkeypatch, tmp_path):
    plot_trace = load("plot_trace")
    drawn = []
    monkeypatch.setattr(plot_trace.plt, "close", drawn.append)
    plot_trace.main([str(trace), "--out", str(tmp_path / "trace.png")])
    (figure,) = drawn
    pages, _, moves = figure.axes
    assert [text.get_text() for text in pages.get_legend().get_texts()] == [
        "expert weights", "keys and values", "free"
    ]  # fmt: skip
    raised, lowered = ([bar.get_height() for bar in group] for group in moves.containers)
    assert raised == [0, 0, 2]
    assert lowered == [0, -3, 0]
    preempted = [line for line in moves.lines if line.get_label() == "preempted"]
    assert [np.unique(line.get_xdata()).tolist() for line in preempted] == [[2]]
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_a_trace_that_cannot_be_read_ends_in_one_line(command, tmp_path):
    code, _, error = command("plot_trace", tmp_path / "none.jsonl", "--out", tmp_path / "x.png")
    assert code == 2
    assert "none.jsonl" in error
