"""Writing an export: from the folder of a finished run to the card and the models."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
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
from mose_fast.nn import OF_FEATURES, CosineClassifier, ExpertNetwork
from mose_fast.nn.classifiers import AVERAGED
from mose_fast.nn.corrected import CorrectedLinear
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.runs.files import LOCK, RunError, RunFolder, leftovers, remove_leftovers, write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import read_run
from mose_fast.settings.run import ConfigError, RunConfig, near_matches

# Names of the files of an export, as regular expressions.
_OWN_FILES = tuple(map(re.escape, (CARD, *MODELS.values())))

_STAGES = ("stem.", "stage1.", "stage2.", "stage3.", "stage4.")


def export_run(
    run: str | Path,
    out: str | Path | None = None,
    *,
    formats: Iterable[str] = ("safetensors",),
    classifier: str | None = None,
    expert: str | int | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the deployable classifier of a finished run. The data set is not needed.

    Args:
        out: Folder for the card and the models, which is returned; None: ``export`` in the run's.
        formats: Keys of :data:`MODELS`: ``safetensors`` (which :meth:`Classifier.load` reads),
            ``onnx``, ``torch`` (torch.export).
        classifier: Any but ``residual``; None: the run's own.
        expert: ``last``, ``mean`` or ``all``; None: ``last`` if a classifier is given, else the
            run's own.
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
    card, tensors = _describe(run, results, learner, classifier, expert)
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
    run: Path, results: dict[str, Any], learner: Learner, classifier: str | None, expert: str | int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The card, without its files, and the tensors of the classifier."""
    if classifier is not None and expert is None:
        expert = "last"
    try:
        classifier, expert = learner.resolve_expert(classifier, expert)
    except ValueError as error:
        raise ExportError(str(error)) from error
    network = copy.deepcopy(learner.network)
    network.load_state_dict(learner.model.predicting())
    last = str(network.experts)
    if classifier == "residual" or (expert.isdigit() and expert != last):
        raise ExportError(
            f"the run in {run} predicts by {classifier} of expert {expert}; an export holds neither stored samples,"
            f" which residual needs, nor inner experts by themselves: choose with --classifier and --expert"
        )
    head, tensors = _head(learner, network, classifier, expert)
    branches = None if expert == last else {"experts": network.experts, "attention": hasattr(network, "gate1")}
    stages = _STAGES if branches is None else (*_STAGES, "gate", "align")
    weights = {n: t.contiguous() for n, t in network.state_dict().items() if n.startswith(stages)}
    counted = [p.numel() for name, p in network.named_parameters() if name.startswith(stages)]
    in_head = 0 if head == "ncm" else sum(t.numel() for t in tensors.values())
    known = [True] * learner.classes if classifier == "linear" else learner.classifiers().known.tolist()
    config = results["config"]
    measured = expert in results["acc"].get(classifier, {})
    card = {
        "mose_fast_export": FORMAT,
        "head": head,
        "expert": expert,
        "branches": branches,
        "test_mirror": learner.config.options.test_mirror,
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
        "accuracy": results["acc"][classifier][expert] if measured else None,
        "accuracy_by_task": results["accuracy"][classifier][expert][-1] if measured else None,
        "run": {
            **{name: config[name] for name in ("method", "preset", "memory", "seed")},
            "stream": Path(config["stream"]["name"]).name,
            **{name: results[name] for name in ("weights_sha256", "commit", "versions")},
        },
    }
    return card, {f"backbone.{n}": t for n, t in weights.items()} | {f"head.{n}": t for n, t in tensors.items()}


def _head(learner: Learner, network: ExpertNetwork, classifier: str, expert: str) -> tuple[str, dict[str, Tensor]]:
    """The kind and the tensors of a head that reads the last expert's feature or those of all, of a
    network with the weights that predict.
    """
    if classifier != "linear" and not learner.memory.filled:
        raise ExportError("the replay memory is empty, so no class has a mean; choose --classifier linear")
    if classifier in AVERAGED:
        parts = [_head(learner, network, part, expert) for part in AVERAGED[classifier]]
        if tuple(kind for kind, _ in parts) != AVERAGED[classifier]:
            raise ExportError(f"a {parts[1][0]} head cannot be averaged with class means; wanted a linear one")
        named = zip(("first", "second"), parts, strict=True)
        tensors = {f"{place}.{name}": t for place, (_, part) in named for name, t in part.items()}
        return classifier, tensors | {"known": learner.classifiers().known.clone()}
    if classifier in OF_FEATURES:
        fitted = learner.classifiers().fitted(classifier, joined=expert == "all")
        if classifier == "ncm":
            return "ncm", {"means": _beside(fitted.means, expert), "known": fitted.known}
        bias = fitted.bias.mean(0) if expert.startswith("mean") else fitted.bias[-1]
        return classifier, {"weight": _beside(fitted.weight, expert), "bias": bias.contiguous()}
    modules = [getattr(network, f"classifier{e + 1}") for e in range(network.experts)]
    modules = [m.merged() if isinstance(m, CorrectedLinear) else m for m in modules]
    if all(type(m) is nn.Linear for m in modules):
        chosen = slice(-1, None) if expert.isdigit() else slice(None)
        weight = torch.cat([m.weight for m in modules[chosen]], 1).detach() / len(modules[chosen])
        biases = torch.stack([m.bias for m in modules]).detach()
        if classifier == "adjusted":
            fitted = learner.classifiers()
            biases = (biases - fitted.log_prior()).masked_fill(~fitted.known, -torch.inf).float()
        return classifier, {"weight": weight, "bias": biases[chosen].mean(0)}
    kind = type(modules[-1])
    if kind is not CosineClassifier or classifier == "adjusted" or learner.config.options.test_mirror:
        raise ExportError(
            f"the classifier of method {learner.config.method!r} is a {kind.__name__}; wanted Linear, or for linear"
            " without test_mirror CosineClassifier, or --classifier ncm, which needs neither"
        )
    tensors = {name: tensor.contiguous() for name, tensor in modules[-1].state_dict().items()}
    return "scaled_cosine" if modules[-1].learned_scale else "cosine", tensors


def _beside(of_experts: Tensor, expert: str) -> Tensor:
    """What is multiplied with normalised features, [K, E * D], of [E, K, D]: the last expert's; all
    of them for the mean of experts, of which the head divides once more by sqrt(E), when it
    normalises all features.
    """
    if not expert.startswith("mean"):
        return of_experts[-1].contiguous()
    return of_experts.transpose(0, 1).flatten(1) / math.sqrt(len(of_experts))


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
