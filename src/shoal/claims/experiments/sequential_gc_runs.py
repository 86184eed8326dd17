"""What the SequentialGC claim runs: logs and picks, checks of gradients and loads, timed runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from shoal.claims.frame import ClaimRun
from shoal.core.files import write_json
from shoal.core.parts import Choice
from shoal.fields.federate.coded.execute import CodedServer
from shoal.fields.federate.coded.job import CodedJob
from shoal.fields.federate.coded.planning import plan_coded
from shoal.fields.federate.learn.protocols import Examples
from shoal.machine import load

# Draw of the slow-downs of the log.
_LOGGED = 1000


def picked_of(server: CodedServer, job: CodedJob, run: ClaimRun) -> dict[str, Choice]:
    """The best options of each scheme, from the times of runs with two loads."""
    rows: list[dict[str, float]] = []
    for scheme in (Choice(name="uncoded"), Choice(name="gc", options={"s": 3})):
        _, times, _ = server.train(scheme, draw=_LOGGED)
        rows += [{**row, "round": row["round"] + 1000 * len(rows)} for row in times.rows]
    log = run.work_dir / "worker_times.json"
    write_json(log, rows)
    plans = plan_coded(job.model_copy(update={"log": str(log)}), load("laptop"))
    schemes = [plan.job.scheme for plan in plans if plan.job.scheme is not None]
    return {one.name: one for one in schemes}


def checked_of(server: CodedServer, scheme: Choice, data: Examples) -> tuple[float, float]:
    """Largest relative error of a gradient; error of the examples that loads stand for."""
    errors = []

    def after(_: int, model: np.ndarray, gradient: np.ndarray) -> None:
        whole, _ = server.learning.gradient(model, data)  # type: ignore[attr-defined]
        errors.append(float(np.linalg.norm(gradient - whole) / np.linalg.norm(whole)))

    _, times, coding = server.train(scheme, after=after)
    planned = sum(row["load"] for row in times.rows if row["whole"])
    assert all(row["load"] <= coding.load * (1 + 1e-9) for row in times.rows)
    return max(errors), abs(sum(map(sum, times.examples)) / len(data) / planned - 1)


def processed_of(server: CodedServer, slow: int) -> tuple[float, float]:
    """Mean examples of a worker in a round, of M-SGC and GC that stand as many slow workers."""
    sequential = Choice(name="m_sgc", options={"B": 1, "W": 3, "lambda_": slow})
    counts = []
    for scheme in (sequential, Choice(name="gc", options={"s": slow})):
        _, times, coding = server.train(scheme)
        full = times.examples[coding.delay : len(times.examples) - coding.delay]
        counts.append(float(np.mean(np.concatenate(full))))
    return counts[0], counts[1]


def arm_of(server: CodedServer, scheme: Choice) -> Callable[[], float]:
    """Seconds of a run; each call has the next slow-downs."""
    draws = itertools.count(1)
    return lambda: sum(server.train(scheme, draw=next(draws))[1].seconds)
