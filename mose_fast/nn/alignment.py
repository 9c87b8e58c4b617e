"""Alignment modules and attention gates: from a shallow feature map to a vector of full width."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.nn.kernels import check_kernels
from mose_fast.ops.align_conv import AlignedMap, align_conv
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.ops.norm_pool import norm_pool


class DownBlock(nn.Module):
    """Halves a map: depthwise 3x3 (stride 2), pointwise, norm, ReLU, depthwise 3x3, pointwise,
    norm, ReLU (the "similar block" of the paper's table of alignment modules).
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

    def fused(
        self, x: Tensor, state: Tensor | None = None, gate: Tensor | None = None, valid_rows: int | Tensor | None = None
    ) -> AlignedMap:
        """The block by fused ops: its map before ``norm2`` and the ReLU, which are applied where
        the map is read, and the state of ``norm2``.

        ``x`` [N, C, H, W] is, with ``state`` [4, C], a map whose norm and ReLU are still to come;
        ``gate`` [N, C, H / 2, W / 2] comes from :meth:`AttentionGate.fused`.
        """
        weights, norm = (self.depthwise1.weight, self.pointwise1.weight), Norm.of(self.norm1)
        y, state = align_conv(x, *weights, norm, stride=2, prologue=state, gate=gate, valid_rows=valid_rows)
        weights, norm = (self.depthwise2.weight, self.pointwise2.weight), Norm.of(self.norm2)
        return align_conv(y, *weights, norm, prologue=state, valid_rows=valid_rows)


class AlignmentModule(nn.Sequential):
    """The paper's a_i (section 4.1): down blocks ``down1``, ``down2``, ... until the deepest
    stage's width is reached, then the average pool; with no blocks the pool alone.

    Maps [N, C, H, W] to [N, D], D = C * 2**blocks, every entry at least 0. For ``kernels`` see
    :class:`mose_fast.nn.ExpertNetwork`.
    """

    def __init__(self, channels: int, blocks: int, *, kernels: str = "torch") -> None:
        super().__init__(
            OrderedDict((f"down{i + 1}", DownBlock(channels << i, channels << (i + 1))) for i in range(blocks))
        )
        self.kernels = check_kernels(kernels)

    def forward(self, x: Tensor, *, gate: Tensor | None = None, valid_rows: int | Tensor | None = None) -> Tensor:
        """Computes features [N, D] of maps [N, C, H, W].

        With fused kernels only: ``gate`` [N, C, H / 2, W / 2], the result of
        :meth:`AttentionGate.fused`, multiplies ``x`` by sigmoid(its up-sampling); after
        ``valid_rows`` images comes padding, which is zero in the result and counted by no norm.
        """
        if self.kernels == "torch":
            if gate is not None or valid_rows is not None:
                raise ValueError(
                    "kernels is 'torch', which has no gate and no valid_rows; wanted AlignmentModule(kernels='fused')"
                )
            return super().forward(x).mean(dim=(2, 3))
        state = None
        for block in self:
            x, state = block.fused(x, state, gate, valid_rows)
            gate = None
        return norm_pool(x, state, valid_rows=valid_rows)


class AttentionGate(nn.Module):
    """Multiplies a map elementwise by a gate in (0, 1) computed from the map at half resolution;
    only in the released code (docs/specification/mose.md section 2).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = DownBlock(channels, channels)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.interpolate(F.relu(self.norm(self.down(x))), scale_factor=2, mode="bilinear", align_corners=False)
        return x * gate.sigmoid()

    def fused(self, x: Tensor, valid_rows: int | Tensor | None = None) -> Tensor:
        """The gate [N, C, H / 2, W / 2]; up-sampling and sigmoid are applied where it is read."""
        aligned = self.down.fused(x, valid_rows=valid_rows)
        return batch_norm_act(aligned.y, Norm.of(self.norm), prologue=aligned.state, valid_rows=valid_rows)
