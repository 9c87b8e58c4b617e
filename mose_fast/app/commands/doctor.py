"""``mose-fast doctor``: what this machine has."""

from __future__ import annotations

import argparse

from mose_fast.app.flags import command


def add(commands: argparse._SubParsersAction) -> None:
    doctor = command(
        commands,
        "doctor",
        _act,
        prints_result=True,
        help="check what this machine has, what is missing and how to install it",
    )
    doctor.add_argument("--data-dir", metavar="DIR", help="folder with the data sets' files [~/.cache/mose_fast]")
    doctor.add_argument(
        "--check", action="store_true", help="check the native library's kernels on the GPUs here anew, and keep that"
    )


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.app.doctor import check_kernels, diagnose, report, rows_of_check

    if arguments.check:
        verdicts = check_kernels()
        for name, verdict in verdicts:
            print(f"{name}\n{rows_of_check(verdict)}")
        if not verdicts:
            print("there is no GPU that the native library has kernels for; mose-fast doctor says why")
        return int(any(verdict.state != "passed" for _, verdict in verdicts))
    findings = diagnose(arguments.data_dir)
    print(report(findings))
    return 1 if any(finding.mark == "FAIL" for finding in findings) else 0
