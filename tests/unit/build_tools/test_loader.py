"""The package works without its native library and says why, in processes of their own; a foreign
library is never loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mose_fast
from mose_fast import _loader
from mose_fast._version import file_facts, source_hash
from mose_fast.app.cli import main
from tests.paths import ROOT

USE = """
import sys, torch, mose_fast
from mose_fast.ops.null import null
x = torch.arange(6.0).reshape(2, 3).T
assert torch.equal(null(x), x)
print(mose_fast.build_info()["backend"], "mose_fast._C" in sys.modules)
"""
RECORD = {
    "commit": None,
    "sources": source_hash(ROOT, "cpu"),
    "backend": "cpu",
    "archs": [],
    "torch": torch.__version__,
    "torch_cuda": torch.version.cuda,
    "cuda": None,
}
needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")


def use(native: str | Path | None, path: Path = ROOT) -> tuple[str, str]:
    """Imports and uses the package found in ``path`` in a new process; returns what it printed and
    its warnings.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MOSE_FAST_NATIVE"} | {
        "PYTHONPATH": str(path)
    }
    if native is not None:
        environment["MOSE_FAST_NATIVE"] = str(native)
    done = subprocess.run(
        [sys.executable, "-c", USE], env=environment, cwd=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr


def warnings_in(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "RuntimeWarning" in line]


@pytest.fixture
def second(tmp_path):
    """A folder with a copy of the native library and a function that writes its record."""
    if _loader.native is None:
        pytest.skip("the native library was not built")
    shutil.copy(_loader.native.__file__, tmp_path)

    def write(**changes):
        (tmp_path / "_build.json").write_text(json.dumps(_loader.record | changes))
        return tmp_path

    return write


@needs_library
def test_the_library_is_loaded_without_a_warning():
    assert use(None) == (f"{_loader.record['backend']} True", "")


@pytest.mark.slow
def test_a_copy_of_the_package_without_library_warns_once_and_works(tmp_path):
    shutil.copytree(
        ROOT / "mose_fast", tmp_path / "mose_fast", ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    )
    printed, stderr = use(None, tmp_path)
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert f"there is no native library in {tmp_path / 'mose_fast'}" in warning
    assert "pip install --no-build-isolation" in warning


def test_the_library_can_be_switched_off_quietly():
    assert use("0") == ("None False", "")


def test_a_library_of_the_same_torch_is_loaded_from_another_folder(second):
    assert use(second(commit="elsewhere")) == (f"{_loader.record['backend']} True", "")


def test_a_library_compiled_for_another_torch_is_not_loaded(second):
    printed, stderr = use(second(torch="2.3.1+cu121"))
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert f"it was compiled for torch 2.3.1+cu121, but torch {torch.__version__} is running" in warning
    assert "pip install --no-build-isolation" in warning


def test_a_library_compiled_for_another_cuda_is_not_loaded(second):
    printed, stderr = use(second(backend="cuda", cuda="11.8"))
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert "it was compiled for CUDA 11.8" in warning and f"the torch that is running ({torch.__version__})" in warning


@pytest.mark.slow
def test_a_library_compiled_from_other_sources_is_not_loaded(second):
    """A checkout that was updated but not rebuilt."""
    printed, stderr = use(second(sources="0123456789abcdef"))
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert "it was compiled from other sources than those in csrc now" in warning and "pip install" in warning


def test_the_hash_of_the_sources_follows_names_and_contents(tmp_path):
    assert source_hash(tmp_path, "cpu") is None
    (tmp_path / "csrc" / "core").mkdir(parents=True)
    file = tmp_path / "csrc" / "core" / "a.h"
    hashes = set()
    for content in ("int a;", "int b;"):
        file.write_text(content)
        hashes.add(source_hash(tmp_path, "cpu"))
        assert source_hash(tmp_path, "cpu") in hashes
    file.rename(file.with_name("b.h"))
    hashes.add(source_hash(tmp_path, "cpu"))
    (tmp_path / "csrc" / "notes.txt").write_text("no source")
    assert len(hashes) == 3 and source_hash(tmp_path, "cpu") in hashes


@pytest.mark.parametrize(
    ("room", "stale"),
    [
        ("core", {"cpu", "cuda", "emulated"}),
        ("torch", {"cpu", "cuda", "emulated"}),
        ("cuda", {"cuda", "emulated"}),
        ("emulated", {"emulated"}),
    ],
)
def test_a_library_is_stale_only_where_its_own_sources_changed(tmp_path, room, stale):
    for name in ("core", "torch", "cuda", "emulated"):
        (tmp_path / "csrc" / name).mkdir(parents=True)
        (tmp_path / "csrc" / name / "a.h").write_text("int a;")
    before = {backend: source_hash(tmp_path, backend) for backend in ("cpu", "cuda", "emulated")}
    (tmp_path / "csrc" / room / "a.h").write_text("int b;")
    assert {backend for backend in before if source_hash(tmp_path, backend) != before[backend]} == stale


@pytest.mark.slow
@pytest.mark.parametrize("record", [None, "", '{"torch": 2}'])
def test_a_library_without_a_sound_record_is_not_loaded(second, record):
    folder = second()
    (folder / "_build.json").unlink() if record is None else (folder / "_build.json").write_text(record)
    printed, stderr = use(folder)
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert "is missing or damaged" in warning


@pytest.fixture
def recorded(tmp_path):
    """A folder with a library of another program and a record that fits it, as a build writes
    it.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to make a library with")
    (tmp_path / "empty.cpp").write_text(
        "int nothing;\n" + "".join(f"int f{i}() {{ return {i}; }}\n" for i in range(200))
    )
    library = tmp_path / "_C.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "empty.cpp"], check=True)
    (tmp_path / "_build.json").write_text(json.dumps(RECORD | {"library": file_facts(library)}))
    return library


@pytest.mark.slow
def test_a_cut_library_is_not_loaded(recorded):
    """The kernel kills a process that reads a page of it which is not there."""
    whole = recorded.stat().st_size
    recorded.write_bytes(recorded.read_bytes()[: whole // 3])
    printed, stderr = use(recorded.parent)
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert f"was not loaded: it is damaged: it has {whole // 3:,} bytes, and {whole:,} were built" in warning


def test_a_library_with_a_flipped_bit_is_not_loaded(recorded, capsys, monkeypatch):
    content = bytearray(recorded.read_bytes())
    content[len(content) // 2] ^= 1
    recorded.write_bytes(content)
    module, _, obstacle = _loader._load(recorded.parent)
    assert module is None
    assert obstacle == f"{recorded} was not loaded: it is damaged: its content is not what was built"
    monkeypatch.setattr(_loader, "native", None)
    monkeypatch.setattr(_loader, "obstacle", obstacle)
    main(["doctor"])
    assert f"not used: {obstacle}" in capsys.readouterr().out


def test_a_whole_library_comes_to_be_loaded(recorded):
    assert "does not load" in _loader._load(recorded.parent)[2]  # it is none of ours


@pytest.mark.slow
def test_a_file_that_is_no_library_is_no_traceback(second):
    folder = second(library=None)
    library = folder / Path(_loader.native.__file__).name
    library.write_bytes(b"<html>not a library</html>")
    printed, stderr = use(folder)
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert f"{library} does not load" in warning


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to make a library with an undefined symbol")
def test_an_undefined_symbol_is_no_traceback(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("extern int gone_from_torch;\nint* address = &gone_from_torch;\n")
    library = tmp_path / "_C.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    (tmp_path / "_build.json").write_text(json.dumps(RECORD))
    printed, stderr = use(tmp_path)
    assert printed == "None False"
    (warning,) = warnings_in(stderr)
    assert "undefined symbol: gone_from_torch" in warning


@pytest.mark.parametrize(
    ("record", "version", "cuda", "loads"),
    [
        ({"torch": "2.14.1+cu130", "backend": "cuda", "cuda": "13.0"}, "2.14.0+cu131", "13.1", True),
        ({"torch": "2.14.1+cu130", "backend": "cuda", "cuda": "13.0"}, "2.15.0+cu130", "13.0", False),
        ({"torch": "2.1.0+cu130", "backend": "cuda", "cuda": "13.0"}, "2.14.0+cu130", "13.0", False),
        ({"torch": "2.14.1+cu130", "backend": "cuda", "cuda": "13.0"}, "2.14.1+cu128", "12.8", False),
        ({"torch": "2.14.1+cu130", "backend": "cuda", "cuda": "13.0"}, "2.14.1+cpu", None, False),
        ({"torch": "2.14.1+cu130", "backend": "cpu", "cuda": None}, "2.14.1+cpu", None, True),
        ({"torch": "2.14.0a0+gitabc", "backend": "cpu", "cuda": None}, "2.14.1", None, True),
        ({"torch": "2.14.1+cu130", "backend": "emulated", "cuda": None}, "2.14.1+cpu", None, True),
    ],
)
def test_which_libraries_are_let_in(record, version, cuda, loads):
    obstacle = _loader._obstacle({"sources": "0123"} | record, version, cuda, "0123")
    assert (obstacle is None) == loads
    if not loads:
        assert version in obstacle


def test_serves_wants_one_device_that_the_library_has_code_for(monkeypatch):
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    monkeypatch.setattr(_loader, "native", mose_fast)
    monkeypatch.setattr(_loader, "record", {"backend": "cuda"})
    assert _loader.serves("null", cpu, cpu)
    assert not _loader.serves("null", meta)
    assert not _loader.serves("null", cpu, meta)
    monkeypatch.setattr(_loader, "native", None)
    assert not _loader.serves("null", cpu)


def test_no_op_asks_whether_a_device_is_cuda():
    """Kernels take what is on a GPU, and on an emulated GPU that is what lies on the CPU:
    _loader.on_gpu() alone says so.
    """
    asks = re.compile(r"type (==|!=|in) [^\n]*cuda|\bis_(cuda|cpu)\b")
    files = [path.name for path in (ROOT / "mose_fast" / "ops").glob("*.py") if asks.search(path.read_text())]
    assert files == []


@pytest.mark.parametrize(("backend", "gpu"), [("cpu", None), ("cuda", "cuda"), ("emulated", "cpu")])
def test_kernels_take_what_is_on_a_gpu_or_on_the_cpu_that_emulates_one(monkeypatch, backend, gpu):
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    monkeypatch.setattr(_loader, "native", mose_fast)
    monkeypatch.setattr(_loader, "record", {"backend": backend})
    assert _loader.gpu() == gpu
    assert _loader.serves("null", cpu) and _loader.has_code("cpu")
    assert _loader.has_code("cuda") == (gpu == "cuda") and not _loader.has_code("meta")
    assert _loader.on_gpu("null", cpu, cpu) == (gpu == "cpu")
    assert not _loader.on_gpu("null", cpu, meta) and not _loader.on_gpu("null", meta)
    # An op that is switched off is off on the GPU alone: csrc/cpu serves the host.
    monkeypatch.setattr(_loader, "off", {})
    _loader.switch_off({"null": "a row that failed"})
    assert _loader.serves("null", cpu) == (gpu != "cpu") and not _loader.on_gpu("null", cpu)
    assert _loader.serves("adam", cpu)
    monkeypatch.setattr(_loader, "native", None)
    assert _loader.gpu() is None and not _loader.on_gpu("adam", cpu) and not _loader.has_code("cpu")
