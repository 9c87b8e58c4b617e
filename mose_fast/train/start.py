"""How a run starts: from settings, or from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mose_fast import streams
from mose_fast.augment import choose_feed
from mose_fast.methods import Learner, create_learner, resolve_device, warn_of_other_protocol
from mose_fast.runs.checkpoint import latest
from mose_fast.runs.clock import Clock
from mose_fast.runs.files import RunError, RunFolder, write_atomically
from mose_fast.runs.listeners import Listener
from mose_fast.runs.lock import FolderLock
from mose_fast.settings.run import RunConfig, StreamConfig, takes_settings
from mose_fast.streams import Stream, StreamError
from mose_fast.streams.kinds import Kind
from mose_fast.streams.registry import check_fingerprint
from mose_fast.train.loop import Loop

# Whichever thread is in a run has it.
_running = threading.RLock()

_KIND = {field.name for field in dataclasses.fields(Kind)}


@takes_settings
def run(
    config: RunConfig | None = None,
    *,
    out: str | Path | None = None,
    stream: Stream | StreamConfig | Mapping[str, Any] | str | Path | None = None,
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
    whole_process: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Trains a learner on a stream in one pass, evaluates it after every task and returns the
    results.

    Args:
        config: The settings; None builds them from ``settings`` with :meth:`RunConfig.create`.
        out: Folder for configuration, checkpoints, results, table, figure and TensorBoard events;
            None writes nothing.
        stream: With ``config``: a :class:`Stream` made by hand, used instead of the one that
            ``config.stream`` names. Without: such a stream, or the name or the settings of one:
            ``"digits"``, a folder or an ``.npz`` file of yours.
        overwrite: Replace an earlier run in ``out``.
        listeners: Listeners, which are notified of what happens.
        whole_process: The wall time in the results begins with this process, imports included, not
            with this call.
        **settings: Without ``config``: the settings of the run, and switches of the method
            (:class:`MoseOptions` has those of MOSE), which may also be given by themselves:
            ``lr=0.01``, ``augment="simclr"``.

            {settings}

    Returns:
        The contents of ``results.json``; ``results["acc"]["ncm"]["4"]`` is the paper's ACC of MOSE,
        in [0, 1].

    Raises:
        ConfigError: A setting is unusable.
        StreamError: The data are missing or unusable.
        RunError: Another thread of this process is in a run; the folder is in use, holds files that
            are not a run's, or cannot be written; or training diverged.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the next batch; continue with :func:`resume`.
    """
    clock = Clock(whole_process=whole_process)
    with _only_run():
        if config is None:
            made = isinstance(stream, Stream)
            settings = {"evaluate_on": stream.split} | settings if made else settings
            config = RunConfig.create(stream=_described(stream) if made else stream, **settings)
            stream = stream if made else None
        elif settings:
            raise TypeError(f"{', '.join(settings)}: given beside config; wanted them inside it")
        # Before the stream, whose loading may take long.
        choose_feed(config.feed, resolve_device(config.device), None)
        listeners = list(listeners)
        if stream is None:
            stream = _load(config, listeners)
        elif isinstance(stream, Stream):
            config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, **_described(stream)))
        else:
            raise TypeError(
                f"stream is {stream!r}, given beside config; wanted a Stream object, or its name inside config"
            )
        _check_stream(config, stream)
        config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, fingerprint=stream.fingerprint))
        learner = _learner(config, stream)
        warn_of_other_protocol(config)
        _warn_of_memory(config, stream)
        found = "the stream is presented as one" if learner.joint_stream else stream.no_boundaries
        if found and config.train_on == "stream":
            learner.expect_boundaries(found)
        if out is None:
            return Loop(config, stream, learner, None, listeners, clock).run()
        folder = RunFolder(out)
        folder.make()
        with FolderLock(folder.path, "run"):
            folder.create(overwrite=overwrite)
            write_atomically(folder.config, config.to_json())
            return Loop(config, stream, learner, folder, listeners, clock).run()


