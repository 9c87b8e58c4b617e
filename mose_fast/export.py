"""The deployable classifier of a finished run: backbone and class means, without what only training
needs (paper section 5.1).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.config import ConfigError, RunConfig, near_matches
from mose_fast.errors import MoseFastError
from mose_fast.methods import create_learner
from mose_fast.methods.network import NetworkLearner, first_difference
from mose_fast.nn import CLASSIFIERS, CosineClassifier, ExpertNetwork
from mose_fast.streams.decoding import decode_image
from mose_fast.streams.files import SUFFIXES
from mose_fast.sweep.store import read_run
from mose_fast.train.checkpoint import latest, load_checkpoint
from mose_fast.train.files import LOCK, RunError, RunFolder, remove_leftovers, write_atomically
from mose_fast.train.lock import FolderLock
from mose_fast.train.results import precision_of

__all__ = [
    "CARD",
    "FORMAT",
    "MODELS",
    "Classifier",
    "DeployedNetwork",
    "ExportError",
    "Predictions",
    "classify_files",
    "export_run",
]

#: Version of the export format; a reader refuses newer ones.
FORMAT = 1

#: The file that describes an export. While the models are written it says that the export is
#: unfinished.
CARD = "card.json"

#: The model's file by format.
MODELS = {"safetensors": "model.safetensors", "onnx": "model.onnx", "torch": "model.pt2"}

_BATCH = 256
_STAGES = ("stem.", "stage1.", "stage2.", "stage3.", "stage4.")


class ExportError(RunError):
    """A run cannot be exported, or an export cannot be read or applied; the message says why and
    what to do.
    """


class NearestClassMean(nn.Module):
    """Squared Euclidean distances to the class means (paper section 5.1), float64 [N, K], infinite
    for classes without one.

    As :class:`mose_fast.nn.ClassMeans` computes them, for one expert and in operations that ONNX
    has.
    """

    def __init__(self, classes: int, feature_size: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, feature_size))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def forward(self, features: Tensor) -> Tensor:
        # In float64, since means may lie within 1e-4 of each other: |a|^2 + |m|^2 - 2am would
        # cancel.
        features, means = F.normalize(features, dim=-1).double(), self.means.double()
        squares = features.square().sum(-1, keepdim=True) + means.square().sum(-1)
        return (squares - 2 * features @ means.T).masked_fill(~self.known, math.inf)


class DeployedNetwork(nn.Module):
    """From raw images to labels, in one module.

    Args:
        width: Channels of the first stage; the feature has D = 8 * width.
        head: ``ncm``, ``linear`` or ``cosine``.
        class_order: Original label by head index; K classes.
        mean: Of images in [0, 1], by channel.
        std: Alike.

    Attributes:
        backbone: ResNet-18 without alignment modules and heads: 11,168,832 parameters at width 64.
        head: Gives a score for each class.
    """

    def __init__(
        self, width: int, head: str, class_order: Sequence[int], mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        classes, feature_size = len(class_order), 8 * width
        # Without memory or random numbers, since all weights are assigned afterwards.
        with torch.device("meta"):
            self.backbone = ExpertNetwork(classes, width=width, experts=1, attention=False, adapter=False)
            # The feature needs neither.
            del self.backbone.classifier1, self.backbone.projection1
            if head == "ncm":
                self.head: nn.Module = NearestClassMean(classes, feature_size)
            elif head == "linear":
                self.head = nn.Linear(feature_size, classes)
            else:
                self.head = CosineClassifier(torch.empty(classes, feature_size))
        self.nearest = head == "ncm"
        self.register_buffer("class_order", torch.tensor(class_order, dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Classifies raw images.

        Args:
            images: uint8 [N, H, W, 3].

        Returns:
            head_index: int64 [N], position in the class order.
            label: int64 [N], the data set's own.
            scores: float32 [N, K]: squared distances (``ncm``, the smallest wins) or logits (the
                largest wins).
        """
        x = (images.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        scores = self.head(self.backbone.deepest_feature(x))
        head_index = scores.argmin(-1) if self.nearest else scores.argmax(-1)
        return head_index, self.class_order[head_index], scores.float()


class Predictions(NamedTuple):
    """What a classifier says about N images.

    Attributes:
        head_index: int64 [N], position in the class order.
        label: int64 [N], the data set's own label.
        scores: float32 [N, K], as :class:`DeployedNetwork` gives them.
        margin: float32 [N], by how much the best score beats the second best, at least 0; infinite
            where only one class is known.
    """

    head_index: Tensor
    label: Tensor
    scores: Tensor
    margin: Tensor


class Classifier:
    """An exported classifier, on the CPU.

    Args:
        card: Contents of ``card.json``.
        tensors: Weights, running statistics and head by name, as in ``model.safetensors``.

    Attributes:
        card: The card.
        network: The :class:`DeployedNetwork`, in evaluation mode.
        image_size: (H, W) of the images.
        class_names: By head index.

    Raises:
        ValueError: Card and tensors do not belong together.
    """

    def __init__(self, card: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.card = card
        self.image_size = tuple(card["image_size"])
        self.class_names = list(card["class_names"])
        if len(self.class_names) != len(card["class_order"]):
            raise ValueError(
                f"class_names has {len(self.class_names)} entries; wanted {len(card['class_order'])}, as class_order"
            )
        normalisation = card["normalisation"]
        self.network = DeployedNetwork(
            card["width"], card["head"], card["class_order"], normalisation["mean"], normalisation["std"]
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
        """Reads ``card.json`` and ``model.safetensors``, which can execute nothing.

        Raises:
            ExportError: The folder holds no complete export, a file is damaged, or the format is
                newer.
        """
        folder = Path(folder)
        card = _read_card(folder)
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
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
            if isinstance(error, ExportError):
                raise
            raise ExportError(
                f"the export {folder} is damaged ({type(error).__name__}: {error}); export the run again"
            ) from error

    def predict(self, images: Tensor | np.ndarray) -> Predictions:
        """Classifies raw images.

        Args:
            images: uint8 [N, H, W, 3].

        Raises:
            ValueError: Another shape or dtype.
        """
        images = torch.as_tensor(images)
        height, width = self.image_size
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != (height, width, 3):
            raise ValueError(
                f"images is {images.dtype} of shape {list(images.shape)}; wanted torch.uint8 [N, {height}, {width}, 3]"
            )
        with torch.inference_mode():
            parts = [self.network(part) for part in images.split(_BATCH)]
        head_index, label, scores = (torch.cat(p) for p in zip(*parts, strict=True))
        best = scores.topk(2, largest=not self.network.nearest).values
        return Predictions(head_index, label, scores, (best[:, 0] - best[:, 1]).abs())


def export_run(
    run: str | Path,
    out: str | Path | None = None,
    *,
    formats: Iterable[str] = ("safetensors",),
    classifier: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the deployable classifier of a finished run. The data set is not needed.

    Args:
        run: The run's folder.
        out: Folder for the card and the models; None: ``export`` in the run's.
        formats: Of :data:`MODELS`: ``safetensors`` (what :meth:`Classifier.load` reads), ``onnx``,
        ``torch`` (torch.export).
        classifier: ``ncm`` or ``linear`` of the last expert; None: the run's own, which must be one
        of the two.
        overwrite: Replace an earlier export in ``out``; other files stay. One that was broken off
            is replaced without.

    Returns:
        The folder.

    Raises:
        ExportError: The run is unfinished, damaged or has no such classifier, ``onnx`` is not
            installed, or ``out`` is in use or holds files of an export's names that are not ours.
        RunError: The run's files contradict each other or cannot be read.
    """
    formats = tuple(dict.fromkeys(formats))
    for name in formats:
        if name not in MODELS:
            raise ExportError(f"format is {name!r}{near_matches(name, list(MODELS))}")
    if not formats:
        raise ExportError(f"no format is given; wanted some of {', '.join(MODELS)}")
    if "onnx" in formats:
        _require_onnx()
    run = Path(run)
    folder = run / "export" if out is None else Path(out)
    _check_free(folder, overwrite)
    _, results = read_run(run)
    learner = _restore(run, results)
    card, tensors = _describe(run, results, learner, classifier)
    exported = Classifier(card, tensors)
    files = {}
    if "safetensors" in formats:
        files[MODELS["safetensors"]] = save(
            {name: t.contiguous() for name, t in tensors.items()}, {"mose_fast_export": str(FORMAT)}
        )
    if {"onnx", "torch"} & set(formats):
        files |= _programs(exported, formats)
    card["files"] = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in files.items()
    }
    _write(folder, files, card, overwrite)
    return folder


def classify_files(
    classifier: Classifier, paths: Iterable[str | Path], unusable: Callable[[MoseFastError], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Classifies image files.

    Args:
        classifier: An export.
        paths: Files, and folders whose images (endings as in folders of a stream, any depth) are
        taken in the order of their names.
        unusable: Told why a file or folder cannot be used, which is then left out; None: the first
            such file ends it.

    Yields:
        For each file ``path``, ``name`` of the class, ``label`` in the data set, ``head_index``,
        ``score`` (squared distance or logit) and ``margin`` to the second best class; a margin is
        None where only one class is known.

    Raises:
        ExportError: There is no such file, no image in a folder, or an image has another size than
            the classifier's; only where nobody is told of it.
        StreamError: A file is no image, damaged, or holds more than 8 bits a channel; alike.
    """
    files: list[Path] = []
    for path in paths:
        with _told(unusable):
            files += _image_files(Path(path))
    for first in range(0, len(files), _BATCH):
        images: dict[Path, np.ndarray] = {}
        rows: list[Path] = []
        for file in files[first : first + _BATCH]:
            with _told(unusable):
                images[file] = _read_image(file, classifier.image_size)
                rows.append(file)
        if not rows:
            continue
        found = classifier.predict(np.stack([images[file] for file in rows]))
        for row, file in enumerate(rows):
            head_index, margin = int(found.head_index[row]), float(found.margin[row])
            yield {
                "path": str(file),
                "name": classifier.class_names[head_index],
                "label": int(found.label[row]),
                "head_index": head_index,
                "score": float(found.scores[row, head_index]),
                "margin": margin if math.isfinite(margin) else None,
            }


@contextmanager
def _told(unusable: Callable[[MoseFastError], None] | None) -> Iterator[None]:
    """Tells of what cannot be used instead of raising it, where there is somebody to tell."""
    try:
        yield
    except MoseFastError as error:
        if unusable is None:
            raise
        unusable(error)


# The run


def _restore(run: Path, results: dict[str, Any]) -> NetworkLearner:
    """The run's learner after its last batch, on the CPU."""
    resolved = results["resolved"]
    # In the precision of the run, which auto may not be here; and what only a card has is no
    # obstacle.
    here = {"device": "cpu", "precision": precision_of(results), "step": "auto", "feed": "auto"}
    config = RunConfig.from_dict({**results["config"], **here})
    normalisation = resolved["normalisation"]
    try:
        learner = create_learner(
            config,
            classes=results["classes"],
            image_size=tuple(results["image_size"]),
            mean=normalisation["mean"],
            std=normalisation["std"],
            mirror_safe=resolved["mirror"],
        )
    except ConfigError as error:
        raise ExportError(f"the run in {run} cannot be restored: {error}") from error
    if not isinstance(learner, NetworkLearner):
        raise ExportError(
            f"method is {config.method!r}, whose learner has no network of experts; wanted a NetworkLearner"
        )
    folder = RunFolder(run)
    checkpoint = latest(folder.checkpoints)
    if checkpoint is None:
        raise ExportError(f"{folder.checkpoints} holds no checkpoint, and so the run's weights are gone; run it again")
    tensors, values = load_checkpoint(checkpoint)
    try:
        learner.load_state(tensors, values["learner"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"the checkpoint {checkpoint} does not belong to the configuration beside it: {error}"
        ) from error
    if learner.weights_hash() != results["weights_sha256"]:
        raise ExportError(
            f"{checkpoint} does not hold the weights whose hash is in {folder.results}; it is damaged or of another run"
        )
    return learner


def _describe(
    run: Path, results: dict[str, Any], learner: NetworkLearner, classifier: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Card, without its files, and tensors of the last expert's classifier."""
    expert = str(learner.network.experts)
    if classifier is None:
        classifier, own = results["resolved"]["classifier"], results["resolved"]["expert"]
        if own != expert:
            raise ExportError(
                f"the run in {run} predicts by {classifier} of expert {own}; an export holds the last expert, {expert},"
                f" alone: choose its classifier with --classifier {' or '.join(CLASSIFIERS)}"
            )
    elif classifier not in CLASSIFIERS:
        raise ExportError(f"classifier is {classifier!r}{near_matches(classifier, list(CLASSIFIERS))}")
    head, tensors = _head(learner, classifier)
    weights = {
        f"backbone.{n}": t.contiguous() for n, t in learner.network.state_dict().items() if n.startswith(_STAGES)
    }
    counted = [p.numel() for name, p in learner.network.named_parameters() if name.startswith(_STAGES)]
    known = learner.class_means().known.tolist() if classifier == "ncm" else [True] * learner.classes
    config = results["config"]
    card = {
        "mose_fast_export": FORMAT,
        "head": head,
        "expert": expert,
        "width": config["width"],
        "image_size": results["image_size"],
        "normalisation": results["resolved"]["normalisation"],
        "class_order": results["class_order"],
        "class_names": results["class_names"],
        "known": known,
        "parameters": {
            "backbone": sum(counted),
            "head": 0 if head == "ncm" else sum(t.numel() for t in tensors.values()),
        },
        "bytes": {"backbone": _bytes(weights), "head": _bytes(tensors)},
        "accuracy": results["acc"][classifier][expert],
        "accuracy_by_task": results["accuracy"][classifier][expert][-1],
        "run": {
            **{name: config[name] for name in ("method", "preset", "memory", "seed")},
            "stream": Path(config["stream"]["name"]).name,
            **{name: results[name] for name in ("weights_sha256", "commit", "versions")},
        },
    }
    return card, weights | {f"head.{name}": tensor for name, tensor in tensors.items()}


def _head(learner: NetworkLearner, classifier: str) -> tuple[str, dict[str, Tensor]]:
    """Kind and tensors of the last expert's classifier."""
    if classifier == "ncm":
        means = learner.class_means()
        if not means.known.any():
            raise ExportError("the replay memory is empty, so no class has a mean; choose --classifier linear")
        return "ncm", {"means": means.means[-1].contiguous(), "known": means.known}
    module = getattr(learner.network, f"classifier{learner.network.experts}")
    kinds = {nn.Linear: "linear", CosineClassifier: "cosine"}
    if type(module) not in kinds:
        raise ExportError(
            f"the classifier of method {learner.config.method!r} is a {type(module).__name__}; wanted Linear or"
            " CosineClassifier, or --classifier ncm, which needs neither"
        )
    return kinds[type(module)], {name: tensor.contiguous() for name, tensor in module.state_dict().items()}


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


# Programs


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(
            f"format is 'onnx', but {error.name} is not installed. First: pip install 'mose-fast[onnx]'"
        ) from error


def _programs(classifier: Classifier, formats: Sequence[str]) -> dict[str, bytes]:
    """The files ``model.onnx`` and ``model.pt2``, for any number of images."""
    example = torch.zeros(2, *classifier.image_size, 3, dtype=torch.uint8)
    files = {}
    with warnings.catch_warnings():
        # Of PyTorch about itself; nobody who exports can act on them.
        warnings.simplefilter("ignore")
        program = torch.export.export(
            classifier.network, (example,), dynamic_shapes={"images": {0: torch.export.Dim("N")}}
        )
        if "torch" in formats:
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            files[MODELS["torch"]] = buffer.getvalue()
        if "onnx" in formats:
            score = "distances" if classifier.network.nearest else "logits"
            names = {"input_names": ["images"], "output_names": ["head_index", "label", score]}
            model = torch.onnx.export(program, dynamo=True, verbose=False, **names).model_proto
            files[MODELS["onnx"]] = model.SerializeToString()
    return files


# Files


def _check_free(folder: Path, overwrite: bool) -> None:
    try:
        names = {path.name for path in folder.iterdir()} - {LOCK}
    except FileNotFoundError:
        return
    except OSError as error:
        raise ExportError(f"cannot write the export into {folder}: {error.strerror}; choose another --out") from error
    card = _stored_card(folder)
    foreign = sorted(names & {CARD, *MODELS.values()}) if card is None else []
    if foreign:
        raise ExportError(
            f"the folder {folder} holds {', '.join(foreign)}, but no {CARD} of an export of mose-fast: these files are"
            " not an export's, and nothing was deleted. Choose another --out, or move them away"
        )
    if names and not overwrite and not (card and "unfinished" in card):
        raise ExportError(
            f"the folder {folder} is already used; choose another --out, or pass --overwrite to replace the export"
            " in it"
        )


def _write(folder: Path, files: dict[str, bytes], card: dict[str, Any], overwrite: bool) -> None:
    """Replaces the export in a folder.

    There is a card at every moment, so that the files are known to be an export's.
    """

    def text(values: dict[str, Any]) -> str:
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder, "export"):
            _check_free(folder, overwrite)
            write_atomically(folder / CARD, text({"mose_fast_export": FORMAT, "unfinished": True}))
            for name in MODELS.values():
                (folder / name).unlink(missing_ok=True)
            remove_leftovers(folder, map(re.escape, (CARD, *MODELS.values())))
            for name, content in files.items():
                write_atomically(folder / name, content)
            write_atomically(folder / CARD, text(card))
    except ExportError:
        raise
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ExportError(
            f"cannot write the export into {folder}: {reason}; free some space or choose another --out"
        ) from error
    except OSError as error:
        raise ExportError(f"cannot write the export into {folder}: {error.strerror}; choose another --out") from error


def _stored_card(folder: Path) -> dict[str, Any] | None:
    """The card in a folder, of whatever version; None where there is none, or one of something
    else.
    """
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return card if isinstance(card, dict) and type(card.get("mose_fast_export")) is int else None


def _read_card(folder: Path) -> dict[str, Any]:
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExportError(
            f"there is no export in {folder} (no {CARD}); make one with: mose-fast export RUN --out {folder}"
        ) from error
    except NotADirectoryError as error:
        raise ExportError(f"{folder} is a file; wanted the folder of an export") from error
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is truncated or no JSON ({error}); export the run again") from error
    found = card.get("mose_fast_export") if isinstance(card, dict) else None
    if type(found) is not int:
        raise ExportError(f"{path} is not the card of an export of mose-fast")
    if found > FORMAT:
        raise ExportError(
            f"{path} has format {found}; this version of mose-fast reads {FORMAT} and older: update mose-fast"
        )
    if "unfinished" in card:
        raise ExportError(
            f"the export in {folder} was broken off; make it again with: mose-fast export RUN --out {folder}"
        )
    return card


def _image_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
    )
    if not files:
        raise ExportError(f"the folder {path} holds no images ({', '.join(SUFFIXES)}); wanted at least one")
    return files


def _read_image(file: Path, image_size: tuple[int, ...]) -> np.ndarray:
    try:
        image = decode_image(file.read_bytes(), str(file))
    except OSError as error:
        raise ExportError(f"cannot read {file}: {error.strerror}") from error
    if image.shape[:2] != image_size:
        sizes = ["x".join(map(str, size)) for size in (image.shape[:2], image_size)]
        raise ExportError(f"{file} is {sizes[0]} (height x width); wanted {sizes[1]}, as in training: resize it first")
    return image
