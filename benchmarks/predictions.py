"""How good predictions are on this machine: many plans, priced from a probe alone, then run.

Usage: python benchmarks/predictions.py [--steps N] [--only JOB ...]

Three jobs, each under several plans on one to four ranks, the planner's own choice among them.
The machine is probed first (``shoal probe --full``), and all predictions are on disk before the
first run. Then every plan is trained for some steps, twice.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import scipy.stats
from common import RESULTS, Row, record, require_quiet

from shoal.core.errors import PlanError
from shoal.core.files import write_atomic, write_json
from shoal.core.svg import Chart, Series
from shoal.ir import TrainJob, TrainPlan
from shoal.machine.probing import probe, saved_path
from shoal.train.run import execute, plan_job

TABLE = RESULTS.parent / "predictions.json"
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "predictions.svg"

ROUNDS = 2
# What is asked; nothing of how.
JOBS: dict[str, dict[str, Any]] = {
    "4m": {"model": "shoal-4m", "seq_len": 128, "global_batch": 16, "precision": "fp32"},
    "4m long": {"model": "shoal-4m", "seq_len": 512, "global_batch": 8, "precision": "bf16"},
    "16m": {"model": "shoal-16m", "seq_len": 256, "global_batch": 8, "precision": "fp32"},
}
# How; the planner's own choice is added to each job's, or is one of these.
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"parallel": {"dp": 1}, "microbatch": 4},
    "one rank, recompute": {"parallel": {"dp": 1}, "microbatch": 8, "recompute": "full"},
    "dp2": {"parallel": {"dp": 2}, "microbatch": 4},
    "dp2 zero3": {"parallel": {"dp": 2}, "microbatch": 2, "shard": "zero3"},
    "tp2": {"parallel": {"tp": 2}, "microbatch": 4},
    "tp2 sp": {"parallel": {"tp": 2, "sp": True}, "microbatch": 8},
    "pp2": {"parallel": {"pp": 2}, "microbatch": 1},
    "cp2": {"parallel": {"cp": 2}, "microbatch": 4},
    "dp4 zero1": {"parallel": {"dp": 4}, "microbatch": 2, "shard": "zero1"},
    "dp2 tp2": {"parallel": {"dp": 2, "tp": 2}, "microbatch": 2},
    "dp2 pp2": {"parallel": {"dp": 2, "pp": 2}, "microbatch": 1},
    "pp4 vocab": {"parallel": {"pp": 4, "vocab": "pp"}, "microbatch": 1},
}


def asked(name: str, steps: int) -> TrainJob:
    """The job, of which nothing is said how."""
    return TrainJob.model_validate(
        {
            "name": "predicted",
            "steps": steps,
            "evaluation": {"every": 0, "final": False},
            "checkpoint": {"every": 0},
            **JOBS[name],
        }
    )


def how(plan: TrainPlan) -> dict[str, Any]:
    """What of a plan decides how long a step takes."""
    job = plan.job
    parallel = job.parallel.model_dump(mode="json", exclude_defaults=True)
    return {
        "parallel": parallel,
        "microbatch": job.microbatch,
        "shard": job.shard.name,
        "recompute": job.recompute,
        "precision": job.precision,
    }


def jobs_of(name: str, steps: int) -> dict[str, TrainJob]:
    """The job under every plan that is legal for it."""
    open_job = asked(name, steps).model_dump(mode="json", exclude_unset=True)
    jobs = {}
    for plan, stated in PLANS.items():
        job = TrainJob.model_validate({**open_job, **stated})
        if job.global_batch % (job.parallel.dp * (job.microbatch or 1)) == 0:
            jobs[plan] = job
    return jobs


def main() -> None:
    """Predict, run, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=list(JOBS))
    arguments = parser.parse_args()
    require_quiet()
    machine = probe(fast=False, save=saved_path())
    rows: list[dict[str, Any]] = []
    plans: dict[tuple[str, str], TrainPlan] = {}
    choices: set[tuple[str, str]] = set()
    for name in arguments.only:
        jobs = jobs_of(name, arguments.steps)
        for plan, job in jobs.items():
            try:
                plans[name, plan] = plan_job(job, machine)
            except PlanError as cause:  # heads that tp does not divide
                print(f"{name} {plan}: not legal: {cause}")
        chosen = plan_job(asked(name, arguments.steps), machine)
        # What the planner chooses may stand in the list already, and is run once then.
        same = (at for at, plan in plans.items() if at[0] == name and how(plan) == how(chosen))
        at = next(same, (name, "chosen"))
        plans[at] = chosen
        choices.add(at)
    for at, made in plans.items():
        cost = made.estimate
        assert cost is not None
        rows.append(
            {
                "job": at[0],
                "plan": at[1],
                "chosen": at in choices,
                **how(made),
                "step_s": cost.step_s.model_dump(),
                "terms_s": cost.terms_s,
                "memory_bytes": cost.memory_total,
            }
        )
    write_json(TABLE, {"machine": machine.fingerprint, "rows": rows})
    require_quiet()
    steps: dict[int, list[float]] = {at: [] for at in range(len(rows))}
    with tempfile.TemporaryDirectory(prefix="shoal-predictions-") as folder:
        # Twice all, not each twice: a host that others use is slow for minutes at a time.
        for turn in range(ROUNDS):
            for at, row in enumerate(rows):
                place = Path(folder) / f"{at}-{turn}"
                report = execute(plans[row["job"], row["plan"]], place)
                steps[at].append(report.measured["step_s"])
                row["measured"] = {
                    "step_s": statistics.fmean(steps[at]),
                    "memory_bytes": report.measured["memory_bytes"],
                }
                shutil.rmtree(place)
                print(told(row), flush=True)
    if arguments.only != list(JOBS):
        return
    write_json(TABLE, {"machine": machine.fingerprint, "rows": rows})
    write_atomic(PICTURE, draw(rows))
    record(judge(rows))


