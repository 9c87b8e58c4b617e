"""Export of the deployable part of a run: backbone and class means (paper section 5.1)."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast.export.card import CARD, FORMAT, MODELS, ExportError

if TYPE_CHECKING:
    from mose_fast.export.classifier import Classifier, DeployedNetwork, Predictions
    from mose_fast.export.from_run import export_run
    from mose_fast.export.predict import classify_files

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

# These need torch; the refusal of a folder without an export does not.
__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("Classifier", "DeployedNetwork", "Predictions"), "mose_fast.export.classifier")
    | {"classify_files": "mose_fast.export.predict", "export_run": "mose_fast.export.from_run"},
)
