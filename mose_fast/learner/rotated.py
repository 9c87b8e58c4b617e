"""What OCM and OnPro share: contrastive losses on rotated views, each rotation a class of its own
(docs/specification/baselines.md section 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.augment.rotations import rotations
from mose_fast.learner.replay_learner import BaselineOptions, Outputs, ReplayLearner, Rows
from mose_fast.losses.information import mixed_similarities
from mose_fast.ops.draws import Purpose, random_words, uniform_below32
from mose_fast.settings.run import CONTRASTIVE_TEMPERATURES, ConfigError, RunConfig, knob


@dataclass(frozen=True)
class RotatedOptions(BaselineOptions):
    """Switches of methods that contrast rotated views."""

    passes: str = knob(
        "separate",
        "how views pass the network",
        "gydpku/OCM; for table a choice",
        choices={"separate": "contrasted ones, then those that have another loss", "joint": "batch norm sees all"},
    )
    rotations: int = knob(
        16,
        "rotations of every row, each a class of its own",
        "gydpku/OCM: 16",
        choices={16: "", 4: "of its halves alone", 1: "none, where they change labels"},
    )
    per_class_cap: int | None = knob(
        7, "replayed rows for each class seen so far, at most", "gydpku/OCM", low=1, none="no cap"
    )
    projection: int = knob(128, "width of the contrastive projection, at most the feature's", "gydpku/OCM", low=1)
    temperature: float = knob(
        0.07, "temperature of the contrastive losses", "gydpku/OCM", above=0, search=CONTRASTIVE_TEMPERATURES
    )
    first_task: str = knob(
        "incoming",
        "task 0",
        "gydpku/OCM: incoming",
        choices={"incoming": "contrasts and classifies incoming rows alone", "same": "as later tasks"},
    )


class RotatedLearner(ReplayLearner):
    """A learner that contrasts every row in ``rotations`` fixed views, and once more with random
    augmentation; ConfigError for a stream whose labels rotating changes, or of images that are not
    square. The views of a step are the fixed views of all contrasted rows, one rotation after the
    other, the same augmented, and further views as a method adds them.
    """

    without_boundaries = ReplayLearner.without_boundaries | {("first_task", "incoming"): "never replays a row"}

    def __init__(self, config: RunConfig, **stream: Any) -> None:
        super().__init__(config, **stream)
        count, (height, width) = config.options.rotations, self.image_size
        if count > 1 and not self.mirrored:
            raise ConfigError(
                f"options.rotations is {count}, but images are not mirrored here, since that changes their labels or"
                f" options.mirror is 'off' (it is {config.options.mirror!r}); so they must not be rotated: wanted"
                " rotations 1 (another method than the published one), or mirror 'on'"
            )
        if count == 16 and height != width:
            raise ConfigError(
                f"options.rotations is 16, but images have {height}x{width} pixels and quarter turns want square ones;"
                " wanted rotations 4 or 1"
            )

    @classmethod
    def views_at_once(cls, config: RunConfig) -> int:
        o = config.options
        return 2 * o.rotations * (config.stream.batch + o.buffer_batch)

    def projection_size(self, feature_size: int) -> int:
        """The width of the projections, which are compared with pieces of the features."""
        return min(self.config.options.projection, feature_size)

    def projection_head(self, feature_size: int) -> nn.Module:
        return nn.Linear(feature_size, self.projection_size(feature_size))

    @property
    def alone(self) -> bool:
        """Whether incoming rows are contrasted and classified alone."""
        return self.config.options.first_task == "incoming" and self.task == self.data.first_task

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        o = self.config.options
        cap = o.buffer_batch if o.per_class_cap is None else o.per_class_cap * len(self.seen)
        return self.draw(min(o.buffer_batch, cap))

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """``offsets``: int64 [2], where the pieces of the features begin that projections are
        compared with, for incoming and for replayed rows.
        """
        feature_size = 8 * self.config.width
        places = max(feature_size - self.projection_size(feature_size), 1)
        words = random_words(self.config.seed, self.data.sequence, 2, Purpose.PIECE, self.device)
        return {"offsets": uniform_below32(words[0], places)}

    def view_parts(self, rows: Rows, contrasted: int, *others: Tensor) -> list[Tensor]:
        """Fixed views of the ``contrasted`` first rows; augmented ones of these and ``others``."""
        rotated = rotations(rows.images[:contrasted], self.config.options.rotations)
        views = super().make_views(rows._replace(images=torch.cat([rotated, *others])))
        return [self.views.normalise(rotated), *views.split([len(rotated), *map(len, others)])]

    def contrasted(self, values: Tensor, rows: int, first: int, last: int) -> Tensor:
        """The outputs for the two views of every rotation of the rows from ``first`` to ``last``,
        [2 * rotations * (last - first), ...], among those of ``rows`` contrasted rows.
        """
        count = 2 * self.config.options.rotations
        return values[: count * rows].unflatten(0, (count, rows))[:, first:last].flatten(0, 1)

    def rotated_labels(self, labels: Tensor) -> Tensor:
        """Labels of every rotation of rows, one after the other: y + K b for rotation b."""
        blocks = torch.arange(self.config.options.rotations, device=labels.device)
        return (labels + self.classes * blocks[:, None]).flatten()

    def similarities(self, outputs: Outputs, rows: int, first: int, last: int, offset: Tensor) -> Tensor:
        """Similarities of the views of some contrasted rows; see :meth:`contrasted`."""
        parts = (self.contrasted(part, rows, first, last) for part in (outputs.projections, outputs.features))
        return mixed_similarities(*parts, offset)
