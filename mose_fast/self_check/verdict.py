"""Whether the native library computes right on this kind of GPU: asked once, kept, and obeyed.

The check runs in a process of its own (:mod:`mose_fast.train.self_check`), since a wrong kernel can
break everything that its process does on the GPU afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch

from mose_fast import _loader
from mose_fast._build_info import code_hash
from mose_fast._files import replace_file
from mose_fast._version import file_facts
from mose_fast.device import processor
from mose_fast.processes import python
from mose_fast.self_check.rows import OPS, Row

#: Environment variable; ``0``: no check.
SWITCH = "MOSE_FAST_SELF_CHECK"

#: Exit status of a check that wants to go on in a new process.
RESTART = 3

# Seconds without a word from the check after which it hangs. A GPU that the library has no machine
# code for compiles each kernel first.
_PATIENCE = 300.0

# Deaths by these signals come from outside and say nothing about kernels.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# Verdicts that this process obeys, by key.
_known: dict[str, Verdict] = {}


@dataclass(frozen=True)
class Verdict:
    """What a check has found.

    Attributes:
        state: ``passed``; ``failed``; ``unknown``: it could not run; ``skipped``.
        note: Why it could not run, or not to its end; then it is not kept.
        seconds: How long it took; ``at``: when it was, ISO 8601 in UTC.
        unkept: The folder in which its file could not be written, and why.
    """

    state: str
    rows: tuple[Row, ...] = ()
    note: str = ""
    seconds: float = 0.0
    at: str = ""
    unkept: str = ""

    @property
    def off(self) -> dict[str, str]:
        return switched_off(self.rows)


def switched_off(rows: Sequence[Row]) -> dict[str, str]:
    """What rows that failed switch off, each with its first row: ops; ``step``, and with it all
    ops; ``captured``.
    """
    off: dict[str, str] = {}
    for row in rows:
        if not row.passed:
            off.setdefault(row.op, f"{row.case}: {row}")
    if "step" in off:
        off = {**dict.fromkeys(OPS, off["step"]), **off}
    return off


def kind_of(device: torch.device) -> dict[str, str] | None:
    """What decides a verdict: library, code that calls it, GPU, driver and torch; None where no
    kernels run. It starts CUDA, but takes no memory of the GPU.
    """
    if device.type != _loader.gpu():
        return None
    facts = (_loader.record or {}).get("library") or file_facts(Path(_loader.native.__file__))
    kind = {"library": facts["sha256"], "code": code_hash(), "torch": torch.__version__}
    if device.type == "cpu":
        kind["gpu"] = f"a GPU emulated by {processor()}"
    else:
        kind["gpu"] = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        kind |= {"capability": f"{major}.{minor}", "driver": _driver()}
    return kind


def settle(device: torch.device) -> Verdict | None:
    """Makes the process obey the verdict on a device's kind of GPU, which is asked for first if
    there is none: what failed is switched off, with one warning. Returns the verdict; None where no
    kernels run.
    """
    if device.type != _loader.gpu():
        return None
    if os.environ.get(SWITCH) == "0":
        return Verdict("skipped")
    kind = kind_of(device)
    key = _key(kind)
    if key not in _known:
        verdict = _known[key] = _stored_or_new(device, kind)
        _loader.switch_off(verdict.off)
        # Last, since a program may have made warnings errors.
        for text in _warnings(verdict, kind["gpu"]):
            warnings.warn(f"mose_fast: {text}", RuntimeWarning, stacklevel=4)
    return _known[key]


def check(device: torch.device) -> Verdict:
    """Runs the check anew and keeps its verdict, for later runs."""
    kind = kind_of(device)
    with _locked(kind):
        return _keep(_new(device, kind), kind)


def stored(device: torch.device) -> Verdict | None:
    """The verdict that is kept for a device; None if there is none yet."""
    kind = kind_of(device)
    return None if kind is None else _read(kind)


def _stored_or_new(device: torch.device, kind: dict[str, str]) -> Verdict:
    found = _read(kind)
    if found is None:
        with _locked(kind):  # runs that started together wait here for the first
            found = _read(kind)
            if found is None:
                if sys.stderr is not None:
                    told = f"mose_fast: the native library is new to {kind['gpu']}: checking its kernels, once"
                    print(told, file=sys.stderr, flush=True)
                found = _keep(_new(device, kind), kind)
    return found


def _warnings(verdict: Verdict, gpu: str) -> Iterator[str]:
    if verdict.note:
        yield f"the kernels could not all be checked on {gpu} ({verdict.note}); the next run tries again"
    if verdict.unkept:
        yield (
            f"the verdict of the self-check cannot be kept in {verdict.unkept}: each run checks anew, which took"
            f" {verdict.seconds:.0f} s. Set XDG_CACHE_HOME to a folder that can be written, or {SWITCH}=0 for no check"
        )
    if verdict.off:
        # "step" speaks for the ops that only it has switched off.
        whole = verdict.off.get("step")
        told = [f"{name} ({why})" for name, why in verdict.off.items() if name == "step" or why != whole]
        eager = "; steps are taken eagerly" if "captured" in verdict.off else ""
        ops = "; PyTorch's operations take over, which is slower" if set(verdict.off) - {"captured"} else ""
        yield (
            f"the self-check on {gpu} has switched off: {'; '.join(told)}{ops}{eager}. All rows: mose-fast doctor"
            " --check"
        )


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mose_fast" / "self_check"


def _key(kind: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:16]


def _read(kind: dict[str, str]) -> Verdict | None:
    """The verdict that is kept; a damaged one counts as none."""
    try:
        kept = json.loads((_folder() / f"{_key(kind)}.json").read_text(encoding="utf-8"))
        verdict = kept["verdict"]
        verdict["rows"] = tuple(Row(**row) for row in verdict["rows"])
        return Verdict(**verdict) if kept["kind"] == kind else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _keep(verdict: Verdict, kind: dict[str, str]) -> Verdict:
    """Writes a verdict in one move, unless a part could not be checked."""
    if verdict.note:
        return verdict
    values = dataclasses.asdict(verdict) | {"rows": [row._asdict() for row in verdict.rows]}
    path = _folder() / f"{_key(kind)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps({"kind": kind, "verdict": values}, indent=1) + "\n").encode())
    except OSError as error:
        return dataclasses.replace(verdict, unkept=f"{path.parent} ({error.strerror})")
    return verdict


@contextlib.contextmanager
def _locked(kind: dict[str, str]) -> Iterator[None]:
    """Waits until no other process checks this kind, where files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            _folder().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((_folder() / f"{_key(kind)}.lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _driver() -> str:
    """The versions of the kernel's driver, where the system tells it, and of the driver's CUDA."""
    number = torch._C._cuda_getDriverVersion()
    cuda = f"CUDA {number // 1000}.{number % 1000 // 10}"
    with contextlib.suppress(OSError, StopIteration):
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        return f"{next(word for word in line.split() if word[0].isdigit() and '.' in word)}, {cuda}"
    return cuda


def _new(device: torch.device, kind: dict[str, str]) -> Verdict:
    start = time.perf_counter()
    rows: list[Row] = []
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        note = _in_processes(device, kind, rows)
    except OSError as error:  # there is no memory for a process, or no room for what it says
        note = f"its process cannot run: {error}"
    state = "failed" if switched_off(rows) else "unknown" if note else "passed"
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Verdict(state, tuple(rows), note, round(time.perf_counter() - start, 1), at)


def _in_processes(device: torch.device, kind: dict[str, str], rows: list[Row]) -> str:
    """Adds the rows of a check; a part in which a process dies fails, and the others go on in a new
    one. Returns why the rest could not be checked; empty if all was.
    """
    done: list[str] = []
    while True:
        heard: dict[str, Any] = {}
        wanted = {"device": str(device), "kind": kind, "done": done, "off": switched_off(rows)}
        with tempfile.TemporaryFile() as said, _started(wanted, said) as process:
            for message in _messages(process):
                heard |= message
                if "row" in message:
                    rows.append(Row(**message["row"]))
                elif "end" in message:
                    done.append(message["end"])
                elif "finished" in message:
                    return ""
            status = process.wait()
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        if "obstacle" in heard:
            return heard["obstacle"]
        if status == RESTART:
            continue
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        how = f"said nothing for {_PATIENCE:.0f} s" if "hung" in heard else how
        how += f" ({lines[-1]})" if lines else ""
        part = heard.get("begin")
        if part == heard.get("end") or (-status in _FROM_OUTSIDE and "hung" not in heard):
            return f"its process {how}"
        rows.append(Row(part, "all", None, None, f"the process of the check {how}"))
        done.append(part)


@contextlib.contextmanager
def _started(wanted: dict[str, Any], said: IO[bytes]) -> Iterator[subprocess.Popen]:
    """A process of the check, whose standard error goes to the file ``said``."""
    environment = {**os.environ, SWITCH: "0", "MOSE_FAST_NATIVE": str(Path(_loader.native.__file__).parent)}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # one order of sums, for the tiny network
    environment["PYTHONWARNINGS"] = "ignore"  # which may be errors here
    process = subprocess.Popen(
        python("mose_fast.train.self_check", json.dumps(wanted)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=said,
        env=environment,
        start_new_session=True,  # Ctrl-C goes to this process alone, which ends the other
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _messages(process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """What a process says, until it ends; ``hung`` if it hangs, which ends it."""
    pipe, rest = process.stdout.fileno(), b""
    while select.select([pipe], [], [], _PATIENCE)[0]:
        content = os.read(pipe, 65536)
        if not content:
            return
        *lines, rest = (rest + content).split(b"\n")
        yield from map(json.loads, lines)
    process.kill()
    yield {"hung": True}