def resume(
    out: str | Path, *, stream: Stream | None = None, listeners: Iterable[Listener] = (), whole_process: bool = False
) -> dict[str, Any]:
    """Continues a run from its newest checkpoint, with the same result as if it had never stopped.

    Args:
        out: The run's folder.
        stream: The stream, where it was given to :func:`run`.
        listeners, whole_process: See :func:`run`.

    Raises:
        RunError: There is no run in the folder, it is finished already, another process works in
            it, or its checkpoint cannot be read; or another thread of this process is in a run.
    """
    clock = Clock(whole_process=whole_process)
    folder = RunFolder(out)
    folder.check_resumable()
    with _only_run(), FolderLock(folder.path, "run"):
        return _resume(folder, stream, list(listeners), clock)


@contextmanager
def _only_run() -> Iterator[None]:
    """Refuses a run while another thread of the process is in one. They would share PyTorch's
    random state, its switches for precision and determinism, and on a GPU its streams: a launch of
    one run could end up in a graph that the other captures.
    """
    if not _running.acquire(blocking=False):
        raise RunError(
            "another thread of this process is in a run, and runs of one process disturb each other; wanted a process"
            " for each: mose_fast.run_sweep, or a call of run in a process of its own"
        )
    try:
        yield
    finally:
        _running.release()


def _resume(folder: RunFolder, stream: Stream | None, listeners: list[Listener], clock: Clock) -> dict[str, Any]:
    folder.check_resumable()  # it may have come to its end meanwhile
    config = RunConfig.load(folder.config)
    if stream is None:
        try:
            stream = _load(config, listeners)
        except StreamError as error:
            raise StreamError(
                f"{error} (a run that was given a Stream object needs it again: resume(out, stream=...))"
            ) from error
    _check_stream(config, stream)
    learner = _learner(config, stream)
    loop = Loop(config, stream, learner, folder, listeners, clock)
    folder.reopen()
    checkpoint = latest(folder.checkpoints)
    if checkpoint is not None:
        loop.restore(checkpoint)
    return loop.run()


def _described(stream: Stream) -> dict[str, Any]:
    described = {"name": stream.name, "batch": stream.batch}
    if stream.held_out is not None:
        described |= {"validation": stream.held_out.share, "validation_seed": stream.held_out.seed}
    return described | ({"kind": StreamConfig.kind} if stream.kind is None else dataclasses.asdict(stream.kind))


def _check_stream(config: RunConfig, stream: Stream) -> None:
    """Refuses other data than the configuration's, and another stream to evaluate on."""
    check_fingerprint(config.stream, stream)
    if config.evaluate_on != stream.split:
        raise StreamError(
            f"evaluate_on is {config.evaluate_on!r}, but the stream that was given holds {stream.split} images; wanted"
            " the two to agree"
        )
    for name, value in _described(stream).items():
        if name in _KIND and getattr(config.stream, name) != value:
            raise StreamError(
                f"stream.{name} is {getattr(config.stream, name)!r}, but that of the stream that was given is"
                f" {value!r}; wanted the two to agree"
            )


def _load(config: RunConfig, listeners: list[Listener]) -> Stream:
    def tell(done: int, images: int) -> None:
        for listener in listeners:
            listener.on_decode(done, images)

    return streams.create(config.stream, tell, evaluate_on=config.evaluate_on)


def _learner(config: RunConfig, stream: Stream) -> Learner:
    if config.deterministic:
        # Read when CUDA starts, so it must be set before the first tensor goes to the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return create_learner(config, **stream.spec)


def _warn_of_memory(config: RunConfig, stream: Stream) -> None:
    images = sum(map(stream.count_images, range(stream.parts)))
    if config.memory < 2 * stream.classes:
        text = (
            f"fewer than two for each of the {stream.classes} classes: some may have no sample, and then no class mean"
        )
    elif config.memory > images:
        text = f"more than the stream has images, {images}: nothing is ever replaced, and methods hardly differ"
    else:
        return
    warnings.warn(f"memory is {config.memory}, {text}", stacklevel=3)
