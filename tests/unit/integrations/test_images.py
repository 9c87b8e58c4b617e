"""Benchmarks' images are turned back into the pixels that they were, or refused."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch

from mose_fast.integrations.images import Images
from mose_fast.settings.run import ConfigError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


def normalised(raw, mean, std):
    """Raw images, channels last, as torchvision's ToTensor and Normalize give them."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (raw.permute(0, 3, 1, 2) / 255 - mean) / std


@pytest.fixture
def raw():
    """Every value of a pixel, in every channel: uint8 [3, 16, 16, 3]."""
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    return torch.stack([torch.stack([values.roll(n + c, 0) for c in range(3)], -1) for n in range(3)])


def test_every_pixel_comes_back(raw):
    assert torch.equal(Images((16, 16), MEAN, STD).raw(normalised(raw, MEAN, STD)), raw)
    assert torch.equal(Images((16, 16)).raw(normalised(raw, (0,), (1,))), raw)
    assert torch.equal(Images((16, 16), MEAN, STD).raw(raw.permute(0, 3, 1, 2)), raw)
    assert torch.equal(Images((16, 16)).raw(normalised(raw, (0,), (1,)).double()), raw)


@pytest.mark.parametrize("mean_and_std", [(), ((0.1307,), (0.3081,))])
def test_a_grey_image_becomes_three_equal_channels_and_is_padded_as_mnist(mean_and_std):
    grey = torch.randint(0, 256, (2, 28, 28, 1), dtype=torch.uint8)
    images = Images((28, 28), *mean_and_std)
    found = images.raw(normalised(grey, *(mean_and_std or ((0,), (1,)))))
    assert found.dtype == torch.uint8 and found.shape == (2, 32, 32, 3)
    assert images.spec["image_size"] == (32, 32)
    assert torch.equal(found[:, 2:30, 2:30], grey.expand(-1, -1, -1, 3))
    assert found.long().sum() == 3 * grey.long().sum()  # zeros around


def test_an_odd_pixel_of_padding_is_at_the_bottom_and_at_the_right():
    images = Images((5, 8))
    found = images.raw(torch.ones(1, 3, 5, 8))[0, :, :, 0]
    assert found.shape == (8, 8) and (found == 255).all(1).tolist() == [False, *[True] * 5, False, False]


def test_the_learner_normalises_as_the_benchmark():
    assert Images((32, 32), MEAN, STD).spec == {"image_size": (32, 32), "mean": MEAN, "std": STD}
    assert Images((28, 28), [0.1], [0.3]).spec == {"image_size": (32, 32), "mean": (0.1,) * 3, "std": (0.3,) * 3}
    assert Images().spec == {"image_size": (32, 32)}


@pytest.mark.parametrize(
    "shape", [(3, 16, 16), (2, 16, 16, 3), (2, 4, 16, 16), (2, 2, 16, 16), (2, 3, 16, 8), (2, 768)], ids=str
)
def test_another_shape_is_refused(shape):
    with pytest.raises(
        ValueError, match=re.escape(f"x has shape {list(shape)}; wanted images [B, 3, 16, 16], or grey")
    ):
        Images((16, 16)).raw(torch.zeros(shape))


def test_values_that_are_no_pixels_are_refused(raw):
    x = normalised(raw, MEAN, STD)
    with pytest.raises(ValueError, match=r"cannot be turned back into pixels: mean and std are not given, a value is"):
        Images((16, 16)).raw(x)
    with pytest.raises(ValueError, match=r"undone by the given mean and std, a value is"):
        Images((16, 16), (0.5,) * 3, (0.5,) * 3).raw(x)
    inside = normalised(raw, (0,), (1,))
    for value, told in ((-1 / 255, "-1"), (256 / 255, "256"), (100.4 / 255, "100.4"), (float("nan"), "nan")):
        wrong = inside.clone()
        wrong[1, 2, 3, 4] = value
        with pytest.raises(ValueError, match=rf"a value is {told} of 255; wanted whole numbers in \[0, 255\]"):
            Images((16, 16)).raw(wrong)
    with pytest.raises(ValueError, match=r"x \(torch.bfloat16\) cannot be turned back"):
        Images((16, 16)).raw(inside.bfloat16())
    with pytest.raises(ValueError, match=r"x has dtype torch\.int64; wanted floats, or uint8"):
        Images((16, 16)).raw(torch.zeros(1, 3, 16, 16, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"image_size": 28}, "image_size is 28; wanted height and width in pixels"),
        ({"image_size": (28, 0)}, "a side of image_size is 0"),
        ({"mean": (0.5,)}, r"mean is \(0.5,\) and std None; wanted both or neither"),
    ],
)
def test_unusable_arguments_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        Images(**given)


@pytest.mark.parametrize(("library", "name"), [("avalanche", "Avalanche"), ("capymoa", "CapyMOA")])
def test_an_absent_library_is_named_with_what_installs_it(monkeypatch, library, name):
    for loaded in [module for module in sys.modules if module.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"mose_fast.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {name} \(.+\); first: pip install 'mose-fast\[{library}\]'"):
        importlib.import_module(f"mose_fast.integrations.{library}")
