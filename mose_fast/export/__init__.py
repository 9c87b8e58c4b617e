"""Export of the deployable part of a run: backbone and class means (paper section 5.1)."""

from mose_fast.export.classifier import CARD, FORMAT, MODELS, Classifier, DeployedNetwork, ExportError, Predictions
from mose_fast.export.predict import classify_files
from mose_fast.export.run import export_run

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
