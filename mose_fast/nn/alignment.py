"""Alignment modules and attention gates: what turns a shallow feature map into a vector of the deepest one's size."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["AlignmentModule", "AttentionGate", "DownBlock"]


class DownBlock(nn.Module):
    """Halves a map: depthwise 3x3 (stride 2), pointwise, norm, ReLU, depthwise 3x3, pointwise, norm, ReLU.

    The "similar block" of the paper's table of alignment modules; 18c + c^2 + cc' + 2c + 2c' parameters for c -> c' channels.
    """

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.depthwise1 = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels, bias=False)
        self.pointwise1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.depthwise2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.pointwise2 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.pointwise1(self.depthwise1(x))))
        return F.relu(self.norm2(self.pointwise2(self.depthwise2(x))))


class AlignmentModule(nn.Sequential):
    """The paper's a_i (section 4.1): down blocks ``down1``, ``down2``, ... until the deepest stage's width is reached.

    Maps [N, C, H, W] to [N, D] with D = C * 2**blocks; the average pool comes last, so every entry is at least 0.
    With no blocks it is the average pool alone.
    """

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__(OrderedDict((f"down{i + 1}", DownBlock(channels << i, channels << (i + 1))) for i in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(dim=(2, 3))


class AttentionGate(nn.Module):
    """Multiplies a map elementwise by a gate in (0, 1) computed from the map at half resolution.

    Not in the paper's text, but in the released code and in its printed parameter count (mose.md section 2).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = DownBlock(channels, channels)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.interpolate(F.relu(self.norm(self.down(x))), scale_factor=2, mode="bilinear", align_corners=False)
        return x * gate.sigmoid()
