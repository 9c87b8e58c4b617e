"""The losses of one step, all experts at once, and each loss alone, for use without MOSE.

Native code serves float32 and bfloat16, each input in its own dtype, and float64 on the
CPU. Everything is computed in float32 (float64 if any input is), whatever autocast says; each
gradient has its input's dtype. Sums have a fixed order, so that two runs agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.checks import FLOATS, check_choice, check_integer, check_rows, check_tensor, require
from mose_fast.reference import expert_losses as reference

_DISTILLATIONS = ("off", "rsd", "sd")
_REDUCTIONS = ("frobenius", "mean_of_norms")
_WHICH = ("off", "last", "all")


def _check_labels(labels: Tensor, rows: int, owner: str, like: Tensor) -> None:
    check_tensor(
        "labels", labels, (torch.int64,), (rows,), beside=(owner, like), because=f", one for each row of {owner}"
    )


def _check_mask(name: str, mask: Tensor | None, logits: Tensor) -> None:
    if mask is not None:
        because = ", one for each class of logits"
        check_tensor(name, mask, (torch.bool,), logits.shape[-1:], beside=("logits", logits), because=because)


def _check_classes(labels: Tensor, new_rows: int, mask: Tensor | None, classes: int) -> None:
    """Checks labels for the reference on the CPU, as csrc/cpu does for native code."""
    if mask is not None and not mask.any():
        raise ValueError("current_classes names no class; wanted at least one")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"labels[{row}] is {int(labels[row])}; wanted 0 to {classes - 1}")
    if mask is not None:
        outside = ~mask[labels[:new_rows]]
        if outside.any():
            row = int(outside.nonzero()[0])
            raise ValueError(f"labels[{row}] is {int(labels[row])}, a new row's; wanted one of current_classes")


def _serves(*tensors: Tensor) -> bool:
    return _loader.serves("expert_losses", *tensors) and (
        not _loader.on_gpu("expert_losses", *tensors) or all(t.dtype != torch.float64 for t in tensors)
    )


def expert_losses(
    projections: Tensor,
    logits: Tensor,
    features: Tensor,
    student: Tensor,
    labels: Tensor,
    new_rows: int | Tensor,
    current_classes: Tensor | None,
    *,
    valid_rows: int | Tensor | None = None,
    temperature: float = 0.07,
    buffer_weight: float = 2.0,
    cross_entropy: str = "all",
    contrastive: str = "all",
    distillation: str = "rsd",
    rsd_reduction: str = "frobenius",
    student_index: int | None = None,
) -> Tensor:
    """Computes all losses of one step, a row per expert; training minimises their sum.

    The same in PyTorch, for expert e, with the three single losses below::

        contrastive_loss(projections[e], labels, temperature)
        masked_cross_entropy(logits[e, :new_rows], labels[:new_rows], current_classes)
            + buffer_weight * masked_cross_entropy(logits[e, new_rows:], labels[new_rows:])
        self_distillation(student, features[e].detach(), rsd_reduction)  # sd: features[e], student

    On the CPU a wrong label is an error. On CUDA nothing can be raised without waiting for the
    GPU: a label that is no class, or a new row's label outside ``current_classes``, makes its
    experts' cross-entropy NaN, which is seen by whoever next reads the terms.

    Args:
        projections: [E, N, P], not normalised.
        logits: [E, N, K].
        features: [E, N, D], the aligned features a_i: teachers without gradient under ``rsd``,
            students under ``sd``.
        student: [N, D]: for ``rsd`` u(a_s); for ``sd`` the same map u of the detached a_s, which
            then is the teacher.
        labels: int64 [N]; below K where there is a cross-entropy.
        new_rows: The number of new rows, which come first; the others are the buffer rows. An int,
            or an int32 scalar tensor on the device of ``projections``, read there at each call (and
            replay).
        current_classes: bool [K], the current task's classes, over which the new rows' softmax
            runs. None: one cross-entropy over all rows and all classes with weight 1.
        valid_rows: The number of valid rows; the rows after them are padding: zero gradient, not
            counted, whatever they and their labels hold. An int or an int32 scalar, as
            ``new_rows``; on CUDA a scalar's value is cut to [0, N]. None: every row is valid.
        temperature: The contrastive loss's temperature, above 0.
        buffer_weight: The weight of the buffer rows' cross-entropy.
        cross_entropy: The experts with a cross-entropy: ``off``, ``last`` or ``all``.
        contrastive: The experts with a contrastive loss: ``off``, ``last`` or ``all``.
        distillation: ``rsd``, ``sd`` or ``off``.
        rsd_reduction: ``frobenius``: one norm over all rows (released code); ``mean_of_norms``:
            the mean of the rows' norms (paper).
        student_index: The student's position s, from 0; None: the last. Its own distillation term
            is 0.

    Returns:
        [E, 3] (contrastive, weighted cross-entropy, distillation), float32 (float64 if any input
        is); terms that are switched off are 0. It can be differentiated once. Anchors without a
        positive, rows of norm 0 and rows at distance 0 get zero gradient from the term concerned.

    Raises:
        TypeError: A dtype or layout is not one of the above.
        ValueError: A shape, device, number or (on the CPU) label does not fit.
        RuntimeError: The result is differentiated twice.

    Source: the paper's L_MOSE; docs/specification/mose.md section 5;
    mose_fast/reference/expert_losses.py.
    """
    sizes, because = ("experts", "rows", "size"), " with at least one expert"
    check_tensor("projections", projections, FLOATS, sizes, filled=(0,), because=because)
    experts, rows, _ = projections.shape
    beside = ("projections", projections)
    because = f", as projections {tuple(projections.shape)}"
    check_tensor("logits", logits, FLOATS, (experts, rows, "classes"), beside=beside, because=because)
    check_tensor("features", features, FLOATS, (experts, rows, "size"), beside=beside, because=because)
    because = f", as features {tuple(features.shape)}"
    check_tensor("student", student, FLOATS, features.shape[1:], beside=beside, because=because)
    _check_labels(labels, rows, *beside)
    _check_mask("current_classes", current_classes, logits)
    if valid_rows is not None:
        check_rows("valid_rows", valid_rows, rows, beside)
    check_rows("new_rows", new_rows, valid_rows if isinstance(valid_rows, int) else rows, beside)
    require(temperature > 0, "temperature", temperature, "a number above 0")
    check_choice("cross_entropy", cross_entropy, _WHICH)
    check_choice("contrastive", contrastive, _WHICH)
    check_choice("distillation", distillation, _DISTILLATIONS)
    check_choice("rsd_reduction", rsd_reduction, _REDUCTIONS)
    student_index = experts - 1 if student_index is None else student_index
    check_integer("student_index", student_index, 0, experts - 1)
    inputs = (projections, logits, features, student)
    options = {"valid_rows": valid_rows, "temperature": temperature, "buffer_weight": buffer_weight}
    options |= {"distillation": distillation, "student_index": student_index}
    if not _serves(*inputs):
        if projections.device.type == "cpu" and not torch.compiler.is_compiling():
            # Scalars can be read here; csrc/cpu checks all of this itself.
            valid = rows if valid_rows is None else int(valid_rows)
            check_integer("valid_rows", valid, 0, rows)
            check_integer("new_rows", int(new_rows), 0, valid)
            if cross_entropy != "off":
                _check_classes(labels[:valid], int(new_rows), current_classes, logits.shape[2])
        switches = {"cross_entropy": cross_entropy, "contrastive": contrastive, "rsd_reduction": rsd_reduction}
        with torch.autocast(projections.device.type, enabled=False):
            return reference.expert_losses(*inputs, labels, new_rows, current_classes, **options, **switches)
    first = {"all": 0, "last": experts - 1, "off": experts}
    options |= {"first_contrastive": first[contrastive], "first_cross_entropy": first[cross_entropy]}
    return _native(*inputs, labels, current_classes, new_rows=new_rows, **options, reduction=rsd_reduction)


def contrastive_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Computes the supervised contrastive loss over one batch of views.

    The mean over the anchors that have a positive, 0 if none has. An anchor's loss is the mean over
    its positives p, the other rows of its label, of -log of p's share in the softmax over the
    cosine similarities / temperature to all other rows. The same in PyTorch::

        z = F.normalize(features, dim=1)
        s = (z @ z.T / temperature).fill_diagonal_(-inf)
        positive = (labels == labels[:, None]).fill_diagonal_(False)
        loss = torch.where(positive, s.logsumexp(1, keepdim=True) - s, 0).sum(1) / positive.sum(1)
        loss[positive.any(1)].mean()

    Args:
        features: [N, P], not normalised.
        labels: int64 [N], any numbers.
        temperature: Above 0.

    Returns:
        A scalar, float32 (float64 for float64 features); native code can be differentiated once.

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device or ``temperature`` does not fit.

    Source: Khosla et al. 2020, L_out; the paper's L_scl.
    """
    check_tensor("features", features, FLOATS, ("rows", "size"))
    _check_labels(labels, len(features), "features", features)
    require(temperature > 0, "temperature", temperature, "a number above 0")
    if not _serves(features):
        with torch.autocast(features.device.type, enabled=False):
            return reference.contrastive_loss(features, labels, temperature)
    nothing = features.detach()[None, :, :0]
    inputs = (features[None], nothing, nothing, nothing[0])
    return _native(*inputs, labels, None, temperature=temperature, first_contrastive=0)[0, 0]


