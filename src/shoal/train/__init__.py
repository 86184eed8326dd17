"""train: the training job.

The door: the tables of its parts. ``run.train`` starts a run, ``worker`` is one rank,
``loop`` is the step.
"""

from shoal.core.parts import PartTable
from shoal.train.drafters import DRAFTERS
from shoal.train.peft import PEFTS

__all__ = ["DRAFTERS", "LAUNCHERS", "LR_SCHEDULES", "OPTIMIZERS", "PEFTS"]

OPTIMIZERS = PartTable(
    "optimizer",
    {
        "adamw": "shoal.train.optimizers.adamw:AdamW",
        "muon": "shoal.train.optimizers.muon:Muon",
        "lamb": "shoal.train.optimizers.lamb:Lamb",
    },
)

LR_SCHEDULES = PartTable(
    "lr_schedule",
    {
        "cosine": "shoal.train.lr_schedules.cosine:Cosine",
        "wsd": "shoal.train.lr_schedules.wsd:WarmupStableDecay",
    },
)

LAUNCHERS = PartTable(
    "launch",
    {
        "torchrun": "shoal.train.launchers.torchrun:Torchrun",
        "slurm": "shoal.train.launchers.slurm:Slurm",
        "kubernetes": "shoal.train.launchers.kubernetes:Kubernetes",
        "ray": "shoal.train.launchers.ray:Ray",
    },
)
