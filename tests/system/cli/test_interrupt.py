"""Signals in a real run: an exit code, a line that says how to continue, and the same result in the
end.
"""

import signal
import subprocess
import sys

import pytest

from mose_fast import train
from mose_fast.app.cli import main
from mose_fast.settings.run import RunConfig

# The fifth batch waits for the signal, which arrives in a run that is really training.
_PROGRAM = """
import os, signal, sys
from mose_fast.app import cli
from mose_fast.runs import progress

class Waiting(progress.Progress):
    def on_batch(self, batch, losses):
        super().on_batch(batch, losses)
        if batch == 5:
            arrived, arrive = os.pipe()
            os.set_blocking(arrive, False)
            signal.set_wakeup_fd(arrive)
            print("batch 5", flush=True)
            os.read(arrived, 1)

progress.Progress = Waiting
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("signals_act")
@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_signal_and_resume_give_the_unbroken_result(tmp_path, tiny, finished, capsys, number, says):
    folder = tmp_path / "a run"
    command = [sys.executable, "-c", _PROGRAM, "run", *tiny, "--out", str(folder)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for line in process.stdout:
            if line == "batch 5\n":
                break
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert err.endswith(f"mose-fast: {says}; to continue: mose-fast resume '{folder}'\n")
    assert "Traceback" not in err
    assert not (folder / "results.json").exists()
    assert main(["resume", str(folder)]) == 0
    assert "continued after batch 5" in capsys.readouterr().out
    assert (folder / "accuracy.csv").read_bytes() == (finished / "accuracy.csv").read_bytes()


@pytest.mark.parametrize("command", [["run", "--stream", "digits", "--out", "nowhere"], ["resume", "nowhere"]])
def test_interrupt_before_the_first_batch(monkeypatch, tmp_path, capsys, command):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, command[0], interrupted)
    if command[0] == "resume":
        (tmp_path / "nowhere").mkdir()
        (tmp_path / "nowhere" / "config.json").write_text(RunConfig().to_json())
    before = list(tmp_path.rglob("*"))
    assert main(command) == 130
    assert capsys.readouterr().err == "mose-fast: interrupted before the first batch\n"
    assert list(tmp_path.rglob("*")) == before
