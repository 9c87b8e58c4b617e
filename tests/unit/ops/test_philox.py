"""The reference's random words against published values and Python's own integers."""

from __future__ import annotations

import random
import re

import pytest
import torch

from mose_fast.reference.philox import Purpose, philox, philox4x32_10, uniform_below, uniform_below32, unit
from tests.paths import ROOT

HEADER = ROOT / "csrc" / "core" / "philox.h"


def scalars(words: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in words.split())


# Random123's published known answers for philox4x32-10 (Salmon et al. 2011).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, answer):
    assert philox4x32_10(scalars(counter), scalars(key)) == scalars(answer)


def test_layout_of_key_and_counter():
    seed, sequence, item, lane = 0x299F31D0A4093822, 0x05A308D3243F6A88, 0x13198A2E, 0x037073
    words = philox(torch.tensor(seed), torch.tensor(sequence), torch.tensor(item), Purpose.DRAW, lane)
    assert words == philox4x32_10(scalars("243f6a88 05a308d3 13198a2e 03707302"), scalars("a4093822 299f31d0"))


def test_purposes_are_those_of_the_header():
    numbers = {
        name.upper(): int(number)
        for name, number in re.findall(r"^  k([A-Z]\w+) = (\d+),", HEADER.read_text(), re.MULTILINE)
    }
    assert numbers == {purpose.name: purpose.value for purpose in Purpose}


def test_uniform_below_is_the_high_half_of_the_product():
    draw = random.Random(0)
    words = [(draw.getrandbits(32), draw.getrandbits(32)) for _ in range(2000)] + [
        (0, 0),
        (2**32 - 1, 2**32 - 1),
        (0, 2**32 - 1),
    ]
    bounds = [draw.getrandbits(draw.randrange(1, 64)) + 1 for _ in range(2000)] + [2**63 - 1, 2**63 - 1, 1]
    bounds = [min(n, 2**63 - 1) for n in bounds]
    high, low = torch.tensor(words).T
    ours = uniform_below(high, low, torch.tensor(bounds)).tolist()
    assert ours == [((h << 32 | low) * n) >> 64 for (h, low), n in zip(words, bounds, strict=True)]


def test_uniform_below32_and_unit():
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    assert uniform_below32(words, torch.tensor(65)).tolist() == [0, 0, 32, 64]
    assert unit(words).tolist() == [0.0, 2.0**-32, 0.5, 1 - 2.0**-32]
