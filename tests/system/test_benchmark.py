"""``mose-fast bench``: what is measured, how it is told, and what stands in its way."""

from __future__ import annotations

import csv
import dataclasses
import io
from functools import partialmethod

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from bench.common import in_microseconds
from mose_fast import _dali, _loader
from mose_fast.app import bench as benchmark_module
from mose_fast.app.bench import Ceilings, Report, Row, Variant, benchmark, quantiles, random_stream, variants
from mose_fast.app.cli import main
from mose_fast.settings.run import ConfigError, RunConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = RunConfig.create(width=1, memory=80, device="cpu", options={"buffer_batch": 6, "new_extra": 2})


@pytest.mark.slow
def test_the_step_by_itself_is_measured():
    named = []
    report = benchmark(SMALL, classes=4, seconds=0.1, only="plain PyTorch, eager", watch=named.append)
    (plain,) = report.rows
    assert named == [plain.name] == ["plain PyTorch, eager"]
    (fused,) = benchmark(SMALL, classes=4, seconds=0.1, only="fused kernels, eager").rows
    # 10 incoming, 2 current and 6 buffer rows in 4 views each: a full step, not one of the ramp.
    assert plain.views == 72 and plain.milliseconds > 0 and plain.p20 <= plain.milliseconds <= plain.p80
    assert plain.peak is None
    if _loader.native is None:
        assert fused.milliseconds is None and "no native library" in fused.note
    else:
        assert fused.views == 72 and fused.milliseconds > 0
    assert report.evaluation is None


def test_an_evaluation_is_measured():
    report = benchmark(SMALL, classes=4, seconds=0.1, only="evaluation")
    assert report.rows == ()
    assert report.evaluation.views == 80 + 156  # the memory, and 10,000 test images scaled by the width
    assert report.evaluation.milliseconds > 0
    assert "evaluation of 236 images" in report.text()


