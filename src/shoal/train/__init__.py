"""train: the training job.

The tables of its parts, and that of the probes, of which one trains. ``run.train``
starts a run, ``worker`` is one rank, ``loop`` is the step.
"""

from shoal.core.parts import PartTable
from shoal.train.drafters import DRAFTERS
from shoal.train.peft import PEFTS

__all__ = ["DRAFTERS", "LAUNCHERS", "LR_SCHEDULES", "OPTIMIZERS", "PEFTS", "PROBES"]

OPTIMIZERS = PartTable(
    "optimizer",
    {
        "adamw": "shoal.train.optimizers.adamw:AdamW",
        "muon": "shoal.train.optimizers.muon:Muon",
        "lamb": "shoal.train.optimizers.lamb:Lamb",
    },
    about="The update rule. Chosen by the key `optimizer` of a job.",
    protocol="shoal.train.protocols:Optimizer",
)

LR_SCHEDULES = PartTable(
    "lr_schedule",
    {
        "cosine": "shoal.train.lr_schedules.cosine:Cosine",
        "wsd": "shoal.train.lr_schedules.wsd:WarmupStableDecay",
    },
    about="The learning-rate schedule. Chosen by the key `lr_schedule` of a job.",
    protocol="shoal.train.protocols:LrSchedule",
)

LAUNCHERS = PartTable(
    "launch",
    {
        "torchrun": "shoal.train.launchers.torchrun:Torchrun",
        "slurm": "shoal.train.launchers.slurm:Slurm",
        "kubernetes": "shoal.train.launchers.kubernetes:Kubernetes",
        "ray": "shoal.train.launchers.ray:Ray",
    },
    about="Launch files that start a plan on other machines. Chosen by `shoal train --launch`.",
    protocol="shoal.train.protocols:Launcher",
)

# In the order in which they run: what needs a quiet machine most comes first.
PROBES = PartTable(
    "probe",
    {
        "units": "shoal.machine.probes.units:Units",
        "memory_latency": "shoal.machine.probes.memory_latency:MemoryLatency",
        "memory_bandwidth": "shoal.machine.probes.memory_bandwidth:MemoryBandwidth",
        "matmul": "shoal.machine.probes.matmul:Matmul",
        "framework": "shoal.machine.probes.framework:Framework",
        "collective": "shoal.parallel.comm.measure:CollectiveProbe",
        "steps": "shoal.train.rehearse:StepsProbe",
        "kernels": "shoal.kernel.rehearse:KernelsProbe",
        "gpu": "shoal.machine.probes.gpu:GpuProbe",
        "loopback": "shoal.machine.probes.loopback:Loopback",
        "system": "shoal.machine.probes.system:SystemProbe",
        "gemm": "shoal.machine.probes.gemm:Gemm",
    },
    about="One microbenchmark of this machine. `shoal probe` runs all of them.",
    protocol="shoal.machine.protocols:Probe",
)
