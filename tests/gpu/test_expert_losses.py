"""The expert losses on a GPU: against the CPU and fp64, in graphs, on streams, with wrong
labels.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.expert_losses import contrastive_loss, expert_losses, masked_cross_entropy
from mose_fast.reference import expert_losses as reference

DEVICE = _loader.gpu()

DTYPES = (torch.float32, torch.bfloat16)


def make(rows=384, classes=100, size=128, features=512, dtype=torch.float32, experts=4):
    generator = torch.Generator().manual_seed(rows)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()

    inputs = [
        tensor(experts, rows, size),
        tensor(experts, rows, classes),
        tensor(experts, rows, features),
        tensor(rows, features),
    ]
    labels = torch.randint(0, 10, (rows,), generator=generator).to(DEVICE)
    mask = torch.zeros(classes, dtype=torch.bool, device=DEVICE)
    mask[:10] = True
    return inputs, labels, mask


def run(function, inputs, labels, new, mask, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    terms = function(*leaves, labels, new, mask, **options)
    grads = torch.autograd.grad(terms.sum(), leaves, allow_unused=True)
    return [terms.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def low_precision_composite(projections, logits, features, student, labels, new, mask, **options):
    """The reference's operations in the inputs' own type, as plain PyTorch without casts would run
    them.
    """
    kept = reference._at_least_float32
    reference._at_least_float32 = lambda x: x
    try:
        return reference.expert_losses(projections, logits, features, student, labels, new, mask, **options).float()
    finally:
        reference._at_least_float32 = kept


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(1, 5), (40, 100), (383, 100), (384, 200), (1024, 100)])
@pytest.mark.parametrize("distillation", ["rsd", "sd"])
def test_error_is_at_most_twice_that_of_pytorch(gpu, dtype, rows, classes, distillation):
    rows = gpu.few(rows, 96)
    inputs, labels, mask = make(rows, classes, dtype=dtype)
    labels = labels % classes
    new = rows // 3
    exact = run(reference.expert_losses, [x.double() for x in inputs], labels, new, mask, distillation=distillation)
    ours = run(expert_losses, inputs, labels, new, mask, distillation=distillation)
    theirs = run(low_precision_composite, inputs, labels, new, mask, distillation=distillation)
    for wanted, value, other in zip(exact, ours, theirs, strict=True):
        error, bound = (value.double() - wanted).abs().max(), (other.double() - wanted).abs().max()
        assert error <= 2 * bound + 1e-6 * wanted.abs().max() + 1e-7, f"error {error:.3g}, PyTorch's {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_to_the_cpu(gpu, dtype):
    rows = gpu.few(384, 96)
    inputs, labels, mask = make(rows, dtype=dtype)
    new, valid = rows // 3, rows * 25 // 32
    on_gpu = run(expert_losses, inputs, labels, new, mask, valid_rows=valid)
    with gpu.spared():
        on_cpu = run(expert_losses, [x.detach().cpu() for x in inputs], labels.cpu(), new, mask.cpu(), valid_rows=valid)
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        tolerance = 2e-5 if cpu.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=tolerance, atol=tolerance * cpu.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 20, 128, 200, 513])
def test_any_size_of_projections(size):
    inputs, labels, mask = make(rows=70, size=size)
    exact = run(reference.expert_losses, [x.double() for x in inputs], labels, 20, mask)
    for wanted, value in zip(exact, run(expert_losses, inputs, labels, 20, mask), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("profiler")
def test_launches_and_memory():
    inputs, labels, mask = make(dtype=torch.bfloat16)
    run(expert_losses, inputs, labels, 128, mask)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        expert_losses(*leaves, labels, 128, mask).sum().backward()
        torch.cuda.synchronize()
    ours = [event.name for event in profile.events() if "expert_" in event.name and "kernel" in event.name]
    assert len(ours) == 3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    terms = expert_losses(*leaves, labels, 128, mask)
    assert terms.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before <= 2**20


@pytest.mark.slow
def test_a_wrong_label_makes_its_term_nan():
    inputs, labels, mask = make()
    for row, label in ((200, 100), (5, 50), (200, -1)):  # no class; a new row's outside the mask; no class
        wrong = labels.clone()
        wrong[row] = label
        terms = expert_losses(*inputs, wrong, 128, mask)
        assert terms[:, 1].isnan().all() and terms[:, 2].isfinite().all()
    assert masked_cross_entropy(inputs[1][0], labels + 95).isnan()


def test_contrastive_loss_alone():
    inputs, labels, _ = make(rows=300)
    z = inputs[0][0].detach().requires_grad_()
    loss = contrastive_loss(z, labels, 0.07)
    (grad,) = torch.autograd.grad(loss, z)
    exact = z.detach().double().requires_grad_()
    wanted = reference.contrastive_loss(exact, labels, 0.07)
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-4, atol=1e-6)
