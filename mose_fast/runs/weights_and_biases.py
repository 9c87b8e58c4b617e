"""Logs to Weights & Biases (``pip install mose-fast[wandb]``); off unless asked for."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mose_fast.methods import Learner
from mose_fast.runs.files import RunError, RunFolder, write_atomically
from mose_fast.runs.listeners import Curves
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream


class WeightsAndBiases(Curves):
    """Logs a run to a ``project`` of Weights & Biases: losses every ``every`` batches, accuracies
    after every task, ACC and forgetting at the end; RunError if wandb is not installed.

    A run never depends on it: whatever fails there (no network, no account, a full disk) is one
    warning, and the run continues. Without WANDB_MODE and without an API key it works offline;
    ``wandb sync`` uploads later. The W&B run is named after the run's ``folder``, which has its id,
    so that a resumed run continues it, and wandb's own files in ``wandb/``.
    """

    def __init__(self, project: str, folder: str | Path, every: int = 10) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RunError(
                "Weights & Biases is asked for, but wandb is not installed. First: pip install 'mose-fast[wandb]'"
            ) from error
        self.wandb = wandb
        self.project, self.folder, self.every = project, Path(folder), every
        self._run: Any = None

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        super().on_start(config, stream, learner, batch, batches)
        folder = self.folder.absolute()
        key = os.environ.get("WANDB_API_KEY") or getattr(getattr(self.wandb, "api", None), "api_key", None)
        mode = os.environ.get("WANDB_MODE") or ("online" if key else "offline")

        def begin() -> None:
            self._run = self.wandb.init(
                project=self.project,
                name=folder.name,
                id=self._id(),
                resume="allow",
                dir=str(folder),
                mode=mode,
                config=config.to_dict(),
            )

        self._or_give_up(begin)

    def on_end(self, results: dict[str, Any]) -> None:
        if self._run is not None:
            metrics = ("acc", "af_paper", "af_released")
            self._or_give_up(lambda: self._run.summary.update({name: results[name] for name in metrics}))

    def close(self) -> None:
        if self._run is not None:
            self._or_give_up(lambda: self._run.finish())
            self._run = None

    def _id(self) -> str:
        """The id of the folder's W&B run; a new one if there is none, as after ``--overwrite``."""
        file = RunFolder(self.folder).wandb
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, secrets.token_hex(8))
        return file.read_text(encoding="ascii")

    def log(self, values: dict[str, float], batch: int) -> None:
        if self._run is not None:
            self._or_give_up(lambda: self._run.log(values, step=batch))

    def _or_give_up(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            warnings.warn(
                f"Weights & Biases does not work ({type(error).__name__}: {error}); the run continues without it",
                stacklevel=4,
            )
