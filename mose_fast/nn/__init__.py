"""The network: backbone, alignment modules, attention gates, experts with their heads,
what classifies their features.
"""

from mose_fast.nn.alignment import AlignmentModule, AttentionGate, DownBlock
from mose_fast.nn.backbone import BasicBlock, Stem
from mose_fast.nn.class_means import ClassMeans
from mose_fast.nn.classifiers import MEAN_OF_EXPERTS, OF_FEATURES, Classifiers, classify, names_of_experts, with_mean
from mose_fast.nn.cosine import CosineClassifier
from mose_fast.nn.cost import Cost, count_cost
from mose_fast.nn.experts import BRANCH_POINTS, ExpertNetwork, ExpertOutputs, check_image_size

__all__ = [
    "BRANCH_POINTS",
    "MEAN_OF_EXPERTS",
    "OF_FEATURES",
    "AlignmentModule",
    "AttentionGate",
    "BasicBlock",
    "ClassMeans",
    "Classifiers",
    "CosineClassifier",
    "Cost",
    "DownBlock",
    "ExpertNetwork",
    "ExpertOutputs",
    "Stem",
    "check_image_size",
    "classify",
    "count_cost",
    "names_of_experts",
    "with_mean",
]
