"""A sweep's own server of CUDA's Multi-Process Service, with a stub for NVIDIA's program: it
ends with the sweep, however that ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from mose_fast.experiments import place as place_module
from mose_fast.experiments.engine import LocalEngine
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.mps import PROGRAM, MpsServer
from mose_fast.experiments.place import Layout, Place
from mose_fast.settings.run import ConfigError, RunConfig

from .test_workers import wait_for

pytestmark = pytest.mark.skipif(not shutil.which("sh"), reason="needs a POSIX shell")

# With -d it leaves a daemon; else it takes commands, of which quit ends the daemon. The daemon is a
# sleep, whose number lies where the clients look for the server.
STUB = """#!/bin/sh
if [ "$1" = -d ]; then
  [ -z "$REFUSES" ] || { echo "an instance of this daemon is"; echo "already running"; exit 1; }
  sleep 1000 >/dev/null 2>&1 &
  echo "$!" >"$CUDA_MPS_PIPE_DIRECTORY/pid"
  echo "started ${CUDA_VISIBLE_DEVICES-without CUDA_VISIBLE_DEVICES} $! $CUDA_MPS_LOG_DIRECTORY" >>"$CALLS"
else
  read -r command
  echo "$command" >>"$CALLS"
  kill -9 "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")"
fi
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A function that reads what the stub was called for."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / PROGRAM
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    return lambda: (tmp_path / "calls").read_text().splitlines()


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_workers_of_one_gpu_share_a_server_that_ends_with_them(calls):
    engine = LocalEngine(["1", "1"], threads=1, mps=True)
    environment = engine._environment("1")
    pipe, log = environment["CUDA_MPS_PIPE_DIRECTORY"], environment["CUDA_MPS_LOG_DIRECTORY"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "1" and os.path.isdir(pipe) and os.path.isdir(log)
    # The server sees all GPUs, under the names that its clients know them by.
    (started,) = calls()
    daemon = int(started.split()[-2])
    assert started == f"started without CUDA_VISIBLE_DEVICES {daemon} {log}" and alive(daemon)
    engine.close()
    assert calls()[1:] == ["quit -t 10"] and not alive(daemon)
    assert not os.path.exists(os.path.dirname(pipe))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in LocalEngine(["1"], threads=1)._environment("1")


KILLED = "from mose_fast.experiments.mps import MpsServer; server = MpsServer(); print('up', flush=True); input()"


@pytest.mark.parametrize("whole_job", [False, True])
def test_it_ends_when_the_sweep_is_killed(calls, whole_job):
    """A scheduler may send SIGTERM to all processes of a job before it kills them: the server stays
    until the sweep has ended, whose runs still write checkpoints.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {KILLED}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout.readline() == "up\n"
        daemon = int(calls()[0].split()[-2])
        if whole_job:
            for process in [psutil.Process(daemon), *psutil.Process(sweep.pid).children(recursive=True)]:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert alive(daemon) and len(calls()) == 1
        sweep.kill()
    wait_for(lambda: not alive(daemon))
    assert calls()[1:] == ["quit -t 10"]
    wait_for(lambda: not os.path.exists(os.path.dirname(calls()[0].split()[-1])))


def test_without_the_program_or_a_server_it_is_refused_in_a_line(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("REFUSES", "yes")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        ConfigError, match=f"^mps is on, but {PROGRAM} starts no server: an instance .* is already running$"
    ):
        MpsServer()
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"^mps is on, but {PROGRAM} is not on PATH; it comes with NVIDIA's driver"):
        MpsServer()


def test_a_sweep_on_gpus_has_a_process_a_run_and_a_server_where_asked(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(place_module, "_device", lambda cell, place: "cuda")
    monkeypatch.setattr(place_module, "_gpus", lambda place: ("0", "2"))
    monkeypatch.setattr(place_module, "LocalEngine", lambda *given, **more: made.append((given, more)))
    cells = [Cell("seed-0", RunConfig(), {})]
    for place, gpus in ((Place(), ["0", "2"]), (Place(per_gpu=2, mps=True), ["0", "2", "0", "2"])):
        layout = Layout.of(cells, place)
        layout.engine(tmp_path, tmp_path, None)
        (workers, threads, *_), more = made.pop()
        assert workers == gpus and threads == layout.threads == max(1, layout.cores // len(gpus))
        assert more == {"mps": place.mps}
    with pytest.raises(Exception, match="mps is on, but the runs compute with Ray"):
        Layout.of(cells, Place(engine="ray", mps=True))
