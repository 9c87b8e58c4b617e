"""The linear classifier whose logits are corrected class by class."""

from __future__ import annotations

import torch
from torch import nn

from mose_fast.nn.corrected import CorrectedLinear


def heads() -> tuple[nn.Linear, CorrectedLinear, torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(5, 3)
    return linear, CorrectedLinear(linear), torch.randn(4, 5)


def test_without_a_correction_it_is_the_linear_classifier():
    """Appendix G.7."""
    linear, head, x = heads()
    for mode in (True, False):
        assert torch.equal(head.train(mode)(x), linear(x))
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias"]


def test_the_correction_holds_in_evaluation_mode_alone():
    linear, head, x = heads()
    scale, shift = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.0, 3.0, -1.0])
    head.scale.copy_(scale), head.shift.copy_(shift)
    assert torch.equal(head.train()(x), linear(x))
    assert torch.equal(head.eval()(x), linear(x) * scale + shift)
    merged = head.merged()
    assert type(merged) is nn.Linear and torch.allclose(merged(x), head(x), atol=1e-6)
    assert torch.allclose(merged.train()(x), head(x), atol=1e-6)
    addresses = head.scale.data_ptr(), head.shift.data_ptr()
    head.forget()
    assert torch.equal(head(x), linear(x)) and addresses == (head.scale.data_ptr(), head.shift.data_ptr())