def masked_cross_entropy(logits: Tensor, labels: Tensor, classes: Tensor | None = None) -> Tensor:
    """Computes the mean cross-entropy with the softmax over the classes of a mask:
    ``F.cross_entropy(logits.masked_fill(~classes, -inf), labels)``.

    Args:
        logits: [N, K].
        labels: int64 [N], inside the mask. Another label is an error on the CPU, on CUDA it makes
            the loss NaN.
        classes: bool [K] on the logits' device; None: all classes.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 with zero gradient for N = 0; native code
        can be differentiated once.

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device or (on the CPU) a label does not fit.

    Source: the paper's L_ce,new.
    """
    check_tensor("logits", logits, FLOATS, ("rows", "classes"))
    rows = len(logits)
    _check_labels(labels, rows, "logits", logits)
    _check_mask("classes", classes, logits)
    if not _serves(logits):
        if logits.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_classes(labels, rows, classes, logits.shape[1])
        with torch.autocast(logits.device.type, enabled=False):
            return reference.masked_cross_entropy(logits, labels, classes)
    nothing = logits.detach()[None, :, :0]
    inputs = (nothing, logits[None], nothing, nothing[0])
    return _native(*inputs, labels, classes, new_rows=rows, first_cross_entropy=0)[0, 1]


def self_distillation(student: Tensor, teacher: Tensor, reduction: str) -> Tensor:
    """Computes the distance between two sets of features on the unit sphere, with
    d = F.normalize(student) - F.normalize(teacher).

    Args:
        student: [N, D].
        teacher: [N, D]. Neither side is detached here.
        reduction: ``frobenius``: ``d.norm()`` (released code); ``mean_of_norms``:
            ``d.norm(dim=1).mean()`` (paper).

    Returns:
        A scalar, float32 (float64 if an input is); at distance 0 its gradient is 0; native code can
        be differentiated once.

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device or ``reduction`` does not fit.

    Source: the paper's L_RSD; docs/specification/mose.md section 9.3.
    """
    check_tensor("student", student, FLOATS, ("rows", "size"))
    check_tensor("teacher", teacher, FLOATS, student.shape, beside=("student", student), because=", as student")
    check_choice("reduction", reduction, _REDUCTIONS)
    if not _serves(student, teacher):
        with torch.autocast(student.device.type, enabled=False):
            return reference.self_distillation(student, teacher, reduction)
    nothing = student.detach()[None, :, :0]
    labels = torch.empty(len(student), dtype=torch.int64, device=student.device)  # read by the other two terms only
    # The one expert is not the student, and sd sends gradient to both sides.
    options = {"distillation": "sd", "reduction": reduction, "student_index": 1}
    return _native(nothing, nothing, teacher[None], student, labels, None, **options)[0, 2]


