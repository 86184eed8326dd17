"""Where blocks may have degrees and a sharding of their own; asked by planners and before a run."""

from __future__ import annotations

from shoal.core.traits import traits
from shoal.ir import ModelShape, TrainJob
from shoal.ir.architecture import Architecture
from shoal.plan.composition import excluded_by

_ORDER = "pp-dp-cp-tp"


def layers_alike(job: TrainJob, shape: ModelShape) -> str:
    """Why the runtime runs all blocks of a job in one layout; empty if it need not.

    Args:
        job: with or without groups of blocks; those that it has are looked at too.
        shape: the model's.
    """
    p = job.parallel
    plain = job.architecture == Architecture() and shape.architecture == Architecture()
    wanted: dict[str, tuple[object, object]] = {
        "parallel.order": (p.order, _ORDER),
        "parallel.cp": (p.cp, 1),
        "parallel.sp": (p.sp, False),
        "parallel.overlap": (p.overlap, "none"),
        "architecture": (plain, True),
        "model": (shape.num_experts > 0, False),
        "family": (shape.family == "mdlm", False),
    }
    words = {"architecture": "a plain transformer", "model": "one without experts"}
    words["family"] = "a model whose tokens see those before"
    for number, group in enumerate(job.layers):
        wanted[f"layers.{number}.cp"] = (group.cp or p.cp, 1)
        shard = (group.shard or job.shard).name
        levels = traits("shard", shard) & {"levels", "copies_weights"}
        name = f"layers.{number}.shard"
        wanted[name] = (shard if levels else "", "")
        words[name] = "replicated, zero1, zero2 or zero3"
    for option, (given, legal) in wanted.items():
        if given != legal:
            what = shape.name if option in ("architecture", "model", "family") else given
            return f"{option} = {what}: expected {words.get(option, legal)}"
    excluded = excluded_by(job, "layers_apart")
    return f"{excluded}: expected none" if excluded else ""
