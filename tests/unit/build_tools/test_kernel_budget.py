"""The budget check reads what ptxas really says, and complains about spills, growth, and lines or
kernels without the other.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from build_tools.cuda import find_toolkits
from build_tools.kernel_budget import ARCHS, Usage, compare, kernel_name, main, parse_budget, parse_ptxas, table

TOOLKITS = find_toolkits(os.environ)[0]
needs_nvcc = pytest.mark.skipif(not TOOLKITS, reason="there is no CUDA toolkit")

# What ptxas of CUDA 13.0 printed; the second kernel's stack and spills were written in by hand.
OUTPUT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN2mf4cuda45_GLOBAL__N__e0636ab4_12_reservoir_cu_cb0fe88521reservoir_copy_kernelI5uint4EEvNS_21ReservoirInsertParamsE' for 'sm_80'
ptxas info    : Function properties for _ZN2mf4cuda45_GLOBAL__N__e0636ab4_12_reservoir_cu_cb0fe88521reservoir_copy_kernelI5uint4EEvNS_21ReservoirInsertParamsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers, 464 bytes cmem[0]
ptxas info    : Compile time = 9.655 ms
ptxas info    : Compiling entry function '_Z5plainPf' for 'sm_90a'
ptxas info    : Function properties for _ZN2mf6helperEf
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for _Z5plainPf
    32 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""  # noqa: E501


def test_parse_ptxas():
    first, second = parse_ptxas(OUTPUT)
    assert first[:5] == ("reservoir_copy_kernel", "80", 26, 0, 0)
    assert first.symbol.startswith("_ZN2mf4cuda45_GLOBAL__N__e0636ab4_12_reservoir_cu")
    assert second == Usage("plain", "90a", 255, 48, 24, "_Z5plainPf")
    assert parse_ptxas("") == []


def test_another_wording_of_ptxas_is_an_error_not_a_pass():
    with pytest.raises(ValueError, match="ptxas said something else than was wanted"):
        parse_ptxas(OUTPUT.replace("Used 26 registers", "26 regs"))


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z5plainPf", "plain"),
        ("_Z5plain6Params", "plain"),
        ("_ZN2mfL6staticEi", "static"),
        ("_ZN2mf4cuda12_GLOBAL__N_16kernelIfLi3EEEvNS_1PE", "kernel"),
        ("extern_c", "extern_c"),
    ],
)
def test_kernel_name(symbol, name):
    assert kernel_name(symbol) == name


def on_all(registers: int, **others: int) -> dict[str, int]:
    """A kernel's line: the registers on every architecture but for ``others``, as sm_90=64."""
    return dict.fromkeys(ARCHS, registers) | {name.removeprefix("sm_"): number for name, number in others.items()}


def test_parse_budget():
    text = "# all\n\na_kernel 32 32 32 40 32 32  # why\nb 64 64 64 64 64 72\n"
    assert parse_budget(text) == {"a_kernel": on_all(32, sm_90=40), "b": on_all(64, sm_120=72)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 32", "line 1 is 'a 32'; wanted a kernel's name and its registers on sm_80, sm_86, "),
        ("a 8 8 8 8 8 -1", "line 1 is"),
        ("a 8 8 8 8 8 8\na 9 9 9 9 9 9", "line 2: a has a line"),
    ],
)
def test_parse_budget_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        parse_budget(text)


def test_compare():
    good = [Usage("a", "80", 32, 0, 0, ""), Usage("a", "90", 30, 0, 0, ""), Usage("a", "90", 39, 0, 0, "")]
    assert compare(good, {"a": on_all(32, sm_90=40)}) == []
    assert compare(good, {"a": on_all(32)}) == [
        "a takes 40 registers on sm_90, granted are 32. Needed: a 32 - - 40 - -"
    ]
    assert compare(good[:1], {}) == ["a has no line; needed: a 32 - - - - -"]
    for stack, spills in ((0, 4), (8, 0)):
        assert compare([Usage("a", "120", 8, stack, spills, "")], {"a": on_all(255)}) == [
            f"a has a stack of {stack} bytes and spills {spills} on sm_120; wanted none"
        ]
    assert compare([], {"gone": on_all(8)}) == ["gone has a line, but there is no such kernel"]


def test_table_merges_the_instances_of_a_template():
    lines = table([Usage("a", "80", 20, 8, 0, ""), Usage("a", "80", 24, 0, 4, "")]).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["a", "sm_80", "2", "24", "8", "4"]


@needs_nvcc
def test_real_spills_are_seen(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(
        "namespace mf { template <int n> __global__ void hungry(float* x) {\n  float v[n];\n"
        "#pragma unroll\n  for (int i = 0; i < n; ++i) v[i] = x[i * 32 + threadIdx.x];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < n; ++i) x[(n - i) * 64 + threadIdx.x] = v[i] * v[(i + 7) % n];\n}\n"
        "template __global__ void hungry<4>(float*);\ntemplate __global__ void hungry<96>(float*); }\n"
    )
    target = ["-cubin", "-arch=sm_80", "-maxrregcount=32", "-Xptxas", "-v", "-o", str(tmp_path / "x"), str(source)]
    done = subprocess.run([TOOLKITS[0].root / "bin" / "nvcc", *target], capture_output=True, text=True, check=True)
    usages = sorted(parse_ptxas(done.stderr), key=lambda usage: usage.spills)
    assert [usage.kernel for usage in usages] == ["hungry", "hungry"]
    assert usages[0].spills == 0 < usages[1].spills


def test_without_a_toolkit_the_check_says_so(monkeypatch, capsys):
    monkeypatch.setattr("build_tools.kernel_budget.find_toolkits", lambda environment: ([], ["PATH: no nvcc"]))
    assert main() == 2
    assert "no CUDA toolkit to compile with. Looked in:\n  PATH: no nvcc" in capsys.readouterr().err
