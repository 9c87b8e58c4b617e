"""The headers of csrc/core as g++ and nvcc compile them: published values, error bounds, and the
same bits under any flags.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.reference.augment_parameters import exponential
from tests.paths import ROOT

SOURCE = "host_decisions.cpp"
CSRC = ROOT / "csrc"
RECIPE = Recipe(
    mirror_p=0.5,
    gray_p=0.2,
    area_low=0.2,
    area_high=1.0,
    jitter_p=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
)
SEED, VIEWS = 7, 10_000_000


def run(*command) -> bytes:
    return subprocess.run([str(part) for part in command], capture_output=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def program(compiled):
    return compiled(SOURCE, "-O2", "-Wall", "-Wextra")


# Random123's published known answers for philox4x32-10 (Salmon et al. 2011).
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(program, words, answer):
    assert run(program, "philox", *words.split()).decode().strip() == answer


def test_exponential_is_within_two_ulp_and_equals_the_reference(program):
    ours = np.frombuffer(run(program, "exponential"))
    x = np.arange(-12000, 12001) / 40000
    exact = np.array([math.exp(value) for value in x])
    assert np.max(np.abs(ours - exact) / np.spacing(exact)) <= 2
    np.testing.assert_array_equal(exponential(torch.from_numpy(x)).numpy(), ours)


@pytest.fixture(scope="module")
def wanted_views(program) -> str:
    return run(program, "views", SEED, VIEWS, 32, 32).decode().strip()


@pytest.fixture(scope="module")
def fused(compiled):
    """Compiled as if a build file had lost its flags: products and sums may be fused wherever the
    compiler sees them.
    """
    return compiled(SOURCE, "-O3", "-march=native", "-ffp-contract=fast")


def test_arithmetic_does_not_depend_on_flags(program, fused):
    # Raw fp64, where a single fused operation shows; the integers drawn from it would hide nearly
    # all of them.
    assert run(fused, "exponential") == run(program, "exponential")


@pytest.mark.slow
def test_ten_million_views_do_not_depend_on_flags(fused, wanted_views):
    assert run(fused, "views", SEED, VIEWS, 32, 32).decode().strip() == wanted_views


@pytest.mark.slow
def test_ten_million_views_are_equal_under_nvcc(compiled, wanted_views):
    program = compiled(SOURCE, "-O2", "-x", "cu", compiler="nvcc")
    assert run(program, "views", SEED, VIEWS, 32, 32).decode().strip() == wanted_views


@pytest.mark.slow
@pytest.mark.skipif(_loader.native is None, reason="the native library is not built")
def test_ten_million_views_of_the_native_op_are_equal(wanted_views):
    crc = 0
    for sequence in range(VIEWS // 1_000_000):
        for tensor in draw_augment_parameters(RECIPE, SEED, sequence, 1_000_000, 32, 32):
            crc = zlib.crc32(tensor.numpy(), crc)
    assert f"{crc:08x}" == wanted_views


def test_device_code_rounds_every_operation(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc on PATH")
    ptx = tmp_path / "augment_parameters.ptx"
    run(
        "nvcc",
        "-std=c++17",
        "-O3",
        "-arch=sm_80",
        "-ptx",
        f"-I{CSRC}",
        CSRC / "cuda" / "augment_parameters.cu",
        "-o",
        ptx,
    )
    operations = set(re.findall(r"\b((?:fma|mad|mul|add|sub|div|sqrt)[a-z.]*\.f(?:64|32))\b", ptx.read_text()))
    # Only operations with an explicit .rn are never fused; a plain mul.f64 or an fma.rn.f64 would
    # be a decision of the compiler's.
    assert operations == {"mul.rn.f64", "add.rn.f64", "div.rn.f64", "sqrt.rn.f64"}
