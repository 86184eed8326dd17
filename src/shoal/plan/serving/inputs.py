"""Inputs of a serving plan: the numbers' precision, the longest request, what arrives."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.errors import PlanError, require
from shoal.core.files import expanded
from shoal.core.parts import table
from shoal.cost.configs import dtype_of, read_config
from shoal.cost.shapes import resolve
from shoal.ir import Arrival, ModelShape, Prompt, ServeJob
from shoal.plan.serving.memory import slot_length


def precision_of(job: ServeJob) -> str:
    """fp32 or bf16: the job's own, or that of the model's files, or that of its kind.

    A shipped shape has no files: models of the zoo are saved in fp32, the others in bf16.

    Raises:
        ModelError: the model is none of those that can be named.
    """
    if job.precision != "auto":
        return job.precision
    path = expanded(job.model)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        resolve(job.model)  # complains about a file that is no configuration
        return "fp32" if dtype_of(read_config(config)) == "float32" else "bf16"
    return "fp32" if resolve(job.model).family in ("Shoal", "mdlm") else "bf16"


def arrivals_of(job: ServeJob, shape: ModelShape, *, count: int | None = None) -> list[Arrival]:
    """The job's workload for a model of this shape.

    Raises:
        DataError: a trace that cannot be read.
        ConfigError: a workload that does not go with the model.
    """
    arrivals: list[Arrival] = (
        table("workload")
        .build(job.workload, where="workload")
        .arrivals(
            count=count,
            vocab_size=shape.vocab_size,
            max_position=positions(job, shape),
            seed=job.seed,
        )
    )
    return [replace(one, prompt=Prompt(one.prompt)) for one in arrivals]


def positions(job: ServeJob, shape: ModelShape) -> int:
    """Most tokens of one request.

    Raises:
        PlanError: more than the model was made for.
    """
    wanted = job.max_position or int(min(shape.max_position, slot_length(job)))
    require(
        2 <= wanted <= shape.max_position,
        "max_position",
        wanted,
        expected=f"2 to {shape.max_position}, the longest that {shape.name} was made for",
        error=PlanError,
    )
    return wanted
