"""The cosine classifier: only directions count."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.nn import CosineClassifier
from mose_fast.optim import FlatAdam


def test_values_by_hand():
    head = CosineClassifier(torch.tensor([[2.0, 0.0], [0.0, 0.5], [-3.0, 3.0]]))
    logits = head(torch.tensor([[3.0, 4.0]]))
    expected = torch.tensor([[6.0, 8.0, 10 * (4 - 3) / (5 * math.sqrt(2))]])
    torch.testing.assert_close(logits, expected, rtol=3e-5, atol=0)


def test_lengths_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    weight, features = torch.randn(5, 16, generator=generator), torch.randn(7, 16, generator=generator)
    lengths = torch.tensor([1.0, 50.0, 3.0, 7.0, 20.0])
    logits = CosineClassifier(weight)(features)
    torch.testing.assert_close(CosineClassifier(lengths[:, None] * weight)(31 * features), logits, rtol=1e-4, atol=1e-4)
    assert logits.abs().max() <= 10


def test_a_feature_of_zero_has_finite_logits_and_gradients():
    head = CosineClassifier(torch.ones(3, 4))
    features = torch.zeros(2, 4, requires_grad=True)
    logits = head(features)
    logits.sum().backward()
    assert logits.tolist() == [[0.0] * 3] * 2
    assert features.grad.isfinite().all() and head.weight.grad.isfinite().all()


def test_it_computes_in_float32_under_autocast():
    generator = torch.Generator().manual_seed(1)
    head, features = CosineClassifier(torch.randn(4, 32, generator=generator)), torch.randn(3, 32, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
    assert logits.dtype == torch.float32 and torch.equal(logits, head(features))


def test_a_learned_scale_starts_where_it_is_told_and_has_a_gradient():
    weight, features = torch.tensor([[2.0, 0.0], [0.0, 0.5]]), torch.tensor([[3.0, 4.0]])
    head = CosineClassifier(weight, 2.0, learned_scale=True)
    logits = head(features)
    torch.testing.assert_close(logits, torch.tensor([[1.2, 1.6]]), rtol=3e-5, atol=0)
    (logits[0, 0] + 10 * logits[0, 1]).backward()
    assert abs(float(head.scale.grad) - 8.6) < 1e-3
    assert list(head.state_dict()) == ["weight", "scale"] and list(CosineClassifier(weight).state_dict()) == ["weight"]


@pytest.mark.parametrize("kind", [torch.optim.Adam, FlatAdam])
def test_both_optimisers_move_a_learned_scale(kind):
    head = CosineClassifier(torch.eye(2), 1.0, learned_scale=True)
    optimiser = kind(head.parameters(), lr=0.25)
    loss = -head(torch.tensor([[1.0, 0.0]]))[0, 0]
    loss.backward()
    optimiser.step()
    assert abs(head.scale.item() - 1.25) < 1e-5
