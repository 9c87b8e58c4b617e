"""One NaN or infinity in each input of each op: where the reference's results are not finite, the
kernels' must not be finite either.

A loss that hides what is no number lets NaN gradients reach the optimiser, whose latch
(:mod:`mose_fast.optim`) asks the loss alone. Where all results are finite (a ReLU has cut off
-inf), gradients may be, and else some elements of a gradient: PyTorch multiplies zero by infinity
there. Kernels may spread what is not finite further than the reference does. Written for a GPU,
and run on the emulated one in CI.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops import adam, align_conv, augment, batch_norm_act, batch_norm_pool, expert_losses, norm_pool
from mose_fast.ops.batch_norm_act import Norm
from mose_fast.reference import align_conv as plain_align_conv
from mose_fast.reference import augment as plain_augment
from mose_fast.reference import batch_norm as plain_norm
from mose_fast.reference import batch_norm_act as plain_batch_norm_act
from mose_fast.reference import expert_losses as plain_losses
from mose_fast.reference import norm_pool as plain_norm_pool
from mose_fast.self_check.problems import by_reference

DEVICE = _loader.gpu()

NAN, INFINITY = float("nan"), float("inf")
SPOILS = (NAN, INFINITY, -INFINITY)


def on_gpu(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.to(DEVICE).contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.to(DEVICE)


def spoiled(inputs: dict[str, Tensor | None], name: str, value: float, seed: int) -> dict[str, Tensor | None]:
    """A copy of the inputs with one element of one of them replaced."""
    copies = {key: None if x is None else x.clone() for key, x in inputs.items()}
    generator = torch.Generator().manual_seed(seed)
    flat = copies[name].view(-1)
    flat[int(torch.randint(0, flat.numel(), (1,), generator=generator))] = value
    return copies


def with_gradients(results: dict, outputs: dict, upstream: list[Tensor], leaves: dict) -> dict[str, Tensor | None]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    given = [g.to(y.device, y.dtype) for y, g in zip(outputs.values(), upstream, strict=True)]
    grads = torch.autograd.grad([*outputs.values()], [*wanted.values()], given, allow_unused=True)
    return {**outputs, **results, **{f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}}


def check(what: str, ours: dict, plain: dict, spoils_gradient: bool) -> None:
    """``spoils_gradient``: what is no number came in with the gradients of the results."""
    assert ours.keys() == plain.keys()
    results = [name for name in plain if not name.startswith("gradient")]
    has_gradients = spoils_gradient or not all(plain[name].isfinite().all() for name in results)
    for name, wanted in plain.items():
        if name not in results and not has_gradients:
            continue
        if wanted is None or ours[name] is None:
            assert all(x is None or x.isfinite().all() for x in (wanted, ours[name])), (
                f"{what}: {name} has a gradient on one side alone"
            )
            continue
        bad, own_bad = ~wanted.isfinite(), ~ours[name].cpu().isfinite()
        hidden = bad & ~own_bad if name in results else bad.any() & ~own_bad.any()
        assert not hidden.any(), f"{what}: {name} hides {int(hidden.sum())} of {int(bad.sum())}"


@pytest.fixture(autouse=True)
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def state_of(generator: torch.Generator, channels: int) -> Tensor:
    return torch.stack(
        [normal(generator, channels), normal(generator, channels).abs() + 0.5, *normal(generator, 2, channels)]
    )


def compare(inputs: dict, others: dict, run, variants=({},) * 3, upstream=("upstream",), nan_alone: str = "") -> None:
    """Spoils each input and each of ``others`` in turn, the last of which (``upstream``) come in
    with the gradients. ``run(leaves, running, native, **variant)`` gives outputs, and whether its
    running statistics are results; there is one variant for each of SPOILS.
    """
    everything = {**inputs, **others}
    for seed, name in enumerate(name for name, x in everything.items() if x is not None):
        for value, variant in zip(SPOILS, variants, strict=True):
            if name == nan_alone and value is not NAN:
                continue
            given, found = spoiled(everything, name, value, seed), []
            for put, native in ((on_gpu, True), (lambda x: x, False)):
                leaves = {n: None if given[n] is None else put(given[n]).detach().requires_grad_() for n in inputs}
                running = [put(given[n]).clone() for n in ("mean", "var") if n in given]
                outputs, moves = run(leaves, running, native, **variant)
                statistics = dict(zip(("running mean", "running var"), running, strict=False)) if moves else {}
                found.append(with_gradients(statistics, outputs, [given[n] for n in upstream], leaves))
            check(f"{value} in {name}, {variant}", *found, name in upstream)


def norm_vectors(generator: torch.Generator, channels: int) -> dict[str, Tensor]:
    return {"mean": normal(generator, channels), "var": normal(generator, channels).abs() + 0.5}


#: The fused kernel and the two kernels with a product by PyTorch between them, in all the forms of
#: what enters.
ALIGN_CONVS = [
    # dtype, channels, out_channels, stride, prologue, gate, training
    (torch.bfloat16, 16, 24, 1, True, False, True),
    (torch.bfloat16, 16, 16, 2, True, False, False),
    (torch.bfloat16, 32, 16, 2, False, True, True),
    (torch.float32, 16, 16, 1, True, False, True),
    (torch.float32, 24, 40, 2, False, True, True),
    (torch.bfloat16, 136, 264, 1, True, False, True),
    (torch.bfloat16, 24, 40, 2, False, False, True),
]


@pytest.mark.parametrize("setting", ALIGN_CONVS, ids=lambda s: "-".join(map(str, s)))
def test_align_conv(setting):
    dtype, channels, out_channels, stride, follows, gated, training = setting
    g = torch.Generator().manual_seed(channels)
    inputs = {
        "x": normal(g, 2, channels, 4, 6, dtype=dtype),
        "depthwise": normal(g, channels, 1, 3, 3) / 3,
        "pointwise": normal(g, out_channels, channels, 1, 1) / channels**0.5,
        "weight": normal(g, out_channels),
        "bias": normal(g, out_channels),
        "prologue": state_of(g, channels) if follows else None,
        "gate": normal(g, 2, channels, 2, 3, dtype=dtype) if gated else None,
    }
    upstream = {"to y": normal(g, 2, out_channels, 4 // stride, 6 // stride), "to state": normal(g, 4, out_channels)}

    def run(leaves, running, native):
        *first, weight, bias, prologue, gate = leaves.values()
        norm = Norm(weight, bias, *running, None, 0.1, 1e-5, training)
        module = align_conv if native else plain_align_conv
        y, state = module.align_conv(*first, norm, stride=stride, prologue=prologue, gate=gate)
        return {"y": y, "state": state}, True

    # A gate of infinity is open or shut; PyTorch's up-sampling makes NaN of it beside a border,
    # where it multiplies it by zero.
    compare(inputs, norm_vectors(g, out_channels) | upstream, run, upstream=tuple(upstream), nan_alone="gate")


@pytest.mark.parametrize("form", ["plain", "residual", "two norms", "prologue", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_act(form, dtype):
    g = torch.Generator().manual_seed(len(form))
    size = (3, 16, 3, 4)
    inputs = {
        "x": normal(g, *size, dtype=dtype),
        "weight": normal(g, 16),
        "bias": normal(g, 16),
        "residual": normal(g, *size, dtype=dtype) if form in ("residual", "two norms") else None,
        "second weight": normal(g, 16) if form == "two norms" else None,
        "prologue": state_of(g, 16) if form == "prologue" else None,
    }
    upstream = normal(g, *((4, 16) if form == "state" else size))

    def run(leaves, running, native, *, relu, training, valid):
        x, weight, bias, residual, second, prologue = leaves.values()
        norm = Norm(weight, bias, *running, None, 0.1, 1e-5, training)
        if form == "state":
            return {"y": (batch_norm_act if native else plain_norm).norm_state(x, norm, valid)}, True
        options = {"residual": residual, "prologue": prologue, "relu": relu, "valid_rows": valid}
        if form == "two norms":
            options["residual_norm"] = Norm(second, None, None, None)
        return {"y": (batch_norm_act if native else plain_batch_norm_act).batch_norm_act(x, norm, **options)}, True

    variants = ((True, True, None), (False, True, 2), (True, False, 2))
    variants = [dict(zip(("relu", "training", "valid"), variant, strict=True)) for variant in variants]
    compare(inputs, norm_vectors(g, 16) | {"upstream": upstream}, run, variants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("valid", [None, 2])
def test_norm_pool(dtype, valid):
    g = torch.Generator().manual_seed(1)
    inputs = {"x": normal(g, 3, 16, 3, 4, dtype=dtype), "state": state_of(g, 16)}

    def run(leaves, running, native):
        module = norm_pool if native else plain_norm_pool
        return {"pooled": module.norm_pool(*leaves.values(), valid)}, False

    compare(inputs, {"upstream": normal(g, 3, 16)}, run)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("valid", [None, 2])
def test_batch_norm_pool(valid, training):
    g = torch.Generator().manual_seed(3)
    inputs = {"x": normal(g, 3, 16, 3, 4), "weight": normal(g, 16), "bias": normal(g, 16)}
    inputs["residual"] = normal(g, 3, 16, 3, 4)

    def run(leaves, running, native):
        x, weight, bias, residual = leaves.values()
        function = batch_norm_pool.batch_norm_pool if native else by_reference
        pooled = function(x, Norm(weight, bias, *running, training=training), residual, valid)
        return {"pooled": pooled}, training  # in evaluation they are inputs, which a ReLU may cut off

    compare(inputs, norm_vectors(g, 16) | {"upstream": normal(g, 3, 16)}, run)


#: Rows without a positive among them, where the contrastive kernel once lost a NaN, in a tile of 16
#: that is filled in part.
LABELS = torch.tensor([4, 4, 3, 0, 3, 4, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distillation", ["rsd", "sd", "off"])
def test_expert_losses(dtype, distillation):
    g = torch.Generator().manual_seed(2)
    inputs = {
        "projections": normal(g, 2, 7, 8, dtype=dtype),
        "logits": normal(g, 2, 7, 5, dtype=dtype),
        "features": normal(g, 2, 7, 9, dtype=dtype),
        "student": normal(g, 7, 9, dtype=dtype),
    }
    mask = torch.tensor([False, False, False, True, True])

    def run(leaves, running, native, **options):
        put, module = (on_gpu, expert_losses) if native else (lambda x: x, plain_losses)
        options |= {"distillation": distillation}
        return {"terms": module.expert_losses(*leaves.values(), put(LABELS), 3, put(mask), **options)}, False

    for valid, reduction, temperature in ((None, "frobenius", 0.07), (6, "mean_of_norms", 1e-3)):
        options = {"valid_rows": valid, "rsd_reduction": reduction, "temperature": temperature}
        compare(inputs, {"upstream": normal(g, 2, 3)}, run, [options] * 3)


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_the_contrastive_loss_shows_it_in_every_row(value):
    g = torch.Generator().manual_seed(3)
    for row in range(len(LABELS)):
        for dtype in (torch.float32, torch.bfloat16):
            z = normal(g, 7, 8, dtype=dtype)
            z[row, 3] = value
            leaf = on_gpu(z).requires_grad_()
            loss = expert_losses.contrastive_loss(leaf, on_gpu(LABELS), 0.07)
            assert not plain_losses.contrastive_loss(z, LABELS, 0.07).isfinite()
            assert not loss.isfinite(), f"{value} in row {row} of {dtype} is hidden: {loss}"
            assert not torch.autograd.grad(loss, leaf)[0].isfinite().any()


def test_adam():
    """What is no number in a gradient, a moment or the learning rate is in the weight afterwards;
    in the loss it freezes everything.
    """
    for name in ("weights", "first moment", "second moment", "gradient", "rate", "loss"):
        for value in SPOILS:
            tensors = {
                "weights": torch.ones(70),
                "first moment": torch.zeros(70),
                "second moment": torch.ones(70),
                "gradient": torch.ones(70),
            }
            tensors |= {"rate": torch.tensor(0.1), "loss": torch.tensor(1.0)}
            tensors[name].view(-1)[13 % tensors[name].numel()] = value
            own = {key: x.to(DEVICE) for key, x in tensors.items()}
            shadow, average = own["weights"].to(torch.bfloat16), torch.ones(70, device=DEVICE)
            adam.adam_step(
                own["weights"],
                own["first moment"],
                own["second moment"],
                [own["gradient"]],
                [0],
                torch.zeros(1, device=DEVICE),
                own["rate"],
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.0,
                shadow=shadow,
                loss=own["loss"],
                average=average,
                average_rate=0.1,
            )
            assert average.isfinite().tolist() == own["weights"].isfinite().tolist()
            if name == "loss":
                assert torch.equal(own["weights"].cpu(), tensors["weights"])
            elif name == "second moment":  # the root of infinity divides by it
                assert own["weights"][13].isnan().item() == (value != INFINITY)
            else:
                assert not own["weights"][13].isfinite() and not shadow[13].isfinite(), f"{value} in {name}"


def test_views():
    """NaN in a factor, the mean or the deviation of a view."""
    g = torch.Generator().manual_seed(4)
    image = torch.randint(0, 256, (1, 6, 5, 3), generator=g, dtype=torch.uint8)
    image[0, 2, 2] = 0  # black has no hue and no saturation
    codes = torch.tensor([[0, 5, 6, 0, 0, 2], [0, 5, 6, 0, 0, 2 | 4]], dtype=torch.int32)
    layout = torch.tensor([[0, 0, 0], [0, 0, 1]], dtype=torch.int32)
    for normalised in (False, True):
        for place in (*range(4), "mean", "std"):
            factors, mean, std = torch.tensor([[0.1, 1.2, 0.9, 1.1]] * 2), [0.5, 0.4, 0.3], [0.2, 0.3, 0.2]
            if place == "mean":
                mean[1] = NAN
            elif place == "std":
                std[1] = NAN
            else:
                factors[:, place] = NAN
            ours = augment.augment(
                [image.to(DEVICE)],
                torch.tensor([0], device=DEVICE),
                layout.to(DEVICE),
                codes.to(DEVICE),
                factors.to(DEVICE),
                mean,
                std,
                jitter_normalised=normalised,
            )
            plain = plain_augment.augment(
                [image], torch.tensor([0]), layout, codes, factors, mean, std, normalised, torch.float32, 3
            )
            check(f"NaN in {place}, {normalised=}", {"views": ours}, {"views": plain}, False)
            assert ours.isnan().any()
