"""What is shown never stops what is computed: output that is closed, full, or cannot write a
letter.
"""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mose_fast.app.cli import main
from mose_fast.output import Guarded


def full():
    """A stream whose disk is full."""
    return open("/dev/full", "w")


def broken():
    """A stream whose reader has gone, as behind ``| head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def closed():
    """As Python has it where the process was started with it closed."""


def already_closed():
    stream = io.StringIO()
    stream.close()
    return stream


def ascii_only():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)


STREAMS = [full, broken, closed, already_closed, ascii_only]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A stream whose name no ASCII terminal can write."""
    labels = np.arange(16) % 4
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("data") / "数字.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return path


def arguments(data, out):
    settings = ["--tasks", "2", "--width", "1", "--memory", "64", "--device", "cpu"]
    return ["run", "--stream", str(data), *settings, "--out", str(out)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"), [*(("stdout", make) for make in STREAMS), ("stderr", broken), ("stderr", ascii_only)]
)
def test_a_run_ends_with_its_results(data, tmp_path, monkeypatch, capsys, name, make):
    stream = make()
    monkeypatch.setattr(sys, name, stream)
    assert main(arguments(data, tmp_path)) == 0
    assert getattr(sys, name) is stream
    assert json.loads((tmp_path / "results.json").read_text())["steps"] >= 1
    monkeypatch.undo()
    err = capsys.readouterr().err
    told = "mose-fast: standard output cannot be written: No space left on device; the results are saved in files"
    assert (told in err) == ((name, make) == ("stdout", full))
    if make is ascii_only and name == "stdout":
        assert "\\u6570\\u5b57: 2 tasks" in stream.buffer.getvalue().decode("ascii")
    if stream is not None and not stream.closed:
        stream.close()  # what could not be written was dropped


@pytest.mark.parametrize(("make", "code"), [(full, 2), (broken, 141), (closed, 0), (ascii_only, 0)])
def test_a_command_whose_output_is_its_result_fails_where_that_is_lost(monkeypatch, capsys, make, code):
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["list", "streams"]) == code
    monkeypatch.undo()
    assert capsys.readouterr().err == (
        "mose-fast: standard output cannot be written: No space left on device\n" if code == 2 else ""
    )


def test_help_into_a_pipe_that_closes(monkeypatch):
    stream = broken()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    stream.close()


def test_a_disk_that_has_room_again_is_written_again():
    class Disk(io.StringIO):
        room = False

        def write(self, text):
            if not self.room:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk = Disk()
    guarded = Guarded(disk)
    guarded.write("lost")
    disk.room = True
    guarded.write("kept")
    assert disk.getvalue() == "kept"
    assert guarded.failure.errno == 28


@pytest.mark.slow
def test_closed_descriptors_are_not_handed_to_files(data, tmp_path):
    """What a library prints would go into the file that got the number."""
    program = (
        "import os, sys\n"
        "from mose_fast.app import cli\nfrom mose_fast.runs import progress\n"
        "class Printing(progress.Progress):\n"
        "    def on_batch(self, batch, losses):\n"
        "        for number in (1, 2):\n"
        "            os.write(number, b'x' * 1000)\n"
        "progress.Progress = Printing\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )

    def close():
        os.close(1)
        os.close(2)

    command = [sys.executable, "-c", program, *arguments(data, tmp_path)]
    assert (
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=close, check=False).returncode
        == 0
    )
    assert json.loads((tmp_path / "results.json").read_text())["steps"] >= 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"xxxxx" in path.read_bytes()]
