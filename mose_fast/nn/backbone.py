"""ResNet-18 for small images, which all experts share (docs/specification/mose.md section 2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.ops.batch_norm_pool import batch_norm_pool

#: First stride of each residual stage.
STAGE_STRIDES = (1, 2, 2, 2)


def backbone_parameters(width: int) -> int:
    """The number of parameters; ``width`` channels in the first stage: 11,168,832 at 64."""
    count, channels = 3 * 9 * width + 2 * width, width
    for stage in range(len(STAGE_STRIDES)):
        out = width << stage
        for block in range(2):
            count += 9 * channels * out + 9 * out * out + 4 * out
            count += channels * out + 2 * out if block == 0 and stage > 0 else 0
            channels = out
    return count


def backbone_activations(width: int, image_size: tuple[int, int]) -> int:
    """How many values training keeps of each view: inputs of all convolutions and norms."""
    pixels = image_size[0] * image_size[1]
    count = (3 + 2 * width) * pixels
    for stage, stride in enumerate(STAGE_STRIDES):
        pixels //= stride * stride
        count += (8 + (stage > 0)) * (width << stage) * pixels
    return count


class Stem(nn.Module):
    """3x3 convolution, batch norm, ReLU; no max-pool, so that 32x32 images keep their size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))

    def fused(self, x: Tensor, consumers: int, valid_rows: int | Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """The same by fused ops, one result for each of the ``consumers`` that read it."""
        return batch_norm_act(self.conv(x), Norm.of(self.norm), consumers=consumers, valid_rows=valid_rows)


class PointwiseConv2d(nn.Conv2d):
    """1x1 convolution without bias, with a stride."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__(channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        stride = self.stride[0]
        if x.device.type == "cpu" and stride > 1:
            # The same numbers, computed from the pixels that the stride leaves: with more than one
            # thread, the CPU's weight gradient of a strided 1x1 convolution writes beyond its
            # memory for an odd number of more than 64 images and fewer than 16 channels (torch
            # 2.14.1).
            return F.conv2d(x[:, :, ::stride, ::stride], self.weight)
        return super().forward(x)


class Shortcut(nn.Module):
    """1x1 convolution and batch norm on the residual path, where a block changes the shape."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv = PointwiseConv2d(channels, out_channels, stride)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a residual connection (He et al. 2016)."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        changes_shape = stride != 1 or channels != out_channels
        self.shortcut: nn.Module = Shortcut(channels, out_channels, stride) if changes_shape else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))

    def fused(
        self, x: Sequence[Tensor], consumers: int, valid_rows: int | Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        """The same by fused ops, one result for each of the ``consumers``; ``x`` is the input
        twice, each with a gradient of its own: for the first convolution and for the residual path.
        """
        y = batch_norm_act(self.conv1(x[0]), Norm.of(self.norm1), valid_rows=valid_rows)
        residual, residual_norm = x[1], None
        if isinstance(self.shortcut, Shortcut):
            residual, residual_norm = self.shortcut.conv(residual), Norm.of(self.shortcut.norm)
        options = {"residual": residual, "residual_norm": residual_norm, "consumers": consumers}
        return batch_norm_act(self.conv2(y), Norm.of(self.norm2), **options, valid_rows=valid_rows)

    def pooled(self, x: Sequence[Tensor], valid_rows: int | Tensor | None) -> Tensor:
        """The averages [N, C] of the result, for a block that keeps the shape."""
        y = batch_norm_act(self.conv1(x[0]), Norm.of(self.norm1), valid_rows=valid_rows)
        return batch_norm_pool(self.conv2(y), Norm.of(self.norm2), self.shortcut(x[1]), valid_rows)
