"""What CMake is told, and what an installation tells of itself."""

from __future__ import annotations

import subprocess

import pytest
import torch

import mose_fast
from build_tools import describe
from build_tools.describe import cmake_lines, jobs
from build_tools.plan import BuildError
from mose_fast import _loader
from mose_fast._version import git_commit


def test_cmake_lines_quote_values_and_join_lists():
    lines = cmake_lines({"ROOT": "/a b", "ARCHS": ["80-real", "120"], "NONE": ""})
    assert lines == "set(ROOT [[/a b]])\nset(ARCHS [[80-real;120]])\nset(NONE [[]])\n"


def test_cmake_is_told_that_setup_py_builds_an_emulated_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(describe, "decide", lambda *torch: describe.Build("emulated", None, [], "", {}))
    with pytest.raises(
        BuildError, match=r"MOSE_FAST_BACKEND=emulated is built by setup\.py alone: see docs/building\.md"
    ):
        describe._describe(tmp_path, with_torch=True)


def test_jobs_obey_max_jobs_and_never_stop_the_build(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert jobs() >= 1


def test_commit_of_a_checkout_and_of_none(tmp_path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(tmp_path) is None  # nothing is committed yet
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "new").write_text("untracked files do not count")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == commit + "+dirty"


def test_build_info_of_a_loaded_library():
    if _loader.native is None:
        pytest.skip("the native library was not built")
    info = mose_fast.build_info()
    assert info["version"] == mose_fast.__version__
    assert info["backend"] in ("cpu", "cuda", "emulated")
    assert (info["cuda"] is not None) == bool(info["archs"]) == (info["backend"] == "cuda")
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert (info["torch_running"], info["cuda_running"]) == (torch.__version__, torch.version.cuda)


def test_build_info_where_the_library_is_refused_keeps_the_recorded_commit(monkeypatch):
    monkeypatch.setattr(_loader, "native", None)
    monkeypatch.setattr(
        _loader, "record", {"commit": "recorded", "backend": "cuda", "archs": ["9.0"], "torch": "2.3.0", "cuda": "12.1"}
    )
    monkeypatch.setattr("mose_fast._build_info.git_commit", lambda folder: None)
    info = mose_fast.build_info()
    assert info["commit"] == "recorded"
    assert (info["backend"], info["archs"], info["torch"], info["cuda"]) == (None, [], None, None)
