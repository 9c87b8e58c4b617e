"""One ResNet-18 read as nested experts (docs/specification/mose.md section 2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mose_fast.nn.alignment import AlignmentModule, AttentionGate
from mose_fast.nn.backbone import STAGE_STRIDES, BasicBlock, Stem
from mose_fast.nn.heads import LinearMaps, linear_maps
from mose_fast.nn.kernels import check_kernels
from mose_fast.nn.side_streams import SideStreams, fork, join, on_stream

#: Blocks (1 to 8) after which an expert branches off, by number of experts
#: (docs/specification/mose.md section 9.16). The last is always the whole network.
BRANCH_POINTS = {
    1: (8,),
    2: (2, 8),
    3: (2, 4, 8),
    4: (2, 4, 6, 8),
    5: (1, 2, 4, 6, 8),
    6: (1, 2, 3, 4, 6, 8),
    7: (1, 2, 3, 4, 5, 6, 8),
    8: (1, 2, 3, 4, 5, 6, 7, 8),
}


class ExpertOutputs(NamedTuple):
    """The outputs of one training forward pass: ``projections`` [E, N, P], ``logits`` [E, N, K],
    ``features`` [E, N, D], ``student`` [N, D].
    """

    projections: Tensor
    logits: Tensor
    features: Tensor
    student: Tensor


def check_image_size(height: int, width: int) -> None:
    """Raises ValueError unless both sides are multiples of 8: they are halved three times."""
    if height % 8 or width % 8 or min(height, width) < 8:
        raise ValueError(
            f"image size is {height}x{width}; wanted sides that are multiples of 8 (pad or resize, for example 28x28 to"
            " 32x32)"
        )


class ExpertNetwork(nn.Module):
    """ResNet-18 backbone with an alignment module, a classifier and a projection per expert.

    Parameters are named ``stem``, ``stage{1..4}.block{0,1}``, ``gate{e}``, ``align{e}``,
    ``classifier{e}``, ``projection{e}`` and ``adapter``, experts counted from 1, the shallowest
    first.

    Args:
        width: Channels of the first stage; the last has D = 8 * width.
        experts: Number of branch points, 1 to 8; 4 are the ends of the four stages.
        attention: Attention gates before the alignment modules of the first three stages (released
            code only).
        adapter: ``Linear(D, D)`` on the student's feature before distillation (released code only).
        projection: Width P of the contrastive projections.
        student: Position of the expert that is distilled into, from 0; None: the deepest.
        init: ``kaiming_fan_out`` (released) or ``default`` (PyTorch's), for convolutions only.
        kernels: See :data:`mose_fast.nn.kernels.KERNELS`; the same ``state_dict``, the same values
            up to rounding.
    """

    def __init__(
        self,
        classes: int,
        *,
        width: int = 64,
        experts: int = 4,
        attention: bool = True,
        adapter: bool = True,
        projection: int = 128,
        student: int | None = None,
        init: str = "kaiming_fan_out",
        kernels: str = "torch",
    ) -> None:
        super().__init__()
        if classes < 1 or width < 1:
            raise ValueError(f"classes is {classes} and width {width}; wanted both at least 1")
        if experts not in BRANCH_POINTS:
            raise ValueError(f"experts is {experts}; wanted 1 to 8")
        if init not in ("kaiming_fan_out", "default"):
            raise ValueError(f"init is {init!r}; wanted kaiming_fan_out or default")
        self.classes, self.width, self.experts = classes, width, experts
        self.feature_size = 8 * width
        self.student = experts - 1 if student is None else student
        if not 0 <= self.student < experts:
            raise ValueError(f"student is {student}; wanted 0 to {experts - 1}")
        self._expert_after_block = {block: e for e, block in enumerate(BRANCH_POINTS[experts], start=1)}

        self.stem = Stem(width)
        channels = width
        for stage, stride in enumerate(STAGE_STRIDES):
            out_channels = width << stage
            blocks = nn.Module()
            blocks.block0 = BasicBlock(channels, out_channels, stride)
            blocks.block1 = BasicBlock(out_channels, out_channels, 1)
            setattr(self, f"stage{stage + 1}", blocks)
            channels = out_channels
        for block, e in self._expert_after_block.items():
            stage = (block - 1) // 2
            if stage < 3:
                if attention:
                    setattr(self, f"gate{e}", AttentionGate(width << stage))
                setattr(self, f"align{e}", AlignmentModule(width << stage, 3 - stage))
            setattr(self, f"classifier{e}", nn.Linear(self.feature_size, classes))
            setattr(self, f"projection{e}", nn.Linear(self.feature_size, projection))
        self.adapter: nn.Module = nn.Linear(self.feature_size, self.feature_size) if adapter else nn.Identity()

        if init == "kaiming_fan_out":
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        #: Of the branches of all experts but the last, with fused kernels.
        self.side_streams = SideStreams()
        self.use_kernels(kernels)

    def use_kernels(self, kernels: str) -> None:
        self.kernels = check_kernels(kernels)
        for module in self.modules():
            if isinstance(module, AlignmentModule):
                module.kernels = self.kernels

    def features(self, x: Tensor, valid_rows: int | Tensor | None = None) -> Tensor:
        """Computes the aligned features a_1 ... a_E, [E, N, D], every entry at least 0, of
        normalised images float [N, 3, H, W], H and W multiples of 8.

        Only with ``kernels`` ``fused``: ``valid_rows``, an int or an int32 scalar on the device of
        ``x``, is the number of valid images. Those after them are padding, which must be zero:
        their features are zero and no norm counts them.
        """
        check_image_size(*x.shape[2:])
        if self.kernels == "fused":
            return self._fused_features(x, valid_rows)
        if valid_rows is not None:
            raise ValueError(
                "valid_rows is given, but kernels is 'torch', whose norms count every row; wanted kernels 'fused'"
            )
        pooled = AlignmentModule(self.feature_size, 0)
        h = self.stem(x)
        features = []
        for block, module in self._blocks():
            h = module(h)
            if block in self._expert_after_block:
                gate, align = self._branch(self._expert_after_block[block], pooled)
                features.append(align(h if gate is None else gate(h)))
        return torch.stack(features)

    def _fused_features(self, x: Tensor, valid_rows: int | Tensor | None) -> Tensor:
        pooled = AlignmentModule(self.feature_size, 0, kernels="fused")
        # Each reader of a map gets a result of its own, so that the norm before it sums their
        # gradients: the next block reads it twice, for its first convolution and for its residual
        # path, the gate once, the alignment module once. Nothing but the pool reads the last map,
        # which is therefore never written.
        inputs = self.stem.fused(x, 2, valid_rows)
        features = []
        *blocks, (_, last) = self._blocks()
        for block, module in blocks:
            expert = self._expert_after_block.get(block)
            gate, align = (None, None) if expert is None else self._branch(expert, pooled)
            outputs = module.fused(inputs, 2 + (gate is not None) + (align is not None), valid_rows)
            inputs, maps = outputs[:2], outputs[2:]
            if align is not None:
                stream = self.side_streams.of(expert, x)
                maps = fork(stream, maps, valid_rows)
                with on_stream(stream):
                    opened = None if gate is None else gate.fused(maps[0], valid_rows)
                    features.append((stream, align(maps[-1], gate=opened, valid_rows=valid_rows)))
        features.append((None, last.pooled(inputs, valid_rows)))
        return torch.stack([join(stream, feature) for stream, feature in features])

    def _blocks(self) -> list[tuple[int, BasicBlock]]:
        """Number, from 1, and module of every residual block in order."""
        stages = (getattr(self, f"stage{stage + 1}") for stage in range(4))
        return list(enumerate((block for stage in stages for block in (stage.block0, stage.block1)), start=1))

    def _branch(self, expert: int, pooled: AlignmentModule) -> tuple[AttentionGate | None, AlignmentModule]:
        """An expert's gate, if any, and its alignment module, else ``pooled``."""
        return getattr(self, f"gate{expert}", None), getattr(self, f"align{expert}", pooled)

    def deepest_feature(self, x: Tensor) -> Tensor:
        """The last expert's feature [N, D]: the deployed network, without alignment and heads."""
        check_image_size(*x.shape[2:])
        h = self.stem(x)
        for _, block in self._blocks():
            h = block(h)
        return h.mean(dim=(2, 3))

    def classify(self, features: Tensor) -> Tensor:
        """Computes logits [E, N, K] of all experts' classifiers for ``features`` [E, N, D]."""
        return self._heads("classifier", features)

    def project(self, features: Tensor) -> Tensor:
        """Contrastive projections [E, N, P] of ``features`` [E, N, D], not yet normalised."""
        return self._heads("projection", features)

    def _heads(self, name: str, features: Tensor) -> Tensor:
        heads = self._modules_of(name)
        if self._batched(heads):
            return linear_maps(features, [LinearMaps.of(heads)])[0]
        with _mixed(features):
            return torch.stack([head(feature) for head, feature in zip(heads, features, strict=True)])

    def _modules_of(self, name: str) -> list[nn.Module]:
        return [getattr(self, f"{name}{e + 1}") for e in range(self.experts)]

    def _batched(self, heads: list[nn.Module]) -> bool:
        """Whether batched products serve. Methods put other heads here, such as cosine ones."""
        return self.kernels == "fused" and all(type(head) is nn.Linear for head in heads)

    def forward(self, x: Tensor, detach_student: bool = False, valid_rows: int | Tensor | None = None) -> ExpertOutputs:
        """Computes everything that a training step needs; for ``x`` and ``valid_rows`` see
        :meth:`features`. Projections, logits and student of padding are those of zero features.

        ``detach_student`` stops the gradient between adapter and network, as forward
        self-distillation (SD) wants, where the adapted feature is the teacher
        (docs/specification/mose.md section 9.17).
        """
        features = self.features(x, valid_rows)
        heads = [self._modules_of(name) for name in ("projection", "classifier")]
        if self._batched([*heads[0], *heads[1], self.adapter]):
            adapter = LinearMaps.of([self.adapter], self.student, detach_student)
            projections, logits, students = linear_maps(features, [*map(LinearMaps.of, heads), adapter])
            return ExpertOutputs(projections, logits, features, students.squeeze(0))
        student = features[self.student]
        with _mixed(student):
            student = self.adapter(student.detach() if detach_student else student)
        return ExpertOutputs(self.project(features), self.classify(features), features, student)


def _mixed(x: Tensor) -> AbstractContextManager:
    """A context for single linear maps: where weights have bf16 copies, biases have none."""
    return torch.autocast(x.device.type, torch.bfloat16) if x.dtype == torch.bfloat16 else nullcontext()