def _native(
    *tensors: Tensor | None,
    new_rows: int | Tensor = 0,
    valid_rows: int | Tensor | None = None,
    temperature: float = 1.0,
    buffer_weight: float = 1.0,
    first_contrastive: int = 1,
    first_cross_entropy: int = 1,
    distillation: str = "off",
    reduction: str = "frobenius",
    student_index: int = 0,
) -> Tensor:
    """Calls the library with ``tensors`` = projections, logits, features, student, labels,
    current_classes and the other arguments of the schema.
    """
    arguments = (
        *tensors,
        0 if isinstance(new_rows, Tensor) else new_rows,
        -1 if valid_rows is None or isinstance(valid_rows, Tensor) else valid_rows,
        new_rows if isinstance(new_rows, Tensor) else None,
        valid_rows if isinstance(valid_rows, Tensor) else None,
        float(temperature),
        float(buffer_weight),
        first_contrastive,
        first_cross_entropy,
        _DISTILLATIONS.index(distillation),
        _REDUCTIONS.index(reduction),
        student_index,
    )
    if torch.compiler.is_compiling():
        return torch.ops.mose_fast.expert_losses(*arguments)[0]  # the compiler needs an op that it can see into
    return _ExpertLosses.apply(*arguments)


# Positions in the schema, and their number.
_TENSORS = (0, 1, 2, 3, 4, 5, 8, 9)
_FIRST_CONTRASTIVE, _FIRST_CROSS_ENTROPY, _DISTILLATION = 12, 13, 14
_INPUTS = 17


