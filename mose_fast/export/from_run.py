"""Writing an export: from the folder of a finished run to the card and the models."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mose_fast.export.card import CARD, FORMAT, MODELS, USUAL, ExportError, stored_card
from mose_fast.export.classifier import Classifier
from mose_fast.learner.registry import method_changes, method_files
from mose_fast.methods import Learner, create_learner
from mose_fast.nn import CosineClassifier
from mose_fast.nn.corrected import CorrectedLinear
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.runs.files import LOCK, RunError, RunFolder, leftovers, remove_leftovers, write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import read_run
from mose_fast.settings.run import STANDARD, ConfigError, RunConfig, near_matches

# Names of the files of an export, as regular expressions.
_OWN_FILES = tuple(map(re.escape, (CARD, *MODELS.values())))

_STAGES = ("stem.", "stage1.", "stage2.", "stage3.", "stage4.")


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
        out: Folder for the card and the models, which is returned; None: ``export`` in the run's.
        formats: Keys of :data:`MODELS`: ``safetensors`` (which :meth:`Classifier.load` reads),
            ``onnx``, ``torch`` (torch.export).
        classifier: ``ncm`` or ``linear`` of the last expert; None: the run's own, which must be one
            of the two.
        overwrite: Replace an earlier export in ``out``; other files stay. An interrupted export is
            always replaced.

    Raises:
        ExportError: The run is unfinished, damaged or has no such classifier, ``onnx`` is not
            installed, or ``out`` is in use or holds foreign files with an export's names.
        RunError: The run's files contradict each other or cannot be read.
    """
    formats = tuple(dict.fromkeys(formats))
    for name in formats:
        if name not in MODELS:
            raise ExportError(f"format is {name!r}{near_matches(name, list(MODELS))}")
    if not formats:
        raise ExportError(f"no format is given; wanted some of {', '.join(MODELS)}")
    if "onnx" in formats:
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ExportError(
                f"format is 'onnx', but {error.name} is not installed. First: pip install 'mose-fast[onnx]'"
            ) from error
    run = Path(run)
    folder = run / USUAL if out is None else Path(out)
    _check_free(folder, overwrite)
    _, results = read_run(run)
    learner = restore(run, results)
    if type(learner).outputs is not Learner.outputs or type(learner).predict is not Learner.predict:
        raise ExportError(
            f"method {learner.config.method!r} predicts by outputs() or predict() of its own; wanted those of every"
            " learner, since an export holds one backbone and one head"
        )
    card, tensors = _describe(run, results, learner, classifier)
    exported = Classifier(card, tensors)
    files = {}
    if "safetensors" in formats:
        files[MODELS["safetensors"]] = save(tensors, {"mose_fast_export": str(FORMAT)})
    if {"onnx", "torch"} & set(formats):
        files |= _programs(exported, formats)
    card["files"] = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in files.items()
    }
    _write(folder, files, card, overwrite)
    return folder


def restore(run: Path, results: dict[str, Any]) -> Learner:
    """The run's learner after its last batch, on the CPU."""
    resolved = results["resolved"]
    # The run's precision, since auto may choose another one here; step and feed, since the run's
    # may need a card.
    here = {"device": "cpu", "precision": results["resolved"]["precision"], "step": "auto", "feed": "auto"}
    config = RunConfig.from_dict({**results["config"], **here})
    constants = {name: resolved["normalisation"][name] for name in ("mean", "std")}
    size = tuple(results["image_size"])
    try:
        learner = create_learner(
            config, classes=results["classes"], image_size=size, mirror_safe=resolved["mirror"], **constants
        )
    except ConfigError as error:
        raise ExportError(f"the run in {run} cannot be restored: {error}") from error
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
    if edited := method_changes(results["method_files"], method_files(type(learner))):
        warnings.warn(
            f"the method of the run in {run} has changed since ({edited}); the export has the run's weights and the"
            " method's present code",
            stacklevel=3,
        )
    return learner


