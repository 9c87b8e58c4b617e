"""The exported classifier: its card, its network from raw images to labels, and reading both."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.export.card import CARD, MODELS, ExportError, read_card
from mose_fast.learner.data import plain_tensor
from mose_fast.learner.model import first_difference
from mose_fast.nn import CosineClassifier, ExpertNetwork
from mose_fast.nn.class_means import squared_distances
from mose_fast.nn.classifiers import AVERAGED, affine_scores, standardised

#: Images that are classified together.
BATCH = 256


class _Normalising(nn.Module):
    """A head that reads the features of one expert or of several, beside each other in ``flat``
    [N, E * D], each normalised.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def normalised(self, flat: Tensor) -> Tensor:
        return F.normalize(flat.unflatten(1, (self.experts, -1)), dim=-1).flatten(1)


class NearestClassMean(_Normalising):
    """:class:`mose_fast.nn.ClassMeans`, as squared distances float64 [N, K]."""

    def __init__(self, classes: int, experts: int, feature_size: int) -> None:
        super().__init__(experts)
        self.register_buffer("means", torch.zeros(classes, experts * feature_size))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def forward(self, flat: Tensor) -> Tensor:
        return squared_distances(self.normalised(flat), self.means, self.known)


class AffineHead(_Normalising):
    """:class:`mose_fast.nn.classifiers.Affine`: scores float64 [N, K]."""

    def __init__(self, classes: int, experts: int, feature_size: int) -> None:
        super().__init__(experts)
        self.register_buffer("weight", torch.zeros(classes, experts * feature_size, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(classes, dtype=torch.float64))

    def forward(self, flat: Tensor) -> Tensor:
        return affine_scores(self.normalised(flat), self.weight, self.bias)


class Averaged(nn.Module):
    """The mean of the standardised scores of two heads, float64 [N, K]."""

    def __init__(self, first: nn.Module, second: nn.Module, classes: int) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def forward(self, flat: Tensor) -> Tensor:
        first = self.first(flat)
        first = -first if isinstance(self.first, NearestClassMean) else first
        return (standardised(first, self.known) + standardised(self.second(flat), self.known)) / 2


def _head(head: str, classes: int, experts: int, size: int) -> nn.Module:
    if head in AVERAGED:
        first, second = (_head(part, classes, experts, size) for part in AVERAGED[head])
        return Averaged(first, second, classes)
    if head == "ncm":
        return NearestClassMean(classes, experts, size)
    if head in ("lda", "ridge"):
        return AffineHead(classes, experts, size)
    if head in ("linear", "adjusted"):
        return nn.Linear(experts * size, classes)
    return CosineClassifier(torch.empty(classes, size), learned_scale=head == "scaled_cosine")


class DeployedNetwork(nn.Module):
    """The exported network: from raw images to labels, by ``backbone``, a ResNet-18 without heads,
    and ``head``, which computes a score for each class.

    Args:
        width: Channels of the first stage; the feature has D = 8 * width.
        head: ``cosine``, ``scaled_cosine``, whose scale is learned, or a classifier's name.
        class_order: Original label by head index; K classes.
        mean, std: Of images in [0, 1] by channel.
        branches: ``experts`` and ``attention`` of :class:`mose_fast.nn.ExpertNetwork`, where the
            head reads the features of all experts; None: it reads the last one's, and the backbone
            has no alignment modules.
        test_mirror: The head reads the mean of the features of each image and its mirror.
    """

    def __init__(
        self,
        width: int,
        head: str,
        class_order: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        branches: dict[str, Any] | None = None,
        test_mirror: bool = False,
    ) -> None:
        super().__init__()
        classes = len(class_order)
        self.branched, self.test_mirror = branches is not None, test_mirror
        branches = branches or {"experts": 1, "attention": False}
        # On the meta device, since all weights are assigned afterwards.
        with torch.device("meta"):
            self.backbone = ExpertNetwork(classes, width=width, adapter=False, **branches)
            # The features do not need them.
            for e in range(1, branches["experts"] + 1):
                delattr(self.backbone, f"classifier{e}")
                delattr(self.backbone, f"projection{e}")
            self.head = _head(head, classes, branches["experts"], 8 * width)
        self.nearest = head == "ncm"
        self.register_buffer("class_order", torch.tensor(class_order, dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Classifies raw images, uint8 [N, H, W, 3]: the positions in the class order, int64 [N];
        the data set's labels, int64 [N]; scores float32 [N, K]: squared distances (``ncm``, the
        smallest wins), or logits or other scores (the largest wins).
        """
        x = (images.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        features = self._features(x)
        if self.test_mirror:
            features = (features + self._features(x.flip(3))) / 2
        scores = self.head(features)
        head_index = scores.argmin(-1) if self.nearest else scores.argmax(-1)
        return head_index, self.class_order[head_index], scores.float()

    def _features(self, x: Tensor) -> Tensor:
        """[N, D], or [N, E * D] of all experts."""
        if self.branched:
            return self.backbone.features(x).transpose(0, 1).flatten(1)
        return self.backbone.deepest_feature(x)


class Predictions(NamedTuple):
    """The predictions for N images: what :class:`DeployedNetwork` gives, and ``margin`` float32
    [N], the difference of the best and the second best score, at least 0; infinite where only one
    class is known.
    """

    head_index: Tensor
    label: Tensor
    scores: Tensor
    margin: Tensor


class Classifier:
    """An exported classifier, on the CPU, of a card and the tensors in ``model.safetensors``.
    Raises ValueError if these do not belong together.

    Attributes:
        network: The :class:`DeployedNetwork`, in evaluation mode.
        image_size: (H, W) of the images in pixels.
        resize: The side that image files are resized and centre-cropped to
            (:func:`mose_fast.streams.decoding.centre_square`); None: they must have ``image_size``.
        class_names: The classes' names by head index.
    """

    def __init__(self, card: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.card = card
        self.image_size = tuple(card["image_size"])
        self.resize = card.get("resize")
        if self.resize is not None and self.image_size != (self.resize, self.resize):
            raise ValueError(f"resize is {self.resize} and image_size {self.image_size}; wanted the same side")
        self.class_names = list(card["class_names"])
        if len(self.class_names) != len(card["class_order"]):
            raise ValueError(
                f"class_names has {len(self.class_names)} entries; wanted {len(card['class_order'])}, as class_order"
            )
        normalisation = card["normalisation"]
        self.network = DeployedNetwork(
            card["width"],
            card["head"],
            card["class_order"],
            normalisation["mean"],
            normalisation["std"],
            card.get("branches"),
            card.get("test_mirror", False),
        )
        for name, wanted in self.network.state_dict().items():
            if name in tensors and tensors[name].dtype != wanted.dtype:
                raise ValueError(f"{name} has dtype {tensors[name].dtype}; wanted {wanted.dtype}")
        difference = first_difference(tensors, self.network.state_dict())
        if difference is not None:
            raise ValueError(f"the tensors belong to another network: {difference}")
        self.network.load_state_dict(tensors, assign=True)
        self.network.requires_grad_(False).eval()

    @classmethod
    def load(cls, folder: str | Path) -> Classifier:
        """Reads ``card.json`` and ``model.safetensors``, neither of which can execute code. Raises
        ExportError if the folder holds no complete export, a file is damaged, or the format is
        newer.
        """
        folder = Path(folder)
        card = read_card(folder)
        path = folder / MODELS["safetensors"]
        try:
            files = card["files"]
            if path.name not in files:
                held = ", ".join(files)
                raise ExportError(
                    f"{folder} holds {held} and no {path.name}; export again with --format safetensors (and others)"
                )
            raw = path.read_bytes()
            if hashlib.sha256(raw).hexdigest() != files[path.name]["sha256"]:
                raise ExportError(
                    f"{path} is damaged or of another export: its SHA-256 is not the one in {CARD}; export the run"
                    " again"
                )
            return cls(card, load(raw))
        except OSError as error:
            raise ExportError(f"cannot read {path}: {error.strerror}; export the run again") from error
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError, SafetensorError) as error:
            if isinstance(error, ExportError):
                raise
            raise ExportError(
                f"the export {folder} is damaged ({type(error).__name__}: {error}); export the run again"
            ) from error

    def predict(self, images: Tensor | np.ndarray) -> Predictions:
        """Classifies raw images, uint8 [N, H, W, 3]; ValueError for another shape or dtype."""
        images = plain_tensor(images, "images")
        height, width = self.image_size
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != (height, width, 3):
            raise ValueError(
                f"images is {images.dtype} of shape {list(images.shape)}; wanted torch.uint8 [N, {height}, {width}, 3]"
            )
        with torch.inference_mode():
            parts = [self.network(part) for part in images.split(BATCH)]
        head_index, label, scores = (torch.cat(p) for p in zip(*parts, strict=True))
        best = scores.topk(2, largest=not self.network.nearest).values
        return Predictions(head_index, label, scores, (best[:, 0] - best[:, 1]).abs())
