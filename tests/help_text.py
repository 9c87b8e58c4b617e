"""What ``mose-fast COMMAND --help`` shows."""

import re

import pytest

from mose_fast.app.cli import main


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags of a command; the test has set COLUMNS so that no line is broken."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
