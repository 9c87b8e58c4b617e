"""The reference against values computed by the authors' released code (tests/golden/README.md).

These tests may not skip.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mose_fast.nn import ClassMeans, ExpertNetwork, with_mean
from mose_fast.reference import augment
from mose_fast.reference.expert_losses import contrastive_loss, expert_losses, masked_cross_entropy, self_distillation
from tests.paths import GOLDEN


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN) as data:
        return {name: torch.from_numpy(data[name]) for name in data.files}


def group(golden: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in golden.items() if name.startswith(prefix)}


def network(golden: dict[str, Tensor]) -> ExpertNetwork:
    model = ExpertNetwork(10, width=8)
    missing, unexpected = model.load_state_dict(group(golden, "weights/"), strict=False)
    assert unexpected == [] and all(name.endswith("num_batches_tracked") for name in missing)
    return model


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """The largest deviation is at most ``relative`` of the largest expected entry."""
    deviation = (actual.detach().double() - expected.double()).abs().max()
    assert deviation <= relative * expected.double().abs().max(), f"deviation {deviation:.3g}"


def step_losses(model: ExpertNetwork, golden: dict[str, Tensor], *, joint: bool = False) -> Tensor:
    current = torch.zeros(10, dtype=torch.bool).index_fill(0, golden["current_classes"], True)
    outputs = model(golden["x"])
    return expert_losses(
        outputs.projections,
        outputs.logits,
        outputs.features,
        outputs.student,
        golden["labels"],
        int(golden["new_rows"]),
        None if joint else current,
    )


def test_evaluation_features(golden):
    features = network(golden).eval().features(golden["x"])
    for e in range(4):
        assert_close(features[e], golden[f"eval/feature{e + 1}"], 1e-4)


def test_training_forward_and_running_statistics(golden):
    model = network(golden).train()
    outputs = model(golden["x"])
    for e in range(4):
        assert_close(outputs.features[e], golden[f"train/feature{e + 1}"], 1e-4)
        assert_close(outputs.projections[e], golden[f"train/projection{e + 1}"], 1e-4)
        assert_close(outputs.logits[e], golden[f"train/logits{e + 1}"], 1e-4)
    assert_close(outputs.student, golden["train/student"], 1e-4)
    state = model.state_dict()
    statistics = group(golden, "after_one_forward/")
    assert len(statistics) == sum(name.endswith(("running_mean", "running_var")) for name in state)
    for name, value in statistics.items():
        assert_close(state[name], value, 1e-4)


def test_loss_terms(golden):
    outputs = network(golden).train()(golden["x"])
    labels, new = golden["labels"], int(golden["new_rows"])
    current = torch.zeros(10, dtype=torch.bool).index_fill(0, golden["current_classes"], True)
    for e in range(4):
        logits = outputs.logits[e]
        terms = torch.stack(
            [
                contrastive_loss(outputs.projections[e], labels, 0.07),
                masked_cross_entropy(logits[new:], labels[new:]),
                masked_cross_entropy(logits[:new], labels[:new], current),
                self_distillation(outputs.student, outputs.features[e].detach(), "frobenius")
                if e < 3
                else torch.zeros(()),
            ]
        )
        torch.testing.assert_close(terms.double(), golden[f"loss/expert{e + 1}"], rtol=1e-4, atol=1e-6)


def test_total_loss_and_every_gradient(golden):
    model = network(golden).train()
    losses = step_losses(model, golden)
    torch.testing.assert_close(losses.sum().double(), golden["loss/total"], rtol=1e-4, atol=0)
    losses.sum().backward()
    gradients = group(golden, "grad/")
    parameters = dict(model.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, value in gradients.items():
        assert_close(parameters[name].grad, value, 1e-3)


def test_three_adam_steps_and_task_0(golden):
    model = network(golden).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for expected in golden["adam/losses"]:
        loss = step_losses(model, golden).sum()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    parameters = dict(model.named_parameters())
    for name, value in group(golden, "adam/after3/").items():
        torch.testing.assert_close(parameters[name].detach(), value, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        step_losses(model, golden, joint=True).sum().double(), golden["task0/total"], rtol=1e-4, atol=0
    )


def test_contrastive_loss_alone(golden):
    z = golden["supcon/z"].clone().requires_grad_()
    loss = contrastive_loss(z, golden["supcon/labels"], 0.07)
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), golden["supcon/loss"], rtol=1e-4, atol=0)
    assert_close(z.grad, golden["supcon/grad"], 1e-3)


def test_views(golden):
    for prefix in ("views/", "views64/"):
        x, (w, h, bx, by) = golden[prefix + "x"], golden[prefix + "crop_w_h_bx_by"].T
        cropped = augment.crop(x, torch.stack([w, h], 1), torch.stack([bx, by], 1))
        torch.testing.assert_close(cropped, golden[prefix + "crop"], rtol=0, atol=1e-5)
    x = golden["views/x"]
    torch.testing.assert_close(augment.orient(x, augment.MIRROR), golden["views/mirror"], rtol=0, atol=0)
    torch.testing.assert_close(augment.grayscale(x), golden["views/gray"], rtol=0, atol=1e-5)


def test_views_through_apply_views(golden):
    """The whole path in pixels: crop codes are integers, normalisation is the identity here."""
    x, windows = golden["views/x"], golden["views/crop_w_h_bx_by"]
    pixels = (windows * 32).round().to(torch.int32)
    assert torch.equal(pixels / 32, windows)
    codes = torch.cat([torch.zeros(len(x), 1, dtype=torch.int32), pixels, torch.zeros(len(x), 1, dtype=torch.int32)], 1)
    factors = torch.tensor([0.0, 1, 1, 1]).repeat(len(x), 1)
    views = augment.apply_views(x, codes, factors, torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(views, golden["views/crop"], rtol=0, atol=1e-5)


def test_colour_jitter(golden):
    x = golden["jitter/x"]
    factors = torch.stack(
        [golden[f"jitter/{name}"].reshape(-1) for name in ("hue", "saturation", "value", "contrast")], 1
    )
    for first, name in ((True, "contrast_then_hsv"), (False, "hsv_then_contrast")):
        views = augment.jitter(x, factors, torch.full((len(x),), first))
        torch.testing.assert_close(views, golden[f"jitter/{name}"], rtol=0, atol=1e-5)
    factors[:, 3] = 1
    hue_only = augment.jitter(x, factors, torch.zeros(len(x), dtype=torch.bool))
    torch.testing.assert_close(hue_only, golden["jitter/hsv_only"], rtol=0, atol=1e-5)


def test_class_means_and_predictions(golden):
    model = network(golden).eval()
    with torch.no_grad():
        means = ClassMeans(model.features(golden["ncm/memory_x"]), golden["ncm/memory_labels"], 10)
        predictions = with_mean(means.scores(model.features(golden["ncm/test_x"]))).argmax(-1)
    seen = golden["ncm/seen_classes_in_order"].sort().values
    assert torch.equal(means.known.nonzero()[:, 0], seen)
    for e, name in enumerate(["expert1", "expert2", "expert3", "expert4", "mean_of_experts"]):
        if e < 4:
            assert_close(means.means[e, seen], golden[f"ncm/class_means_{name}"], 1e-4)
        assert torch.equal(predictions[e], golden[f"ncm/predictions_{name}"])
        accuracy = (predictions[e] == golden["ncm/test_labels"]).double().mean() * 100
        torch.testing.assert_close(accuracy, golden[f"ncm/accuracy_{name}"].double(), rtol=1e-6, atol=0)
