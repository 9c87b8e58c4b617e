"""The native expert losses on the CPU against the reference; tests/gpu/test_expert_losses.py goes
on with a GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops.expert_losses import contrastive_loss, expert_losses, masked_cross_entropy, self_distillation
from mose_fast.reference import expert_losses as reference

needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Of values in the input's own precision; both sides compute in float32 (float64), so only the
# gradients' rounding differs.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 2**-7}


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "fallback"])
def path(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return request.param


def make(experts=3, rows=22, size=6, classes=11, features=9, dtype=torch.float32, labels=4):
    generator = torch.Generator().manual_seed(rows + size)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    inputs = [
        tensor(experts, rows, size),
        tensor(experts, rows, classes),
        tensor(experts, rows, features),
        tensor(rows, features),
    ]
    targets = torch.randint(0, labels, (rows,), generator=generator)
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[:labels] = True
    return inputs, targets, mask


def gradients(loss, inputs):
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def compare(inputs, labels, new_rows, mask, **options):
    dtype = inputs[0].dtype
    weights = torch.linspace(-1, 2, len(inputs[0]) * 3).reshape(-1, 3)
    results = []
    for function in (reference.expert_losses, expert_losses):
        terms = function(*inputs, labels, new_rows, mask, **options)
        results.append((terms, *gradients((terms * weights).sum(), inputs)))
    double = dtype == torch.float64
    assert results[1][0].dtype == (torch.float64 if double else torch.float32)
    torch.testing.assert_close(
        results[1][0], results[0][0], rtol=1e-11 if double else 3e-5, atol=1e-11 if double else 1e-5
    )
    for x, wanted, grad in zip(inputs, results[0][1:], results[1][1:], strict=True):
        assert grad.dtype == x.dtype
        torch.testing.assert_close(grad, wanted, rtol=TOLERANCE[x.dtype], atol=TOLERANCE[x.dtype] / 8)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("distillation", ["rsd", "sd", "off"])
def test_equal_to_the_reference(dtype, distillation):
    for rows, reduction in itertools.product((1, 2, 7, 40), ("frobenius", "mean_of_norms")):
        inputs, labels, mask = make(rows=rows, dtype=dtype)
        compare(inputs, labels, rows // 3, mask, distillation=distillation, rsd_reduction=reduction, student_index=1)
        compare(
            inputs,
            labels,
            rows // 3,
            None,
            distillation=distillation,
            rsd_reduction=reduction,
            valid_rows=rows - rows // 4,
        )


@needs_library
@pytest.mark.parametrize("switch", ["cross_entropy", "contrastive"])
@pytest.mark.parametrize("which", ["off", "last"])
def test_switches(switch, which):
    inputs, labels, mask = make()
    compare(inputs, labels, 9, mask, **{switch: which})


@needs_library
@pytest.mark.parametrize("labels", ["distinct", "equal", "one positive"])
def test_labels(labels):
    inputs, _, mask = make(rows=9, labels=9)
    values = {
        "distinct": torch.arange(9),
        "equal": torch.full((9,), 3),
        "one positive": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7]),
    }[labels]
    compare(inputs, values, 4, mask)


@needs_library
def test_large_logits_zero_rows_and_distance_zero():
    inputs, labels, mask = make(dtype=torch.float32)
    with torch.no_grad():
        inputs[1].mul_(80 / inputs[1].abs().max())
        inputs[0][:, ::3] = 0
        inputs[2][:, 1::3] = 0
        inputs[3][::4] = 0
    compare(inputs, labels, 9, mask, distillation="sd")
    inputs[2] = inputs[3].detach().expand(3, -1, -1).clone().requires_grad_()
    terms = expert_losses(*inputs, labels, 9, mask, contrastive="off", cross_entropy="off", distillation="sd")
    assert (terms == 0).all()
    assert all((g == 0).all() for g in gradients(terms.sum(), inputs))


def test_large_logits_keep_their_digits(path):
    """A log-sum-exp in one float32 would cost a gradient three digits at 30,000."""
    for offset in (3e4, -3e4):
        inputs, labels, mask = make()
        logits = (inputs[1][0].detach() + offset).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        for classes in (None, mask):
            loss, wanted = (
                masked_cross_entropy(logits, labels, classes),
                reference.masked_cross_entropy(exact, labels, classes),
            )
            torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
            grads = torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, exact)
            torch.testing.assert_close(grads[0][0].double(), grads[1][0], rtol=1e-5, atol=1e-8)


def test_not_a_number_is_not_hidden(path):
    for position, term in ((0, 0), (1, 1), (2, 2), (3, 2)):
        inputs, labels, mask = make()
        with torch.no_grad():
            inputs[position][..., 4, 2] = torch.nan
        terms = expert_losses(*inputs, labels, 9, mask, student_index=1)
        assert terms[0].isnan().tolist() == [which == term for which in range(3)]
        assert gradients(terms.sum(), inputs)[3 if position == 2 else position].isnan().any()


@needs_library
def test_each_input_has_its_own_type():
    inputs, labels, mask = make()
    types = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    mixed = [x.detach().to(t).requires_grad_() for x, t in zip(inputs, types, strict=True)]
    compare(mixed, labels, 9, mask, distillation="sd")


@needs_library
@pytest.mark.parametrize("distillation", ["rsd", "sd"])
def test_gradcheck(distillation):
    inputs, labels, mask = make(experts=2, rows=6, size=4, classes=5, features=3, dtype=torch.float64, labels=3)
    if distillation == "rsd":
        inputs[2] = inputs[2].detach()
    assert torch.autograd.gradcheck(
        lambda *x: expert_losses(*x, labels, 2, mask, valid_rows=5, temperature=0.5, distillation=distillation),
        inputs,
        nondet_tol=0,
    )


@needs_library
def test_layouts_of_inputs_and_gradients():
    inputs, labels, mask = make()
    wanted = expert_losses(*inputs, labels, 9, mask)
    views = [
        inputs[0].detach().transpose(0, 2).contiguous().transpose(0, 2),
        torch.cat([inputs[1].detach()] * 2, 2)[..., : inputs[1].shape[2]],
        inputs[2].detach().permute(1, 0, 2).contiguous().permute(1, 0, 2),
        inputs[3].detach().repeat_interleave(2, 0)[::2],
    ]
    for view in views:
        assert not view.is_contiguous()
        view.requires_grad_()
    terms = expert_losses(*views, labels, 9, mask)
    assert torch.equal(terms, wanted)
    base = gradients(wanted.sum(), inputs)  # a gradient with strides of zero
    for total in (
        lambda t: (t * torch.ones(3, 3)).sum(),
        lambda t: t.mean() * 9,
        lambda t: torch.cat([t, t.detach()])[:3].sum(),
        lambda t: (t.T * torch.ones(3, 3)).sum(),
    ):
        grads = gradients(total(expert_losses(*views, labels, 9, mask)), views)
        for g, b in zip(grads, base, strict=True):
            torch.testing.assert_close(g, b)


@needs_library
def test_inputs_stay_and_two_runs_agree_bit_for_bit():
    inputs, labels, mask = make(rows=50)
    before = [x.detach().clone() for x in inputs]
    runs = []
    for _ in range(2):
        terms = expert_losses(*inputs, labels, 20, mask)
        runs.append([terms, *gradients(terms.sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@needs_library
def test_autocast_changes_nothing():
    inputs, labels, mask = make(rows=40)
    wanted = expert_losses(*inputs, labels, 20, mask)
    wanted_grads = gradients(wanted.sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        terms = expert_losses(*inputs, labels, 20, mask)
        grads = gradients(terms.sum(), inputs)
    assert torch.equal(terms, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))


@needs_library
@pytest.mark.parametrize("distillation", [0, 1, 2])
def test_opcheck(distillation):
    inputs, labels, mask = make(experts=2, rows=5)
    new, valid = torch.tensor(2, dtype=torch.int32), torch.tensor(4, dtype=torch.int32)
    arguments = (*inputs, labels, mask, 0, -1, new, valid, 0.07, 2.0, 0, 0, distillation, 0, 1)
    results = torch.library.opcheck(torch.ops.mose_fast.expert_losses.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@needs_library
def test_opcheck_of_backward():
    inputs, labels, mask = make(experts=2, rows=5)
    arguments = (*(x.detach() for x in inputs), labels, mask, 2, 4, None, None, 0.07, 2.0, 0, 0, 2, 0, 1)
    _, statistics, similarity = torch.ops.mose_fast.expert_losses(*arguments)
    for wanted in ([True] * 4, [True, False, False, True]):
        results = torch.library.opcheck(
            torch.ops.mose_fast.expert_losses_backward.default,
            (torch.ones(2, 3), statistics, similarity, wanted, *arguments),
        )
        assert set(results.values()) == {"SUCCESS"}


@needs_library
def test_compiles_without_a_graph_break():
    inputs, labels, mask = make()
    wanted = expert_losses(*inputs, labels, 9, mask)
    terms = torch.compile(expert_losses, fullgraph=True, backend="aot_eager")(*inputs, labels, 9, mask)
    assert torch.equal(terms, wanted)
    for grad, other in zip(gradients(terms.sum(), inputs), gradients(wanted.sum(), inputs), strict=True):
        assert torch.equal(grad, other)


@needs_library
def test_double_backward_is_refused_by_name():
    inputs, labels, mask = make()
    (grad,) = torch.autograd.grad(expert_losses(*inputs, labels, 9, mask).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="expert_losses cannot be differentiated twice"):
        grad.sum().backward()


def test_single_losses(path):
    inputs, labels, mask = make(dtype=torch.float64)
    z, logits, u, v = inputs[0][0], inputs[1][0], inputs[3], inputs[2][0]
    for loss, wanted in (
        (contrastive_loss(z, labels - 7, 0.2), reference.contrastive_loss(z, labels, 0.2)),
        (masked_cross_entropy(logits, labels), F.cross_entropy(logits, labels)),
        (masked_cross_entropy(logits, labels, mask), F.cross_entropy(logits[:, :4], labels)),
        (self_distillation(u, v, "frobenius"), torch.linalg.vector_norm(F.normalize(u, dim=1) - F.normalize(v, dim=1))),
        (
            self_distillation(u, v, "mean_of_norms"),
            torch.linalg.vector_norm(F.normalize(u, dim=1) - F.normalize(v, dim=1), dim=1).mean(),
        ),
    ):
        torch.testing.assert_close(loss, wanted)
        leaves = [inputs[0], inputs[1], u, inputs[2]]
        for grad, other in zip(gradients(loss, leaves), gradients(wanted, leaves), strict=True):
            torch.testing.assert_close(grad, other)


def test_no_rows(path):
    inputs, labels, mask = make(rows=0)
    terms = expert_losses(*inputs, labels, 0, mask)
    assert torch.equal(terms, torch.zeros(3, 3))
    assert all(g.shape == x.shape for g, x in zip(gradients(terms.sum(), inputs), inputs, strict=True))


BAD = {
    "shape of logits": (
        lambda a: a.update(logits=a["logits"][:, :-1]),
        ValueError,
        r"logits has shape \(3, 21, 11\); wanted \[3, 22, classes\], as projections",
    ),
    "shape of student": (
        lambda a: a.update(student=a["student"][:, :-1]),
        ValueError,
        r"student has shape \(22, 8\); wanted \(22, 9\), as features \(3, 22, 9\)",
    ),
    "labels": (lambda a: a["labels"].__setitem__(4, 11), ValueError, r"labels\[4\] is 11; wanted 0 to 10"),
    "negative label": (lambda a: a["labels"].__setitem__(4, -1), ValueError, r"labels\[4\] is -1; wanted 0 to 10"),
    "label outside the mask": (
        lambda a: a["labels"].__setitem__(2, 9),
        ValueError,
        r"labels\[2\] is 9, a new row's; wanted one of current_classes",
    ),
    "empty mask": (lambda a: a["current_classes"].fill_(False), ValueError, "current_classes names no class"),
    "temperature": (lambda a: a.update(temperature=0.0), ValueError, "temperature is 0.0; wanted a number above 0"),
    "new rows": (lambda a: a.update(new_rows=23), ValueError, "new_rows is 23; wanted an integer from 0 to 22"),
    "type of rows": (lambda a: a.update(new_rows=torch.tensor(2)), TypeError, "new_rows is torch.int64"),
    "student": (lambda a: a.update(student_index=3), ValueError, "student_index is 3; wanted an integer from 0 to 2"),
    "switch": (
        lambda a: a.update(cross_entropy="first"),
        ValueError,
        "cross_entropy is 'first'; wanted off, last or all",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(path, name):
    inputs, labels, mask = make()
    names = ("projections", "logits", "features", "student", "labels", "new_rows", "current_classes")
    arguments = dict(zip(names, (*inputs, labels, 5, mask), strict=True))
    spoil, error, message = BAD[name]
    spoil(arguments)
    with pytest.raises(error, match=message):
        expert_losses(**arguments)
