"""The network: backbone, alignment modules, attention gates, experts with their heads,
nearest-class-mean classifier.
"""

from mose_fast.nn.alignment import AlignmentModule, AttentionGate, DownBlock
from mose_fast.nn.backbone import BasicBlock, Stem
from mose_fast.nn.class_means import CLASSIFIERS, MEAN_OF_EXPERTS, ClassMeans, classify
from mose_fast.nn.cosine import CosineClassifier
from mose_fast.nn.cost import Cost, count_cost
from mose_fast.nn.experts import BRANCH_POINTS, ExpertNetwork, ExpertOutputs, check_image_size

__all__ = [
    "BRANCH_POINTS",
    "CLASSIFIERS",
    "MEAN_OF_EXPERTS",
    "AlignmentModule",
    "AttentionGate",
    "BasicBlock",
    "ClassMeans",
    "CosineClassifier",
    "Cost",
    "DownBlock",
    "ExpertNetwork",
    "ExpertOutputs",
    "Stem",
    "check_image_size",
    "classify",
    "count_cost",
]
