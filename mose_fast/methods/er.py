"""ER: Experience Replay (Chaudhry et al., 2019; docs/specification/baselines.md section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from mose_fast.learner.about import Preset, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import REPLAY_LOSSES, BaselineOptions, ReplayLearner
from mose_fast.settings.run import BeyondOptions


@dataclass(frozen=True)
class ErOptions(BaselineOptions, BeyondOptions):
    replay_loss: str = knob(
        "two_means",
        "how incoming and replayed rows are weighted against each other",
        "two_means: repositories of MIR and RaptorMai, MOSE repository until 2024; one_mean: ER, eq. 3, MOSE"
        " repository since, mammoth, Avalanche, CapyMOA",
        choices=REPLAY_LOSSES,
    )


@method(
    "er",
    options=ErOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "optimass/Maximally_Interfered_Retrieval @ 35eda78, rand_replay: passes separate, replay_from others,"
            " replay_loss two_means",
            passes="separate",
            replay_from="others",
        ),
        "official": official_preset(
            "optimass/Maximally_Interfered_Retrieval @ 35eda78, rand_replay: its defaults",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=10,
            augment="none",
            init="default",
            passes="separate",
            replay_from="others",
        ),
        "mkd": Preset(
            "Nicolas1203/mkd_ocl @ 8796e3d, ER with one teacher; left out: its factor 1 / (1 - a^n) of the weights,"
            " within 1 % of 1, and fp16",
            {
                "lr": 5e-4,
                "weight_decay": 0.0,
                "augment": "scr",
                "init": "default",
                "replay_loss": "one_mean",
                "teacher": "momentum",
                "teacher_start": "scaled",
                "teacher_raw": True,
                "predict_with": "mean",
            },
        ),
    },
    year=2019,
    reference="Experience Replay, Chaudhry et al., arXiv 1902.10486",
    cost=1.0,
)
class Er(ReplayLearner):
    """ER: cross-entropy on the incoming batch and on rows drawn uniformly from a reservoir."""
