"""ir: the values and protocols that all rooms exchange. Torch-free."""

from shoal.ir.estimate import Estimate, Interval
from shoal.ir.job import CheckpointPolicy, Evaluation, Parallel, TrainJob
from shoal.ir.machine import Device, Link, Machine, Measurement, MemoryTier
from shoal.ir.plan import Plan, Report, Work
from shoal.ir.protocols import Part
from shoal.ir.shape import ModelShape

__all__ = [
    "CheckpointPolicy",
    "Device",
    "Estimate",
    "Evaluation",
    "Interval",
    "Link",
    "Machine",
    "Measurement",
    "MemoryTier",
    "ModelShape",
    "Parallel",
    "Part",
    "Plan",
    "Report",
    "TrainJob",
    "Work",
]
