"""One ResNet-18 read as several nested experts (paper section 4.1; mose.md section 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mose_fast.nn.alignment import AlignmentModule, AttentionGate
from mose_fast.nn.backbone import STAGE_STRIDES, BasicBlock, Stem

__all__ = ["BRANCH_POINTS", "ExpertNetwork", "ExpertOutputs", "check_image_size"]

#: Blocks (1 to 8) after which an expert branches off, by number of experts (mose.md 9.16). The last is always the whole network.
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
    """What one training forward gives: ``projections`` [E, N, P], ``logits`` [E, N, K], ``features`` [E, N, D], ``student`` [N, D]."""

    projections: Tensor
    logits: Tensor
    features: Tensor
    student: Tensor


def check_image_size(height: int, width: int) -> None:
    """Raises ValueError unless both sides are multiples of 8: three halvings, each undone by a gate's up-sampling, must come out even."""
    if height % 8 or width % 8 or min(height, width) < 8:
        raise ValueError(
            f"image size is {height}x{width}; wanted sides that are multiples of 8 (pad or resize, for example 28x28 to 32x32)"
        )


class ExpertNetwork(nn.Module):
    """ResNet-18 backbone with an alignment module, a classifier and a projection per expert.

    Parameters are named ``stem``, ``stage{1..4}.block{0,1}``, ``gate{e}``, ``align{e}``, ``classifier{e}``, ``projection{e}``
    and ``adapter``, experts counted from 1, the shallowest first.

    Args:
        classes: Number of classes K.
        width: Channels of the first stage; the last has D = 8 * width.
        experts: Number of branch points, 1 to 8; 4 are the ends of the four stages.
        attention: Attention gates before the alignment modules of the first three stages (released code only).
        adapter: ``Linear(D, D)`` on the student's feature before distillation (released code only).
        projection: Width P of the contrastive projections.
        student: Position of the expert that is distilled into, from 0; None: the deepest.
        init: ``kaiming_fan_out`` (released) or ``default`` (PyTorch's), for convolutions only.
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

    def features(self, x: Tensor) -> Tensor:
        """Aligned features a_1 ... a_E of normalised images.

        Args:
            x: float [N, 3, H, W]; H and W multiples of 8.

        Returns:
            [E, N, D], every entry at least 0.
        """
        check_image_size(*x.shape[2:])
        pooled = AlignmentModule(self.feature_size, 0)
        h = self.stem(x)
        features = []
        for block in range(1, 9):
            h = getattr(getattr(self, f"stage{(block + 1) // 2}"), f"block{(block - 1) % 2}")(h)
            if block in self._expert_after_block:
                e = self._expert_after_block[block]
                gate = getattr(self, f"gate{e}", None)
                features.append(getattr(self, f"align{e}", pooled)(h if gate is None else gate(h)))
        return torch.stack(features)

    def deepest_feature(self, x: Tensor) -> Tensor:
        """The last expert's feature [N, D] alone: the deployed network, without alignment modules and heads."""
        check_image_size(*x.shape[2:])
        h = self.stem(x)
        for stage in range(1, 5):
            blocks = getattr(self, f"stage{stage}")
            h = blocks.block1(blocks.block0(h))
        return h.mean(dim=(2, 3))

    def classify(self, features: Tensor) -> Tensor:
        """Logits [E, N, K] of all experts' classifiers for ``features`` [E, N, D]."""
        return torch.stack([getattr(self, f"classifier{e + 1}")(features[e]) for e in range(self.experts)])

    def project(self, features: Tensor) -> Tensor:
        """Contrastive projections [E, N, P] for ``features`` [E, N, D]; not normalised, the loss does that."""
        return torch.stack([getattr(self, f"projection{e + 1}")(features[e]) for e in range(self.experts)])

    def forward(self, x: Tensor, detach_student: bool = False) -> ExpertOutputs:
        """Everything a training step needs.

        Args:
            x: Normalised images, float [N, 3, H, W].
            detach_student: Let no gradient through the adapter into the network; forward self-distillation (SD) wants that, since
                there the adapted feature teaches (mose.md 9.17).
        """
        features = self.features(x)
        student = features[self.student]
        student = self.adapter(student.detach() if detach_student else student)
        return ExpertOutputs(self.project(features), self.classify(features), features, student)