def _save(ctx: Any, inputs: tuple, statistics: Tensor, similarity: Tensor) -> None:
    ctx.save_for_backward(statistics, similarity, *(inputs[i] for i in _TENSORS))
    ctx.arguments = [None if i in _TENSORS else value for i, value in enumerate(inputs)]
    experts = inputs[0].shape[0]
    distillation = _DISTILLATIONS[inputs[_DISTILLATION]]
    ctx.has_gradient = [
        inputs[_FIRST_CONTRASTIVE] < experts,
        inputs[_FIRST_CROSS_ENTROPY] < experts,
        distillation == "sd",
        distillation != "off",
    ]


def _backward(ctx: Any, grad: Tensor, native: Any) -> tuple:
    statistics, similarity, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for position, tensor in zip(_TENSORS, tensors, strict=True):
        arguments[position] = tensor
    wanted = [bool(needed and has) for needed, has in zip(ctx.needs_input_grad[:4], ctx.has_gradient, strict=True)]
    grads = native(grad, statistics, similarity, wanted, *arguments) if any(wanted) else [None] * 4
    return *(g if w else None for g, w in zip(grads, wanted, strict=True)), *[None] * (_INPUTS - 4)


class _ExpertLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        terms, statistics, similarity = _loader.native.expert_losses(*inputs)
        _save(ctx, inputs, statistics, similarity)
        return terms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _backward(ctx, grad, _ExpertLossesBackward.apply)


class _ExpertLossesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _loader.native.expert_losses_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return _refuse(ctx, *grads)


def _refuse(ctx: Any, *grads: Any) -> tuple:
    raise RuntimeError("expert_losses cannot be differentiated twice; wanted one backward pass, without create_graph")


def _set_up(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _save(ctx, inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_of_op(ctx: Any, grad: Tensor, *_: Any) -> tuple:
    return _backward(ctx, grad, torch.ops.mose_fast.expert_losses_backward)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::expert_losses")
    def _fake(projections, logits, features, student, labels, *others):
        experts, rows, _ = projections.shape
        is_double = any(t.dtype == torch.float64 for t in (projections, logits, features, student))
        options = {"dtype": torch.float64 if is_double else torch.float32, "device": labels.device}
        on_gpu = _loader.on_gpu("expert_losses", labels)
        side = (0, 0, 0) if on_gpu or others[_FIRST_CONTRASTIVE - 5] >= experts else (experts, rows, rows)
        return (
            torch.empty(experts, 3, **options),
            torch.empty((11 * experts + 1) * rows + 2 * experts, **options),  # ExpertStatistics::size() of csrc/core
            torch.empty(side, **options),
        )

    @torch.library.register_fake("mose_fast::expert_losses_backward")
    def _fake_backward(grad, statistics, similarity, wanted, *arguments):
        return tuple(x.new_empty(x.shape if w else 0) for x, w in zip(arguments[:4], wanted, strict=True))

    torch.library.register_autograd("mose_fast::expert_losses", _backward_of_op, setup_context=_set_up)
    torch.library.register_autograd("mose_fast::expert_losses_backward", _refuse)
