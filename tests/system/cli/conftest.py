"""The smallest run there is, and the command line called in this process."""

import pytest

from mose_fast.app.cli import main
from tests.tiny import TINY


@pytest.fixture
def tiny():
    """Arguments of a run of ten batches, a few seconds."""
    return list(TINY)


@pytest.fixture
def call(capsys):
    """Runs a command and returns (exit code, stdout, stderr)."""

    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished tiny run; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["run", *TINY, "--out", str(folder)]) == 0
    return folder
