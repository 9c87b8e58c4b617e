"""A sweep's worker on the simulated GPU; a run with a race or a broken capture fails."""

from __future__ import annotations

from mose_fast.experiments import worker
from tests.races.simulated_gpu import SimulatedGpu

run_cell = worker.run_cell


def main() -> None:
    """In place of ``mose_fast.experiments.worker.main``."""
    worker._import_what_runs_need()  # which the stand-in's modes need not see
    with SimulatedGpu() as gpu:

        def checked(command: worker.Command, emit: worker.Emit) -> None:
            def check(event: worker.Event) -> None:
                faults = [*gpu.races, *gpu.broken] if event["event"] == "done" else []
                emit({"event": "failed", "error": str(faults[0])} if faults else event)

            run_cell(command, check)

        worker.run_cell = checked
        worker.main()
