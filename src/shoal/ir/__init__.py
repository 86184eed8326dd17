"""ir: the values and protocols that all rooms exchange. Torch-free."""

from shoal.ir.estimate import Estimate, Interval
from shoal.ir.job import (
    CheckpointPolicy,
    Evaluation,
    LayerGroup,
    Parallel,
    Replan,
    ServeJob,
    TrainJob,
)
from shoal.ir.layout import Layout
from shoal.ir.machine import Device, Fabric, Link, Machine, Measurement, MemoryTier
from shoal.ir.plan import Plan, Report, ServePlan, ServeReport, Work
from shoal.ir.protocols import Part
from shoal.ir.schedule import Event, LinkModel, Op, OpCosts, Schedule, SchedulePart
from shoal.ir.serving import (
    Arrival,
    Chunk,
    Copy,
    KVManager,
    KVPart,
    Limits,
    Output,
    Request,
    Runner,
    SamplingParams,
    Scheduler,
    SchedulerPart,
    Step,
    StepCost,
    StepResult,
    TokenInfo,
    Transfer,
)
from shoal.ir.shape import ModelShape
from shoal.ir.watch import WatchPolicy

__all__ = [
    "Arrival",
    "CheckpointPolicy",
    "Chunk",
    "Copy",
    "Device",
    "Estimate",
    "Evaluation",
    "Event",
    "Fabric",
    "Interval",
    "KVManager",
    "KVPart",
    "LayerGroup",
    "Layout",
    "Limits",
    "Link",
    "LinkModel",
    "Machine",
    "Measurement",
    "MemoryTier",
    "ModelShape",
    "Op",
    "OpCosts",
    "Output",
    "Parallel",
    "Part",
    "Plan",
    "Replan",
    "Report",
    "Request",
    "Runner",
    "SamplingParams",
    "Schedule",
    "SchedulePart",
    "Scheduler",
    "SchedulerPart",
    "ServeJob",
    "ServePlan",
    "ServeReport",
    "Step",
    "StepCost",
    "StepResult",
    "TokenInfo",
    "TrainJob",
    "Transfer",
    "WatchPolicy",
    "Work",
]
