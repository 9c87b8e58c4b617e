"""What runs too little of the kernels' PTX is named."""

from __future__ import annotations

import pytest

from build_tools import run_ptx

NAMES = ("_ZN2mf4cuda12_GLOBAL__N_16kernelIfEEvPT_", "_ZN2mf4cuda12_GLOBAL__N_16kernelI6__halfEEvPT_")


@pytest.fixture
def instances(monkeypatch):
    monkeypatch.setattr(run_ptx, "instance_names", lambda symbols: [f"kernel {NAMES.index(s)}" for s in symbols])


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        (f"ran    90 of    100  {NAMES[0]}\nran 100 of 100  {NAMES[1]}\n", []),
        (f"ran    89 of    100  {NAMES[0]}\n", ["kernel 0 runs 89 of its 100 instructions; wanted 90%"]),
        (f"ran 9 of 9  {NAMES[1]}\nnever launched  {NAMES[0]}\n", ["kernel 0 is never launched"]),
        ("ok a_case\n", ["no kernel was launched"]),
    ],
)
def test_complaints(instances, report, wanted):
    assert run_ptx.complaints(report) == wanted


def test_a_machine_without_the_interpreter_is_told_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run_ptx, "INTERPRETER", tmp_path / "none")
    assert run_ptx.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("skipped: the kernels' PTX is not run")
