"""What the runtime of training does not do yet for models that differ from their family's.

Torch-free, as :mod:`shoal.parallel.legal`. What is not refused here runs, and equals one process.
"""

from __future__ import annotations

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.ir import ModelShape, TrainJob
from shoal.ir.routing import Routing


def check_architecture(job: TrainJob, shape: ModelShape) -> None:
    """Refuse a job whose split or memory saving cannot honour the model's architecture.

    Raises:
        PlanError: names the architecture and the option.
    """
    name = shape.architecture.name
    p = job.parallel
    shard = table("shard").build(job.shard)
    _check_routing(job, shape)
    if not name or name in table("gate"):
        return
    refused: dict[str, tuple[object, object]] = {
        "parallel.pp": (p.pp, 1),
        "parallel.cp": (p.cp, 1),
        "parallel.sp": (p.sp, False),
        "parallel.overlap": (p.overlap, "none"),
        "shard": (job.shard.name if "weights" in shard.divides else None, None),
        "offload": (job.offload, None),
        "activation": (job.activation.name, "keep"),
        "compile": (job.compile, False),
    }
    if name != "ladder":
        refused["dropout"] = (job.dropout, 0.0)
    ranks = shape.architecture.residual.apart
    if name != "ladder" and not (p.tp == ranks or p.tp == 1):
        refused["parallel.tp"] = (p.tp, 1 if ranks == 1 else f"1 or {ranks}")
    for option, (given, wanted) in refused.items():
        if given != wanted:
            raise PlanError(
                f"{option} = {given}: a model with architecture {name} is not trained so in this "
                f"version; expected {'none' if wanted is None else wanted}"
            )


def _check_routing(job: TrainJob, shape: ModelShape) -> None:
    """Refuse routers whose state or balance this job would not keep as one process does."""
    moe = shape.architecture.moe
    gate = table("gate").build(moe.gate)
    if moe == Routing():
        return
    shard = table("shard").build(job.shard)
    refused: dict[str, tuple[object, object]] = {
        "offload": (job.offload, None),
        "compile": (job.compile, False),
        "finetune": (job.finetune, None),
    }
    if gate.kept:
        refused["shard"] = (job.shard.name if "gradients" in shard.divides else None, None)
        refused["sync"] = (job.sync.name, "every_step")
    for option, (given, wanted) in refused.items():
        if given != wanted:
            raise PlanError(
                f"{option} = {given}: experts with architecture.moe of gate {moe.gate.name} are "
                f"not trained so in this version; expected {'none' if wanted is None else wanted}"
            )
