"""What ``shoal bench tune`` measures with, and how what it found is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ServeError, UnknownKeyError, nearest, require

if TYPE_CHECKING:
    from shoal.ir import Arrival, ServeJob
    from shoal.plan.tune.protocols import Setting, Space, Study
    from shoal.serve.bench.tune import MeasureProcess

__all__ = ["ENGINES", "UNITS", "engine_of", "knob_of", "show", "summary"]

ENGINES = ("shoal", "transformers")
UNITS = {"throughput": "tokens/s", "latency": "1/s", "ttft": "1/s"}

# Requests of a workload that is made up.
_REQUESTS = 32

_Load = Callable[[int | None], "tuple[MeasureProcess, Sequence[Arrival]]"]


def knob_of(word: str) -> tuple[str, tuple[Setting, ...]]:
    """A knob and its values, as ``--knob`` has them.

    Raises:
        ConfigError: it is not ``knob=value[,value...]``.
    """
    name, separator, text = word.partition("=")
    values = [value.strip() for value in text.split(",")]
    require(
        bool(separator and name and all(values)),
        "--knob",
        word,
        expected="knob=value[,value...], such as max_running=4,8",
    )
    named: dict[str, Setting] = {"true": True, "false": False}
    return name, tuple(
        int(value) if value.isdigit() else named.get(value.lower(), value) for value in values
    )


def engine_of(
    engine: str, job: ServeJob, given: Mapping[str, Sequence[Setting]]
) -> tuple[Space, _Load]:
    """The knobs of an engine, and what loads it and its workload.

    Args:
        engine: one of :data:`ENGINES`.
        job: model and workload, and what the knobs do not say.
        given: values of knobs.

    Raises:
        ConfigError: an engine or a knob that there is not.
    """
    from shoal.plan.serving.plans import arrivals_of
    from shoal.plan.tune.serving import serving_space

    require(engine in ENGINES, "--engine", engine, expected=f"one of {', '.join(ENGINES)}")

    def count(requests: int | None) -> int | None:
        return requests or (None if job.workload.name == "trace" else _REQUESTS)

    if engine == "shoal":

        def of_shoal(requests: int | None) -> tuple[MeasureProcess, Sequence[Arrival]]:
            from shoal.serve.bench.replay import weights_of
            from shoal.serve.bench.tune import MeasureProcess, ShoalRunner

            model, _ = weights_of(job)
            workload = arrivals_of(job, model.config.shape(), count=count(requests))
            return MeasureProcess(make=ShoalRunner, arguments={"job": job}), workload

        return serving_space(given), of_shoal

    from shoal.claims.bench.serving.generate import PADDINGS, GenerateRunner, generate_space

    known = ("batch", "padding")
    for name in given:
        if name not in known:
            raise UnknownKeyError(
                f"tune.{name}: no such knob of transformers; expected one of {', '.join(known)}; "
                + nearest(name, known)
            )
    values = {"paddings": given.get("padding", PADDINGS)}
    if "batch" in given:
        values["batches"] = given["batch"]

    def of_transformers(requests: int | None) -> tuple[MeasureProcess, Sequence[Arrival]]:
        from shoal.model import huggingface
        from shoal.serve.bench.tune import MeasureProcess

        if not Path(job.model, "config.json").is_file():
            raise ServeError(f"model = {job.model!r}: transformers needs a Hugging Face directory")
        shape = huggingface.read_config(Path(job.model)).shape()
        given = {"directory": job.model, "threads": job.threads}
        runner = MeasureProcess(make=GenerateRunner.load, arguments=given)
        return runner, arrivals_of(job, shape, count=count(requests))

    return generate_space(**values), of_transformers


def summary(study: Study) -> dict[str, Any]:
    """What was found, for other programs."""
    from shoal.plan.tune.landscape import Landscape

    land = Landscape.of(study)
    return {
        "best": study.best.model_dump(mode="json"),
        "configurations": study.space.size,
        "best_over_worst": land.ratio,
        "noise": land.noise[0] if land.noise[1] else None,
        "peaks": land.peaks(),
        "turns": [
            {"knob": turn.axis, "config": turn.config, "peak": turn.peak} for turn in land.turns()
        ],
        "trials": [trial.model_dump(mode="json", exclude_none=True) for trial in study.trials],
    }


def show(study: Study, unit: str) -> None:
    """Print tables."""
    from shoal.app.show import console, table
    from shoal.plan.tune.landscape_page import tables

    best = study.best
    for one in tables(study, unit):
        if one.rows:
            table(one.title, one.columns, one.rows[:8])
    failed = len(study.trials) - len(study.feasible)
    spelt = ", ".join(f"{name}={value}" for name, value in best.config.items())
    console().print(
        f"{len(study.trials)} of {study.space.size} configurations tried, {failed} failed; "
        f"the best reaches {best.value:.4g} {unit}: {spelt}"
    )
