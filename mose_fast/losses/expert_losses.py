"""MOSE's losses with a run's options."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mose_fast.losses.label_counts import label_counts
from mose_fast.nn import ExpertOutputs
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.settings.run import MethodOptions


class ExpertLosses(nn.Module):
    """The losses of one MOSE step (paper eq. for L_MOSE; docs/specification/mose.md section
    5.4); ``options`` are MOSE's.
    """

    def __init__(self, options: MethodOptions) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        outputs: ExpertOutputs,
        labels: Tensor,
        new_rows: int | Tensor,
        current_classes: Tensor | None,
        valid_rows: Tensor | None = None,
    ) -> Tensor:
        """Computes a row (supervised contrastive, cross-entropy, distillation) per expert, float32
        [E, 3]; training minimises their sum. See :func:`mose_fast.ops.expert_losses.expert_losses`;
        ``current_classes`` None: one cross-entropy over all rows and classes.
        """
        o = self.options
        current_classes = current_classes if o.separate_cross_entropy else None
        if o.logit_adjustment:
            first = 0 if current_classes is None else new_rows
            outputs = outputs._replace(logits=self._adjusted(outputs.logits, labels, first, valid_rows))
        # Similarities, softmaxes and norms are float32, whatever precision the network ran in.
        with torch.autocast(labels.device.type, enabled=False):
            return expert_losses(
                *outputs,
                labels,
                new_rows,
                current_classes,
                valid_rows=valid_rows,
                temperature=o.temperature,
                buffer_weight=o.buffer_weight,
                cross_entropy=o.cross_entropy,
                contrastive=o.contrastive,
                distillation=o.distillation,
                rsd_reduction=o.rsd_reduction,
                student_index=o.student_index,
            )

    def _adjusted(self, logits: Tensor, labels: Tensor, first: int | Tensor, valid: int | Tensor | None) -> Tensor:
        """The logits [E, N, K]; in valid rows from ``first`` on plus ``logit_adjustment`` times the
        log of each class's number of these rows, -inf for a class that has none.
        """
        rows = torch.arange(len(labels), device=labels.device)
        counted = rows >= first if valid is None else (rows >= first) & (rows < valid)
        counts = label_counts(labels, logits.shape[2], counted)
        return logits + torch.where(counted[:, None], self.options.logit_adjustment * counts.log(), 0)