def test_a_text_that_no_measurement_holds_is_refused_with_their_names(capsys, monkeypatch):
    monkeypatch.setattr(benchmark_module, "ceilings", lambda *arguments: pytest.fail("measured first"))
    arguments = ["bench", "--device", "cpu", "--width", "1", "--memory", "80", "--only", "step"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    names = [*(variant.name for variant in variants(torch.device("cpu"))), "evaluation"]
    assert err == f"mose-fast: only is 'step', which no measurement's name holds; here there are: {'; '.join(names)}\n"


def test_dali_is_left_out_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(_dali, "obstacle", lambda: "nvidia-dali is not installed")
    report = benchmark(SMALL, classes=4, seconds=0.1, only="feed dali")
    (row,) = report.rows
    assert row.milliseconds is None
    assert "nvidia-dali is not installed" in row.note or "no native library" in row.note
    assert row.name in report.text() and row.note in report.text()


def failing_learner(create):
    """Learners whose fused feed breaks in the first step; all others work."""

    def created(config, **stream):
        learner = create(config, **stream)
        if config.feed == "fused":
            learner.views.apply = broken
        return learner

    return created


def broken(*arguments):
    raise ValueError("an illegal memory access\nand more")


@pytest.mark.slow
def test_a_variant_that_fails_takes_no_other_row_with_it(monkeypatch):
    works = Variant("works", {"kernels": "torch", "feed": "torch", "step": "eager"})
    breaks = Variant("breaks", {**works.settings, "feed": "fused"})
    chosen = [
        works,
        breaks,
        breaks._replace(name="breaks in the loop", looped=True),
        works._replace(name="works again"),
    ]
    monkeypatch.setattr(benchmark_module, "variants", lambda device: chosen)
    monkeypatch.setattr(benchmark_module, "create_learner", failing_learner(benchmark_module.create_learner))
    report = benchmark(SMALL, classes=4, seconds=0.05)
    first, breaks, looped, after = report.rows
    assert first.milliseconds > 0 and after.milliseconds > 0
    assert breaks.milliseconds is looped.milliseconds is None
    assert breaks.note == looped.note == "failed: ValueError: an illegal memory access"
    # The whole traceback is kept, and the evaluation, which uses the same feed but no views, is
    # measured.
    assert report.failures.keys() == {"breaks", "breaks in the loop"}
    assert all("in broken" in trace and "and more" in trace for trace in report.failures.values())
    assert "failed: ValueError" in report.text() and "failed: ValueError" in report.table()


@pytest.mark.slow
def test_the_command_tells_why_a_variant_failed(capsys, monkeypatch):
    monkeypatch.setattr(benchmark_module, "create_learner", failing_learner(benchmark_module.create_learner))
    monkeypatch.setattr(
        benchmark_module, "variants", lambda device: [Variant("breaks", {"feed": "fused", "kernels": "torch"})]
    )
    arguments = ["bench", "--device", "cpu", "--width", "1", "--memory", "80", "--seconds", "0.1", "--only", "breaks"]
    assert main([*arguments, "--set", "buffer_batch=6", "--set", "new_extra=2"]) == 0
    out, err = capsys.readouterr()
    assert "failed: ValueError: an illegal memory access" in out
    assert err.splitlines() == ["... breaks"]
    assert main([*arguments, "--set", "buffer_batch=6", "--set", "new_extra=2", "--traceback"]) == 0
    out, err = capsys.readouterr()
    assert "failed: ValueError: an illegal memory access" in out and "and more" in err and "in broken" in err


def test_a_failure_of_the_compiler_is_told_by_its_own_error():
    error = BackendCompilerFailed(lambda: None, ValueError("no such thing\nand more"), None)
    assert benchmark_module._reason(error) == "failed: ValueError: no such thing"


def test_an_evaluation_that_fails_is_a_line(monkeypatch):
    monkeypatch.setattr(benchmark_module, "_evaluation", broken)
    report = benchmark(SMALL, classes=4, seconds=0.05, only="evaluation")
    assert report.text().splitlines()[-1] == "evaluation failed: ValueError: an illegal memory access"


@pytest.mark.slow
def test_the_compiled_baseline_runs(monkeypatch):
    """Traced as by default, without code from Inductor, which takes minutes on a CPU."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_module, backend="aot_eager"))
    report = benchmark(SMALL, classes=4, seconds=0.05, only="torch.compile, eager")
    (row,) = report.rows
    assert row.milliseconds > 0, row.note
    assert report.failures == {}


def test_rates_are_those_of_forward_and_backward():
    row = Row("a", views=100, milliseconds=50.0, p20=49.0, p80=52.0, peak=3_000_000)
    absent = Row("b", note="why not")
    report = Report("GPU", SMALL, 10**9, Ceilings(24.0, 100.0), (row, absent), None)
    # 100 images of 10^9 multiply-accumulates, two operations each, backward twice the forward: 6 *
    # 10^11 in 0.05 s.
    assert report.tflops(row) == pytest.approx(12.0)
    text = report.text()
    assert " 50.0%" in text and "2,000" in text
    header, first, second = csv.reader(io.StringIO(report.table()))
    values = dict(zip(header, first, strict=True))
    assert (values["ms"], values["tflops"], values["share_of_ceiling"], values["images_per_s"]) == (
        "50.0000",
        "12.000",
        "0.5000",
        "2000.0",
    )
    assert dict(zip(header, second, strict=True))["note"] == "why not"


def test_a_gpu_has_graphs_and_all_feeds():
    names = [variant.name for variant in variants(torch.device("cuda"))]
    assert "plain PyTorch, torch.compile, graph" in names and "fused kernels, graph" in names
    assert [name for name in names if name.startswith("loop: fused")] == [
        f"loop: fused kernels, feed {feed}" for feed in ("torch", "dali", "fused")
    ]
    for variant in variants(torch.device("cuda")):
        dataclasses.replace(SMALL, **variant.settings)  # all are settings that there are


def test_the_stream_brings_steps_to_their_full_size():
    stream = random_stream(SMALL, 10, 300, tests=20)
    assert [len(stream.train_rows(task)) for task in range(2)] == [200, 300]
    assert set(stream.y_train[stream.train_rows(1)].tolist()) == set(range(5, 10))
    assert len(stream.x_test) == 20


def test_other_methods_are_refused():
    with pytest.raises(ConfigError, match="method is 'er'; wanted mose"):
        benchmark(RunConfig.create(method="er", device="cpu"))


def test_the_command_prints_a_table_and_writes_its_rows(capsys, tmp_path):
    arguments = ["bench", "--device", "cpu", "--width", "1", "--memory", "80", "--seconds", "0.1"]
    arguments += ["--only", "plain PyTorch, eager"]
    settings = ["--set", "buffer_batch=6", "--set", "new_extra=2"]
    assert main([*arguments, *settings, "--csv", str(tmp_path / "bench.csv")]) == 0
    out, err = capsys.readouterr()
    assert "plain PyTorch, eager" in out and "ceilings measured here" in out
    assert "... plain PyTorch, eager" in err
    assert (tmp_path / "bench.csv").read_text().startswith("variant,views,ms,")


def test_quantiles_are_interpolated_linearly_and_one_time_is_all_three():
    assert quantiles([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx((1.8, 3.0, 4.2))
    assert quantiles([2.0]) == (2.0, 2.0, 2.0)
    assert in_microseconds([1e-6, 3e-6]) == {"median_us": 2.0, "p20_us": 1.4, "p80_us": 2.6}
