"""The files of a run folder; a crash leaves either the old or the new content of each."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mose_fast._files import replace_file
from mose_fast.errors import MoseFastError
from mose_fast.output import readable

#: Name of the file by which a process holds a folder (:class:`mose_fast.runs.lock.FolderLock`).
LOCK = ".mose_fast.lock"

#: What every configuration of a run has had in every version.
IN_EVERY_CONFIG = {"method", "preset", "stream", "options", "memory", "seed"}


class RunError(MoseFastError, RuntimeError):
    """A run cannot start, continue or write its results; the message says why and what to do."""


def check_folders(folders: Iterable[str | Path]) -> None:
    """RunError unless each of the folders exists."""
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise RunError(f"there is no folder {folder}; wanted one with run folders in it, at any depth")


def write_atomically(
    path: Path,
    content: bytes | str,
    advice: str = "Free some space or choose another --out, then run the same command again",
) -> None:
    """Replaces ``path`` by ``content`` in one move; the content is on disk before the name changes.
    A text is made :func:`mose_fast.output.readable`.

    Raises:
        RunError: The disk is full or the folder unwritable; ``path`` is unchanged. The message ends
            with ``advice``.
    """
    if isinstance(content, str):
        content = readable(content).encode()
    try:
        replace_file(path, content)
    except OSError as error:
        raise RunError(
            f"cannot write {path} ({len(content)} bytes): {error.strerror}; what was there before is untouched."
            f" {advice}"
        ) from error


def resume_advice(folder: Path) -> str:
    """What to do where the file of a run that has begun cannot be written."""
    return f"Free some space, then continue with: mose-fast resume {shlex.quote(str(folder))}"


def leftovers(folder: Path, names: Iterable[str]) -> list[Path]:
    """The unfinished files that :func:`write_atomically` leaves in ``folder``, which may not exist,
    when it is killed; ``names``: of the files it was writing, as regular expressions.
    """
    # Random letters as tempfile makes them.
    unfinished = re.compile(rf"\.(?:{'|'.join(names)})\.[a-z0-9_]{{8}}")
    return [path for path in _listed(folder) if unfinished.fullmatch(path.name)]


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Deletes :func:`leftovers`; the caller holds the folder's lock."""
    for path in leftovers(folder, names):
        path.unlink(missing_ok=True)


def is_configuration(file: Path) -> bool:
    """Whether a file is a run's configuration, so that the files beside it are a run's."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.keys() >= IN_EVERY_CONFIG


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, and no other file that somebody put there."""
    return sorted(path for path in _listed(folder) if re.fullmatch(_CHECKPOINT, path.name))


_CHECKPOINT = r"step-\d{9,}\.safetensors"


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


class RunFolder:
    """The paths of the files in a run's folder, ``path``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.results = self.path / "results.json"
        self.accuracy = self.path / "accuracy.csv"
        self.figure = self.path / "accuracy.png"
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "tensorboard"
        self.wandb = self.path / "wandb_id.txt"
        self._written = (self.results, self.accuracy, self.figure, self.wandb)

    @property
    def unfinished(self) -> str:
        """Why there is no finished run here; empty where there is one."""
        if self.results.is_file():
            return ""
        return f"not finished (no {self.results.name})" if self.config.is_file() else f"no run (no {self.config.name})"

    def check_resumable(self) -> None:
        """Raises RunError unless there is a run here that can be continued."""
        if not self.config.is_file():
            raise RunError(
                f"there is no run in {self.path} (no {self.config.name}); start one with: mose-fast run --out"
                f" {self.path}"
            )
        if self.results.is_file():
            raise RunError(f"the run in {self.path} is finished; its results are in {self.results}")

    def create(self, *, overwrite: bool) -> None:
        """Makes the folder ready for a new run, whose configuration the caller writes next, with
        its lock held. ``overwrite`` deletes what an earlier run left; all other files stay.

        Raises:
            RunError: The folder is in use without ``overwrite``, holds files with a run's names
                that no run of ours wrote, or cannot be written.
        """
        with self._writing():
            if not overwrite and any(path not in self._begun() for path in self.path.iterdir()):
                raise RunError(
                    f"the output folder {self.path} is already used; choose another --out, pass --overwrite to replace"
                    f" the run in it, or continue it with: mose-fast resume {self.path}"
                )
            if not is_configuration(self.config):
                self._refuse_foreign_files()
            # The configuration stays until the new one replaces it: it is what tells that the other
            # files are a run's.
            events = self.events.glob("events.out.tfevents.*")
            for file in [*self._written, *checkpoint_files(self.checkpoints), *events]:
                file.unlink(missing_ok=True)
            self._prepare()

    def write(self, file: Path, content: bytes | str) -> None:
        """Writes a file of a run that can be resumed; RunError if it cannot be written."""
        write_atomically(file, content, resume_advice(self.path))

    def make(self) -> None:
        """Makes the folder itself where it is missing; RunError if it cannot be made."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)

    def reopen(self) -> None:
        """Deletes what a killed run had half written."""
        with self._writing():
            self._prepare()

    def _begun(self) -> list[Path]:
        """What a run leaves that was killed before its configuration was written."""
        begun = [self.path / LOCK, *leftovers(self.path, [re.escape(self.config.name)])]
        return begun if any(_listed(self.checkpoints)) else [*begun, self.checkpoints]

    def _refuse_foreign_files(self) -> None:
        """Refuses files with a run's names if no configuration shows that they are ours."""
        files = [file for file in (self.config, *self._written) if file.exists()]
        files += [
            file
            for folder in (self.checkpoints, self.events)
            for file in _listed(folder)
            if not file.name.startswith(".")
        ]
        if files:
            shown = ", ".join([*(str(file.relative_to(self.path)) for file in files[:5]), *["..."][: len(files) > 5]])
            raise RunError(
                f"the output folder {self.path} holds {shown}, but no {self.config.name} of a run of mose-fast: these"
                " files are not a run's, and nothing was deleted. Choose another --out, or move them away"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write into the output folder {self.path}: {error.strerror}; choose another --out"
            ) from error

    def _prepare(self) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        remove_leftovers(self.path, [re.escape(file.name) for file in (self.config, *self._written)])
        remove_leftovers(self.checkpoints, [_CHECKPOINT])
