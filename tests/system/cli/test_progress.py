"""The table after a task, and the bar at a terminal."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest

from mose_fast.runs.progress import Progress, accuracy_table


def accuracies(tasks, experts=4):
    """Different numbers everywhere, with 100 % among them."""
    names = [*map(str, range(1, experts + 1)), "mean_distance"]
    ncm = {name: [((7 * e + 3 * t) % 101) / 100 for t in range(tasks)] for e, name in enumerate(names)}
    return {"ncm": ncm, "linear": {name.replace("distance", "logit"): [1.0] * tasks for name in names}}


@pytest.mark.parametrize("tasks", [1, 10, 11, 100])
@pytest.mark.parametrize("experts", [1, 8])
def test_table_fits_a_hundred_columns(tasks, experts):
    table = accuracy_table(accuracies(tasks, experts), tasks - 1, tasks, ("ncm", str(experts)))
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    assert len([line for line in lines if line.startswith("* ncm")]) == 1
    # The mean of a single expert would repeat it.
    assert len(lines) == 3 + 2 * (experts + 1 if experts > 1 else 1)


def test_table_with_a_longer_name_keeps_its_columns():
    test = accuracies(10) | {"lda_adjusted": {"mean_score": [1.0] * 10}}
    rows = accuracy_table(test, 9, 10, ("lda_adjusted", "mean_score")).splitlines()[2:]
    assert {len(row[:34].rstrip()) for row in rows} == {34}, "ends of the means"
    assert max(map(len, rows)) <= 100


def test_table_shows_every_task_and_the_mean():
    table = accuracy_table({"ncm": {"1": [0.5, 0.25, 1.0]}}, 2, 5, ("ncm", "1"))
    assert "after task 3 of 5" in table
    heading, row = table.splitlines()[-2:]
    assert row.split() == ["*", "ncm", "1", "58.3", "50.0", "25.0", "100.0"]
    assert heading.split() == ["expert", "mean", "task", "1", "task", "2", "task", "3"]


def test_the_mean_of_a_single_expert_is_shown_where_predict_uses_it():
    table = accuracy_table(accuracies(2, 1), 1, 2, ("ncm", "mean_distance"))
    assert [line.split()[:3] for line in table.splitlines()[3:]] == [
        ["ncm", "1", "1.5"],
        ["*", "ncm", "mean_distance"],
        ["linear", "1", "100.0"],
    ]


def test_table_of_many_tasks_shows_the_newest_and_the_worst_old_one():
    row = [0.5] * 12
    row[7], row[11] = 0.1, 0.05  # the newest is the lowest of all, but not an old one
    table = accuracy_table({"ncm": {"1": row}}, 11, 100, ("linear", "1"))
    assert table.splitlines()[-1].split() == ["ncm", "1", "42.9", "5.0", "10.0", "(task", "8)"]
    first = accuracy_table({"ncm": {"1": [0.5]}}, 0, 100, ("linear", "1"))
    assert first.splitlines()[-1].split() == ["ncm", "1", "50.0", "50.0"]


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal of some width; returns a function that gives what was written to
    it.
    """
    ours, theirs = pty.openpty()
    parts = []

    def collect():
        with contextlib.suppress(OSError):  # Linux's way of saying that the other side is closed
            while part := os.read(ours, 4096):
                parts.append(part)

    def open_terminal(columns):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        stream = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", stream)
        reader = threading.Thread(target=collect)
        reader.start()

        def written():
            stream.close()
            reader.join()
            return b"".join(parts).decode()

        return written

    yield open_terminal
    os.close(ours)


def test_decoding_has_a_bar_at_a_terminal(terminal, tmp_path):
    written = terminal(100)
    progress = Progress(tmp_path)
    for done in (256, 512, 600):
        progress.on_decode(done, 600)
    assert progress.bar is None
    bars = [line for line in re.split(r"[\r\n]+", written()) if "decoding" in line]
    assert "600/600" in bars[-1] and "images/s" in bars[-1]


def test_decoding_has_no_bar_elsewhere(capsys, tmp_path):
    progress = Progress(tmp_path)
    for done in (256, 600):
        progress.on_decode(done, 600)
    progress.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("columns", "losses"), [(100, ["loss"]), (160, ["loss", "contrastive", "cross_entropy", "distillation"])]
)
def test_bar_at_a_terminal(call, tiny, tmp_path, terminal, columns, losses):
    written = terminal(columns)
    code, out, _ = call("run", *tiny, "--tasks", "1", "--limit-per-task", "40", "--out", tmp_path / "run")
    assert code == 0
    bars = [line for line in re.split(r"[\r\n]+", written()) if "batches/s" in line]
    assert any("4/4" in bar and ": task 1 of 1:" in f": {bar}" for bar in bars)
    assert max(map(len, bars)) <= columns
    assert all(re.search(r"\|.{10}\|", bar) for bar in bars)
    assert re.findall(r"([a-z_]+) \d+\.\d\d\b", bars[-1]) == losses
    assert re.search(r"\[\d\d:\d\d<(\d\d:\d\d|\?), ", bars[-1])
    assert "accuracy in percent after task 1 of 1" in out
