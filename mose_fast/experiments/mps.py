"""A server of CUDA's Multi-Process Service, with which several processes compute on one GPU at the
same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress

from mose_fast.settings.run import ConfigError

#: The program that starts and ends such servers; NVIDIA's driver brings it.
PROGRAM = "nvidia-cuda-mps-control"

# Starts the server, waits until stdin closes, because the sweep closed it or ended in any way, and
# ends the server. Signals that are sent to all processes of a job do not end it before the runs
# have written their checkpoints.
_SCRIPT = f"""
trap '' HUP INT TERM
trap 'rm -rf "$0"' EXIT
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY" && {PROGRAM} -d && echo started || exit 1
cat >/dev/null
echo quit -t 10 | {PROGRAM}
"""

# Seconds that the server has to end.
_PATIENCE = 15


class MpsServer:
    """A server of its own, apart from others of this machine by its private temporary folder. It
    ends with :meth:`close`, and also when this process is killed. ConfigError if none starts.

    Attributes:
        environment: What a process needs in its environment to compute by the server.
    """

    def __init__(self) -> None:
        if shutil.which(PROGRAM) is None:
            raise ConfigError(f"mps is on, but {PROGRAM} is not on PATH; it comes with NVIDIA's driver for Linux")
        folder = tempfile.mkdtemp(prefix="mose-fast-mps-")
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        environment = {**os.environ, **self.environment}
        # It would number its GPUs anew, and the processes name theirs as this process does.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._process = subprocess.Popen(
            ["sh", "-c", _SCRIPT, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        said = self._process.stdout.readline()
        if said != "started\n":
            said = " ".join((said + self._process.stdout.read()).split())
            self._process.communicate()
            raise ConfigError(f"mps is on, but {PROGRAM} starts no server: {said or 'it gives no reason'}")

    def close(self) -> None:
        """Ends the server."""
        self._process.stdin.close()
        self._process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