def told(row: dict[str, Any]) -> str:
    """One line: predicted, measured, and what the prediction is made of."""
    predicted, measured = row["step_s"]["value"], row["measured"]["step_s"]
    memory = row["measured"]["memory_bytes"] / row["memory_bytes"] - 1
    terms = " ".join(f"{k}={1e3 * v:.0f}" for k, v in row["terms_s"].items() if v > 5e-4)
    return (
        f"{row['job']:7} {row['plan']:20} {1e3 * predicted:6.0f} ms predicted, "
        f"{1e3 * measured:6.0f} measured {100 * (measured / predicted - 1):+5.0f} %, "
        f"memory {100 * memory:+4.0f} %  {terms}"
    )


def judge(rows: list[dict[str, Any]]) -> list[Row]:
    """The issue's five numbers and the share of intervals that hold."""
    predicted = [row["step_s"]["value"] for row in rows]
    measured = [row["measured"]["step_s"] for row in rows]
    ratios = [m / p for p, m in zip(predicted, measured, strict=True)]
    memory = [abs(row["measured"]["memory_bytes"] / row["memory_bytes"] - 1) for row in rows]
    beyond = []
    for name in {row["job"] for row in rows}:
        mine = {row["plan"]: row["measured"]["step_s"] for row in rows if row["job"] == name}
        (chosen,) = (row["plan"] for row in rows if row["job"] == name and row["chosen"])
        beyond.append(mine[chosen] / min(mine.values()))
    inside = [
        row["step_s"]["low"] <= row["measured"]["step_s"] <= row["step_s"]["high"] for row in rows
    ]
    runs = (
        f"{len(rows)} runs of three jobs on 1 to 4 ranks, predicted from a probe before the first"
    )
    return [
        Row(
            "predictions here: median error of the step time",
            statistics.median(abs(ratio - 1) for ratio in ratios),
            "",
            "<=",
            0.12,
            runs,
        ),
        Row(
            "predictions here: worst factor of the step time",
            max(max(ratio, 1 / ratio) for ratio in ratios),
            "x",
            "<=",
            2.0,
            runs,
        ),
        Row(
            "predictions here: median error of a rank's memory",
            statistics.median(memory),
            "",
            "<=",
            0.10,
            runs,
        ),
        Row(
            "predictions here: chosen plan against the best measured",
            max(beyond),
            "x",
            "<=",
            1.05,
            "the worst of three jobs",
        ),
        Row(
            "predictions here: rank correlation",
            float(scipy.stats.spearmanr(predicted, measured).statistic),
            "",
            ">=",
            0.85,
            runs,
        ),
        Row(
            "predictions here: measurements inside the 90 % interval",
            sum(inside) / len(inside),
            "",
            ">=",
            0.85,
            runs + "; at most 0.95 is wanted, too",
        ),
    ]


def draw(rows: list[dict[str, Any]]) -> str:
    """Predicted against measured, by job."""
    series = []
    for name in JOBS:
        mine = [row for row in rows if row["job"] == name]
        series.append(
            Series(
                name,
                [1e3 * row["step_s"]["value"] for row in mine],
                [1e3 * row["measured"]["step_s"] for row in mine],
                line=False,
                points=True,
            )
        )
    every = [x for s in series for x in (*s.x, *s.y)]
    ends = [min(every), max(every)]
    return Chart(
        title="step time of every plan: predicted from a probe, then measured",
        x_label="predicted, ms",
        y_label="measured, ms",
        series=[*series, Series("equal", ends, ends, dashed=True)],
        log_x=True,
        log_y=True,
        width=560,
        height=480,
    ).render()


if __name__ == "__main__":
    main()
