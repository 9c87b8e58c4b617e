"""The views op: native and fallback against the reference in float64, hand-worked geometry,
registration, refusals.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.augment import RECIPES
from mose_fast.ops.augment import augment
from mose_fast.ops.augment_parameters import draw_augment_parameters
from mose_fast.reference import augment as reference

needs_native = pytest.mark.skipif(_loader.native is None, reason="the native library is not built")
MEAN, STD = (0.5, 0.48, 0.44), (0.2, 0.24, 0.26)


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "fallback"])
def op(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return augment


def make_step(views: int, size: tuple[int, int], recipe: str, seed: int = 0, padding: bool = True) -> dict[str, object]:
    """Rows of two sources in random order, every orientation that the shape allows, a draw for two
    thirds of the views.
    """
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator) for n in (5, 9)]
    rows = torch.randperm(14, generator=generator)[:11]
    if padding:
        rows[3] = -1
    orientation = torch.randint(0, 16, (views,), generator=generator)
    if size[0] != size[1]:
        orientation &= 0b1011
    draws = torch.arange(views)
    draws[1::3] = -1
    layout = torch.stack([torch.randint(0, 11, (views,), generator=generator), orientation, draws], dim=1).to(
        torch.int32
    )
    codes, factors = draw_augment_parameters(RECIPES[recipe], seed, 1, views, *size)
    return {
        "sources": sources,
        "rows": rows,
        "layout": layout,
        "codes": codes,
        "factors": factors,
        "mean": MEAN,
        "std": STD,
    }


def truth(step: dict[str, object], jitter_normalised: bool = False, channels: int = 3) -> Tensor:
    return reference.augment(**step, jitter_normalised=jitter_normalised, dtype=torch.float64, channels=channels)


@pytest.mark.slow
@pytest.mark.parametrize("jitter_normalised", [False, True])
@pytest.mark.parametrize("recipe", ["scr", "ocm", "simclr", "gsa"])
@pytest.mark.parametrize(
    ("views", "size"),
    [(384, (32, 32)), (30, (64, 64)), (48, (8, 8)), (12, (24, 16)), (5, (7, 5)), (1, (1, 1)), (6, (80, 80))],
)
def test_equals_the_reference_in_float64(op, views, size, recipe, jitter_normalised):
    step = make_step(views, size, recipe, seed=views)
    wanted = truth(step, jitter_normalised)
    ours = op(**step, jitter_normalised=jitter_normalised)
    assert ours.dtype == torch.float32
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert ours.shape == (views, 3, *size)
    bound = 1e-5 if _loader.native is not None else max(1e-5, 2**-21 * max(size) / min(STD))
    torch.testing.assert_close(ours.double(), wanted, rtol=bound, atol=bound)


@needs_native
@pytest.mark.parametrize("channels", [3, 4, 8])
def test_bfloat16_is_one_rounding(channels):
    step = make_step(100, (32, 32), "scr")
    exact, ours = augment(**step), augment(**step, dtype=torch.bfloat16, channels=channels)
    assert ours.shape == (100, channels, 32, 32)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[:, :3], exact.bfloat16())  # PyTorch's rounding: to nearest, ties to even
    assert not ours[:, 3:].any()
    error = (ours[:, :3].double() - truth(step)).abs()
    assert (error <= 2.0**-8 * truth(step).abs() + 1e-5).all()


@needs_native
def test_bfloat16_at_the_ends_of_its_range():
    """256 grey levels times each scale reach denormals, ties, the largest number and infinity;
    PyTorch's rounding is the witness.
    """
    levels = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(256, 1, 1, 3)
    layout = torch.stack([torch.arange(256), torch.zeros(256), torch.full((256,), -1)], dim=1).to(torch.int32)
    nothing = (torch.empty(0, 6, dtype=torch.int32), torch.empty(0, 4))
    for power in range(-130, 130, 4):
        scale = (2.0**power, 3.0**-power, 1.7**power)
        arguments = ([levels], torch.arange(256), layout, *nothing, (0.5, 0.1, 0.0), scale)
        exact = augment(*arguments)
        assert torch.equal(augment(*arguments, dtype=torch.bfloat16), exact.bfloat16())


def test_not_a_number_is_not_hidden(op):
    """A factor that is NaN makes its view NaN, black pixels too, although the jitter ends in a
    clamp.
    """
    image = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    image[0, :2, :, 1] = 200
    codes = torch.tensor([[0, 4, 4, 0, 0, 2], [0, 4, 4, 0, 0, 2 | 4]], dtype=torch.int32)
    layout = torch.tensor([[0, 0, 0], [0, 0, 1]], dtype=torch.int32)
    for place in range(4):
        factors = torch.tensor([[0.1, 1.2, 0.9, 1.1]] * 2)
        factors[:, place] = torch.nan
        assert op([image], torch.tensor([0]), layout, codes, factors, MEAN, STD).isnan().all()


def test_plain_views_by_hand(op):
    """Two pixels of known bytes: (byte / 255 - mean) / std, in the orientation asked for, padding
    zero.
    """
    image = torch.tensor([[[0, 51, 255], [255, 102, 0]]], dtype=torch.uint8).view(1, 1, 2, 3)
    layout = torch.tensor([[0, 0, -1], [0, 2, -1], [1, 0, -1], [0, 8, -1]], dtype=torch.int32)
    nothing = (torch.empty(0, 6, dtype=torch.int32), torch.empty(0, 4))
    views = op([image], torch.tensor([0, -1]), layout, *nothing, (0.0, 0.2, 0.5), (1.0, 0.1, 0.25), channels=4)
    left, right = [0.0, 0.0, 2.0, 0.0], [1.0, 2.0, -2.0, 0.0]
    wanted = [
        [left, right],
        [right, left],
        [[0.0] * 4] * 2,
        [right, left],
    ]  # one row is the lower half; 8 is two quarter turns
    torch.testing.assert_close(views.permute(0, 2, 3, 1)[:, 0], torch.tensor(wanted))


def test_a_crop_by_hand(op):
    """A window of half the width: output pixel i lies at (i - 3.5) / 2 + 3.5 + offset / 2 of an 8
    pixel ramp, reflected at its ends.
    """
    ramp = (torch.arange(8, dtype=torch.uint8) * 30).view(1, 1, 8, 1).expand(1, 1, 8, 3)
    offsets = torch.arange(-12, 13)
    codes = torch.zeros(25, 6, dtype=torch.int32)
    codes[:, 1], codes[:, 2], codes[:, 3] = 4, 1, offsets
    factors = torch.tensor([0.0, 1.0, 1.0, 1.0]).expand(25, 4)
    layout = torch.stack([torch.zeros(25), torch.zeros(25), torch.arange(25)], dim=1).to(torch.int32)
    views = op([ramp], torch.tensor([0]), layout, codes, factors, (0.0,) * 3, (1.0,) * 3)
    mirrored = (
        np.r_[np.arange(8)[::-1], np.arange(8), np.arange(8)[::-1]] * 30 / 255
    )  # what reflection makes of the ramp
    for offset, view in zip(offsets.tolist(), views, strict=True):
        position = (np.arange(8) - 3.5) / 2 + 3.5 + offset / 2
        wanted = np.interp(position + 8, np.arange(24), mirrored)
        np.testing.assert_allclose(view[0, 0].numpy(), wanted, atol=1e-6)


@needs_native
def test_hue_by_atan2():
    """The native hue against the standard library, through a jitter that turns the hue and keeps
    the rest.
    """
    generator = torch.Generator().manual_seed(1)
    colours = torch.randint(0, 256, (4096, 1, 1, 3), dtype=torch.uint8, generator=generator)
    turn = 0.1
    codes = torch.tensor([[0, 1, 1, 0, 0, 2]], dtype=torch.int32)
    factors = torch.tensor([[turn * 360 / 255, 1.0, 1.0, 1.0]])
    layout = torch.stack([torch.arange(4096), torch.zeros(4096), torch.zeros(4096)], dim=1).to(torch.int32)
    views = augment([colours], torch.arange(4096), layout, codes, factors, (0.0,) * 3, (1.0,) * 3)[:, :, 0, 0]
    for (red, green, blue), view in zip((colours[:, 0, 0].double() / 255).tolist(), views.tolist(), strict=True):
        high, low = max(red, green, blue), min(red, green, blue)
        hue = math.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / math.tau + turn
        wanted = [high - (high - low) * min(max(min(k, 4 - k), 0), 1) for k in ((6 * hue + n) % 6 for n in (5, 3, 1))]
        assert view == pytest.approx(wanted, abs=2e-6)


def test_inputs_of_any_layout(op):
    step = make_step(20, (16, 16), "scr")
    wanted = op(**step)
    odd = dict(step)
    odd["sources"] = [
        step["sources"][0].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        torch.cat([step["sources"][1], step["sources"][1]], dim=3)[..., :3],
    ]
    odd["rows"] = torch.stack([step["rows"], step["rows"]], dim=1)[:, 1]
    odd["layout"] = step["layout"].T.contiguous().T
    odd["codes"] = step["codes"].T.contiguous().T
    odd["factors"] = torch.cat([step["factors"], step["factors"]], dim=1)[:, 4:]
    before = [odd[name].clone() for name in ("rows", "layout", "codes", "factors")] + [
        source.clone() for source in odd["sources"]
    ]
    assert torch.equal(op(**odd), wanted)
    after = [odd[name] for name in ("rows", "layout", "codes", "factors")] + odd["sources"]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_no_views_and_no_rows(op):
    step = make_step(0, (8, 8), "scr")
    assert op(**step).shape == (0, 3, 8, 8)
    step["rows"] = step["rows"][:0]
    step["sources"] = [source[:0] for source in step["sources"]]
    assert op(**step, channels=8).shape == (0, 8, 8, 8)


@needs_native
def test_two_runs_and_any_number_of_threads_give_the_same_bits():
    step = make_step(101, (32, 32), "scr")
    first = augment(**step)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(augment(**step), first)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_rows_beyond_two_gibibytes():
    """100,000 images of 64 x 64 and as many again: row offsets need 64 bits.

    Memory that is not touched is never mapped.
    """
    memory = torch.empty(200_000, 64, 64, 3, dtype=torch.uint8)
    for row in (0, 99_999, 199_999):
        memory[row] = row % 251
    rows = torch.tensor([199_999, 0, 99_999])
    layout = torch.tensor([[0, 0, -1], [1, 0, -1], [2, 3, -1]], dtype=torch.int32)
    nothing = (torch.empty(0, 6, dtype=torch.int32), torch.empty(0, 4))
    views = augment([memory], rows, layout, *nothing, (0.0,) * 3, (1 / 255,) * 3)
    wanted = (rows % 251).float().view(3, 1, 1, 1).expand(3, 3, 64, 64)
    torch.testing.assert_close(views, wanted)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    step = make_step(6, (8, 8), "scr")
    arguments = (*step.values(), False, dtype)
    assert set(torch.library.opcheck(torch.ops.mose_fast.augment.default, arguments).values()) == {"SUCCESS"}


@needs_native
def test_compiles_without_a_graph_break():
    step = make_step(6, (8, 8), "scr")
    step.pop("mean"), step.pop("std")

    def views(sources, rows, layout, codes, factors):
        return augment(sources, rows, layout, codes, factors, MEAN, STD) * 2

    compiled = torch.compile(views, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**step), views(**step))


@needs_native
def test_autocast_changes_nothing():
    step = make_step(6, (8, 8), "scr")
    wanted = augment(**step)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(**step), wanted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sources": []}, ValueError, "sources has 0 tensors; wanted 1 to 4"),
        (
            {"sources": [torch.zeros(2, 8, 8, 3)]},
            TypeError,
            r"sources\[0\] has dtype torch.float32; wanted torch.uint8",
        ),
        (
            {"sources": [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]},
            ValueError,
            r"sources\[0\] has shape \(2, 3, 8, 8\); wanted \[rows, H",
        ),
        (
            {"sources": [torch.zeros(20, 8, 8, 3, dtype=torch.uint8), torch.zeros(2, 8, 9, 3, dtype=torch.uint8)]},
            ValueError,
            r"sources\[1\] has shape \(2, 8, 9, 3\); wanted images like those of sources\[0\], \(20, 8, 8, 3\)",
        ),
        (
            {"sources": [torch.zeros(20, 1, 1025, 3, dtype=torch.uint8)]},
            ValueError,
            "images of 1x1025 pixels; wanted sides of 1 to 1024",
        ),
        ({"rows": torch.zeros(11)}, TypeError, "rows has dtype torch.float32; wanted torch.int64"),
        ({"rows": torch.tensor([0, 14, *range(9)])}, IndexError, "14"),
        ({"rows": torch.tensor([0, -2, *range(9)])}, IndexError, "-2"),
        ({"layout": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, r"layout has shape \(3, 2\); wanted \[n, 3\]"),
        ({"layout": torch.tensor([[11, 0, -1]], dtype=torch.int32)}, IndexError, r"layout.*\b11\b"),
        ({"layout": torch.tensor([[0, 16, -1]], dtype=torch.int32)}, ValueError, "16"),
        ({"layout": torch.tensor([[0, 0, 6]], dtype=torch.int32)}, IndexError, "6"),
        ({"layout": torch.tensor([[0, 0, -2]], dtype=torch.int32)}, IndexError, "-2"),
        (
            {"codes": torch.zeros(5, 6, dtype=torch.int32)},
            ValueError,
            r"codes has shape \(5, 6\) and factors \(6, 4\); wanted as many",
        ),
        (
            {"factors": torch.zeros(6, 4, dtype=torch.float64)},
            TypeError,
            "factors has dtype torch.float64; wanted torch.float32",
        ),
        ({"factors": torch.zeros(6, 4, device="meta")}, ValueError, "factors is on meta; wanted cpu"),
        ({"mean": (0.5,)}, ValueError, r"mean is \(0.5,\); wanted 3 numbers"),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64; wanted float32 or bfloat16"),
        ({"channels": 5}, ValueError, "channels is 5; wanted 3, 4 or 8"),
    ],
)
def test_refuses(op, change, error, message):
    step = make_step(6, (8, 8), "scr", padding=False)
    with pytest.raises(error, match=message):
        op(**{**step, **change})
    assert op(**step).isfinite().all()


def test_refuses_to_turn_what_is_not_square(op):
    step = make_step(6, (8, 16), "ocm")
    step["layout"] = torch.tensor([[0, 4, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"4.* turns images of 8x16; wanted square images"):
        op(**step)
    step["layout"][0, 1] = 8
    assert op(**step).shape == (1, 3, 8, 16)