def _describe(
    run: Path, results: dict[str, Any], learner: Learner, classifier: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The card, without its files, and the tensors of the last expert's classifier."""
    expert = str(learner.network.experts)
    if classifier is None:
        classifier, own = results["resolved"]["classifier"], results["resolved"]["expert"]
        if own != expert:
            raise ExportError(
                f"the run in {run} predicts by {classifier} of expert {own}; an export holds the last expert, {expert},"
                f" alone: choose its classifier with --classifier {' or '.join(STANDARD)}"
            )
    elif classifier not in STANDARD:
        raise ExportError(f"classifier is {classifier!r}{near_matches(classifier, list(STANDARD))}")
    head, tensors = _head(learner, classifier)
    weights = {n: t.contiguous() for n, t in learner.network.state_dict().items() if n.startswith(_STAGES)}
    counted = [p.numel() for name, p in learner.network.named_parameters() if name.startswith(_STAGES)]
    in_head = 0 if head == "ncm" else sum(t.numel() for t in tensors.values())
    known = learner.class_means().known.tolist() if classifier == "ncm" else [True] * learner.classes
    config = results["config"]
    card = {
        "mose_fast_export": FORMAT,
        "head": head,
        "expert": expert,
        "width": config["width"],
        "image_size": results["image_size"],
        "resize": config["stream"].get("resize"),
        "normalisation": results["resolved"]["normalisation"],
        "class_order": results["class_order"],
        "class_names": results["class_names"],
        "known": known,
        "parameters": {"backbone": sum(counted), "head": in_head},
        "bytes": {"backbone": sum(t.nbytes for t in weights.values()), "head": sum(t.nbytes for t in tensors.values())},
        "evaluated_on": config.get("evaluate_on", "test"),
        "accuracy": results["acc"][classifier][expert],
        "accuracy_by_task": results["accuracy"][classifier][expert][-1],
        "run": {
            **{name: config[name] for name in ("method", "preset", "memory", "seed")},
            "stream": Path(config["stream"]["name"]).name,
            **{name: results[name] for name in ("weights_sha256", "commit", "versions")},
        },
    }
    return card, {f"backbone.{n}": t for n, t in weights.items()} | {f"head.{n}": t for n, t in tensors.items()}


def _head(learner: Learner, classifier: str) -> tuple[str, dict[str, Tensor]]:
    """The kind and the tensors of the last expert's head."""
    if classifier == "ncm":
        means = learner.class_means()
        if not means.known.any():
            raise ExportError("the replay memory is empty, so no class has a mean; choose --classifier linear")
        return "ncm", {"means": means.means[-1].contiguous(), "known": means.known}
    module = getattr(learner.network, f"classifier{learner.network.experts}")
    module = module.merged() if isinstance(module, CorrectedLinear) else module
    kinds = {nn.Linear: "linear", CosineClassifier: "cosine"}
    if type(module) not in kinds:
        raise ExportError(
            f"the classifier of method {learner.config.method!r} is a {type(module).__name__}; wanted Linear or"
            " CosineClassifier, or --classifier ncm, which needs neither"
        )
    kind = "scaled_cosine" if getattr(module, "learned_scale", False) else kinds[type(module)]
    return kind, {name: tensor.contiguous() for name, tensor in module.state_dict().items()}


def _programs(classifier: Classifier, formats: Sequence[str]) -> dict[str, bytes]:
    """The files ``model.onnx`` and ``model.pt2``, for any number of images."""
    example = torch.zeros(2, *classifier.image_size, 3, dtype=torch.uint8)
    files = {}
    with warnings.catch_warnings():
        # PyTorch's warnings about its own code.
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


def _check_free(folder: Path, overwrite: bool) -> None:
    try:
        names = {path.name for path in folder.iterdir()} - {LOCK}
        # What a killed export was writing does not make the folder a used one.
        names -= {path.name for path in leftovers(folder, _OWN_FILES)}
    except FileNotFoundError:
        return
    except OSError as error:
        raise ExportError(f"cannot write the export into {folder}: {error.strerror}; choose another --out") from error
    card = stored_card(folder)
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
    """Replaces the export in a folder, which holds a card at every moment, so that its files can be
    recognised as an export's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder, "export"):
            _check_free(folder, overwrite)
            unfinished = {"mose_fast_export": FORMAT, "unfinished": True}
            write_atomically(folder / CARD, json.dumps(unfinished, indent=1) + "\n")
            for name in MODELS.values():
                (folder / name).unlink(missing_ok=True)
            remove_leftovers(folder, _OWN_FILES)
            for name, content in files.items():
                write_atomically(folder / name, content)
            write_atomically(folder / CARD, json.dumps(card, indent=1, allow_nan=False) + "\n")
    except ExportError:
        raise
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ExportError(
            f"cannot write the export into {folder}: {reason}; free some space or choose another --out"
        ) from error
    except OSError as error:
        raise ExportError(f"cannot write the export into {folder}: {error.strerror}; choose another --out") from error
