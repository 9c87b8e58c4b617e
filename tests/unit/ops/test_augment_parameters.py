"""Random view parameters: native against reference, and both against an independent float
implementation of their law.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from mose_fast import _loader
from mose_fast.ops import augment_parameters as ops
from mose_fast.ops.augment_parameters import CONTRAST_FIRST, GRAY, JITTER, Recipe, draw_augment_parameters
from mose_fast.reference import augment_parameters as reference

needs_native = pytest.mark.skipif(_loader.native is None, reason="the native library is not built")
SCR = Recipe(
    mirror_p=0.5, gray_p=0.2, area_low=0.2, jitter_p=0.8, brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1
)
OCM = Recipe(gray_p=0.25, area_low=0.3)
CPU = torch.device("cpu")
#: Some forty tests of distributions share this file, at fixed seeds: right code passes all of them
#: with a probability of 99.6 %.
SIGNIFICANCE = 1e-4


@needs_native
@pytest.mark.parametrize("recipe", [SCR, OCM, Recipe(), dataclasses.replace(SCR, area_low=0.7, area_high=0.9)])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (1, 1), (5, 64), (97, 8)])
def test_native_equals_reference(recipe, height, width):
    for seed, sequence, count in ((0, 0, 1), (2**40 + 1, 3, 384), (2**63 - 1, 2**63 - 1, 5000)):
        ours = draw_augment_parameters(recipe, seed, sequence, count, height, width)
        pure = reference.draw_augment_parameters(recipe, seed, sequence, count, height, width, CPU)
        for a, b in zip(ours, pure, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def crops_by_numpy(count: int, low: float, high: float, size: int) -> np.ndarray:
    """[count, 4]: width, height, offset x, offset y, by the law in plain floats and NumPy's own
    random numbers.
    """
    random = np.random.default_rng(1)
    crops = []
    for _ in range(count):
        crop = (size, size, 0, 0)
        for _ in range(10):
            area = random.uniform(low, high) * size * size
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= size and 0 < h <= size:
                crop = (
                    w,
                    h,
                    random.integers(w - size, size - w, endpoint=True),
                    random.integers(h - size, size - h, endpoint=True),
                )
                break
        crops.append(crop)
    return np.array(crops)


def two_sample_p(a: np.ndarray, b: np.ndarray) -> float:
    """p of a chi-square test that two samples of integers have one distribution; rare values share
    a bin.
    """
    values = np.unique(np.concatenate([a, b]))
    table = np.array([[(sample == value).sum() for value in values] for sample in (a, b)])
    rare = table.sum(0) < 40
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    return float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


@pytest.mark.parametrize("recipe", [SCR, OCM])
def test_crops_follow_the_law(recipe):
    size = 32
    codes, _ = draw_augment_parameters(recipe, 5, 0, 200_000, size, size)
    ours = codes[:, 1:5].numpy().astype(np.int64)
    wanted = crops_by_numpy(40_000, recipe.area_low, 1.0, size)
    for column in range(4):
        assert two_sample_p(ours[:, column], wanted[:, column]) > SIGNIFICANCE
    areas, wanted_areas = ours[:, 0] * ours[:, 1], wanted[:, 0] * wanted[:, 1]
    error = math.sqrt(areas.var() / len(areas) + wanted_areas.var() / len(wanted_areas))
    assert abs(areas.mean() - wanted_areas.mean()) < 4 * error
    assert stats.ks_2samp(areas, wanted_areas).pvalue > SIGNIFICANCE
    assert stats.ks_2samp(ours[:, 0] / ours[:, 1], wanted[:, 0] / wanted[:, 1]).pvalue > SIGNIFICANCE


def test_offsets_are_uniform_given_the_size():
    codes, _ = draw_augment_parameters(SCR, 6, 0, 200_000, 32, 48)
    for side, size, column in ((1, 48, 3), (2, 32, 4)):
        for crop in (20, 25, 31):
            offsets = codes[codes[:, side] == crop, column].numpy()
            free = size - crop
            assert len(offsets) > 1000
            assert offsets.min() == -free
            assert offsets.max() == free
            assert stats.chisquare(np.bincount(offsets + free, minlength=2 * free + 1)).pvalue > SIGNIFICANCE


def test_switches_have_their_probabilities_and_are_independent():
    count = 200_000
    codes, factors = draw_augment_parameters(SCR, 7, 0, count, 32, 32)
    flags = codes[:, 5]
    switches = np.stack([codes[:, 0], (flags & GRAY) > 0, (flags & JITTER) > 0, (flags & CONTRAST_FIRST) > 0]).astype(
        np.float64
    )
    wanted = np.array([SCR.mirror_p, SCR.gray_p, SCR.jitter_p, 0.5])
    assert np.all(np.abs(switches.mean(1) - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / count))
    others = np.concatenate([switches, codes[:, 1:5].numpy().T, factors.numpy().T])[:, switches[2] > 0]
    correlation = np.corrcoef(np.delete(others, 2, axis=0))
    assert np.abs(correlation - np.diag(np.diag(correlation)))[:, [0, 1, 2, 5, 6, 7, 8, 9, 10]].max() < 0.02
    assert set(np.unique(flags)) == set(range(8))


def test_jitter_factors_are_uniform_in_their_ranges():
    codes, factors = draw_augment_parameters(SCR, 8, 0, 100_000, 32, 32)
    jittered = (codes[:, 5] & JITTER) > 0
    for column, (centre, half) in enumerate(
        [(0, SCR.hue), (1, SCR.saturation), (1, SCR.brightness), (1, SCR.contrast)]
    ):
        values = factors[jittered, column].double().numpy()
        assert stats.kstest(values, stats.uniform(centre - half, 2 * half).cdf).pvalue > SIGNIFICANCE
        assert np.all(np.abs(values - centre) <= half * (1 + 1e-6))
    assert torch.equal(factors[~jittered], torch.tensor([0.0, 1.0, 1.0, 1.0]).expand(int((~jittered).sum()), 4))


def test_whole_image_without_crop_and_where_no_trial_fits():
    whole = torch.tensor([40, 3, 0, 0], dtype=torch.int32).expand(500, 4)
    assert torch.equal(draw_augment_parameters(Recipe(), 1, 0, 500, 3, 40)[0][:, 1:5], whole)
    # 90 % of 3 x 40 pixels at a ratio of at most 4/3 is at least 9 pixels high.
    assert torch.equal(draw_augment_parameters(Recipe(area_low=0.9), 1, 0, 500, 3, 40)[0][:, 1:5], whole)


@pytest.mark.parametrize("back_end", [draw_augment_parameters, reference.draw_augment_parameters])
def test_views_depend_on_seed_sequence_and_number_only(back_end):
    codes, factors = back_end(SCR, 3, 4, 60, 32, 32, CPU)
    shorter = back_end(SCR, 3, 4, 20, 32, 32, CPU)
    assert torch.equal(codes[:20], shorter[0])
    assert torch.equal(factors[:20], shorter[1])
    for seed, sequence in ((4, 4), (3, 5), (3, 4 + 2**32)):
        assert not torch.equal(codes, back_end(SCR, seed, sequence, 60, 32, 32, CPU)[0])
    empty = back_end(SCR, 3, 4, 0, 32, 32, CPU)
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 6), (0, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed is -1; wanted an integer from 0"),
        ({"seed": 2**63}, f"seed is {2**63}; wanted an integer from 0"),
        ({"sequence": 1.5}, "sequence is 1.5; wanted an integer"),
        ({"count": -1}, "count is -1; wanted an integer from 0"),
        ({"height": 0}, "height is 0; wanted an integer from 1"),
        ({"width": True}, "width is True; wanted an integer from 1"),
        ({"recipe": Recipe(mirror_p=1.5)}, r"recipe.mirror_p is 1.5; wanted a probability in \[0, 1\]"),
        ({"recipe": Recipe(area_low=0.8, area_high=0.5)}, "recipe.area_low is 0.8; wanted at most area_high, 0.5"),
        ({"recipe": Recipe(hue=float("nan"))}, "recipe.hue is nan; wanted a number of at least 0"),
    ],
)
def test_refuses(change, message):
    arguments = {"recipe": SCR, "seed": 0, "sequence": 0, "count": 1, "height": 32, "width": 32}
    with pytest.raises(ValueError, match=message):
        ops.draw_augment_parameters(**{**arguments, **change})


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "fallback"])
def back_end(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return draw_augment_parameters


def test_a_counter_continues_the_sequence(back_end):
    counter = torch.tensor([2**40])
    for step in range(3):
        ours = back_end(SCR, 3, 5, 40, 32, 32, "cpu", counter)
        wanted = back_end(SCR, 3, 5 + 2**40 + step, 40, 32, 32)
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
        assert counter.tolist() == [2**40 + step + 1]
    back_end(SCR, 3, 5, 0, 32, 32, "cpu", counter)
    assert counter.tolist() == [2**40 + 4]  # a draw of no views counts too


@pytest.mark.parametrize(
    ("counter", "error", "message"),
    [
        (3, TypeError, "counter is 3; wanted a torch.Tensor"),
        (torch.zeros(1), TypeError, "counter has dtype torch.float32; wanted torch.int64"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"counter has shape \(2,\); wanted one element"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), ValueError, "counter is on meta; wanted cpu"),
    ],
)
def test_refuses_a_counter_that_does_not_fit(back_end, counter, error, message):
    with pytest.raises(error, match=message):
        back_end(SCR, 3, 5, 40, 32, 32, "cpu", counter)


@needs_native
@pytest.mark.parametrize("counter", [None, 4])
def test_opcheck(counter):
    numbers = [float(x) for x in dataclasses.astuple(SCR)]
    tensor = None if counter is None else torch.tensor([counter])
    arguments = (numbers, 1, 2, 5, 32, 32, "cpu", tensor)
    assert set(torch.library.opcheck(torch.ops.mose_fast.augment_parameters.default, arguments).values()) == {"SUCCESS"}


@needs_native
def test_compiles_without_a_graph_break():
    def draw(counter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_augment_parameters(SCR, 3, 5, 40, 32, 32, "cpu", counter)

    counter, other = torch.tensor([7]), torch.tensor([7])
    ours, wanted = torch.compile(draw, fullgraph=True, backend="aot_eager")(counter), draw(other)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert counter.tolist() == other.tolist() == [8]
