"""A clustering from a plan to a report."""

from __future__ import annotations

import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.bars import StackedBars
from shoal.core.errors import ConfigError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic, write_json
from shoal.core.meter import SINKS, Meter
from shoal.core.parts import table
from shoal.cost.score import Score
from shoal.fields.data.cluster.inputs import objects_of
from shoal.fields.data.cluster.job import ClusterPlan, ClusterReport
from shoal.fields.data.cluster.protocols import ClusteringProblem, State
from shoal.fields.data.cluster.solve import ClusteringSolution, solve
from shoal.ir import Watch, errors_of
from shoal.machine.fingerprint import versions
from shoal.plan.saved import check_device, read_report
from shoal.train.layout import RunDir
from shoal.train.run_lock import alone

_STATE = "state.json"
# Seconds between states on disk, and between events.
_EVERY = 2.0
# Clusters of the picture.
_SHOWN = 20


@alone
def execute(
    plan: ClusterPlan,
    run_dir: Path,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    anyway: bool = False,
) -> ClusterReport:
    """Run a plan on this host.

    Args:
        plan: what to run.
        run_dir: directory of the run, which gets ``labels.parquet`` and ``medoids.json``.
        resume: go on from the state that lies there.
        watch: called with every event.
        anyway: run on the CPU what was planned for GPUs; nothing of it is scored.

    Raises:
        ShoalError: the run cannot start, or a file cannot be read or written.
    """
    job, directory = plan.job, RunDir(run_dir)
    check_device(plan.machine, "cpu", f"the plan of {job.name}", anyway=anyway)
    if job.method is None:
        raise ConfigError("method: the plan has none; make one with shoal plan cluster --out")
    if directory.plan.exists() and not resume:
        raise ConfigError(
            f"{run_dir}: already contains a run; continue it with --resume, or choose another "
            "name with --set name=..."
        )
    if resume and directory.plan.exists() and ClusterPlan.load(directory.plan).job != job:
        raise ConfigError(
            f"{run_dir}: contains a run of another job; give that job, or another --dir"
        )
    if resume and not (directory.root / _STATE).exists():
        before = read_report(directory.report, plan)
        if isinstance(before, ClusterReport):
            if watch is not None:
                watch({"kind": "finished", "step": 1})
            return before
    Score().register(run_dir, job.job, job.name)
    plan.save(directory.plan, header="The plan of the run, with its prediction.")
    progress = _Progress(directory, watch)
    with Meter([SINKS.build({"name": "jsonl", "path": str(directory.events)})]) as meter:
        progress.event = meter.event
        state = _state(directory.root / _STATE) if resume else None
        meter.event("start", step=0, total=1, resumed=state is not None, ranks=1, parameters=0)
        progress.say(0.0, "reading")
        begun = time.perf_counter()
        objects = objects_of(job)
        read = time.perf_counter()
        problem = ClusteringProblem(
            objects=objects,
            k=job.k,
            init=job.init,
            max_iter=job.max_iter,
            seed=job.seed,
            threads=job.threads,
            state=state,
            tick=progress.tick,
            computing=lambda done: progress.say(done, "dissimilarities"),
        )
        method = table("clusterer").build(job.method, where="method")
        try:
            solution = solve(method, problem)
        except KeyboardInterrupt:
            progress.keep()
            meter.event("stop", step=1)
            raise
        result = solution.result
        measured = {
            "total_s": time.perf_counter() - read + float((state or {}).get("seconds", 0.0)),
            "read_s": read - begun,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
            "loss": solution.loss,
            "swaps": float(result.swaps),
            "passes": float(result.passes),
        }
        _write(solution, run_dir)
        meter.event("end", step=1)
    report = ClusterReport(
        plan=plan,
        measured=measured,
        errors=errors_of(plan, measured) if plan.machine.device.kind == "cpu" else {},
        details={
            "converged": result.converged,
            "medoids": np.asarray(result.medoids).tolist(),
            "sizes": np.bincount(solution.labels, minlength=job.k).tolist(),
        },
        versions=versions(),
        device="cpu",
    )
    write_json(directory.report, report.model_dump(mode="json"))
    Score().append(report, directory.root)
    (directory.root / _STATE).unlink(missing_ok=True)
    return report


class _Progress:
    """Shows how far a search is, and keeps its newest state on disk now and then."""

    def __init__(self, directory: RunDir, watch: Watch | None) -> None:
        self.event: Callable[..., None] = lambda kind, **fields: None
        self._path, self._watch = directory.root / _STATE, watch
        self._begun = self._saved = time.monotonic()
        self._before = 0.0
        self._newest: State | None = None

    def say(self, done: float, text: str) -> None:
        if self._watch is not None:
            self._watch({"kind": "prepare", "state": (done, 1.0, text)})

    def tick(self, done: float, loss: float, state: State) -> None:
        """A search has come so far."""
        passed = time.monotonic() - self._begun
        self._newest = {**state, "seconds": passed}
        left = passed / done - passed if done else float("nan")
        self.say(
            done,
            f"{state['swaps']} swaps ({state['swaps'] / max(passed, 1e-9):,.0f}/s), loss "
            f"{loss:.6g}, at least {left:.0f} s left",
        )
        if time.monotonic() - self._saved > _EVERY:
            self.keep()
            self.event("search", done=done, loss=loss, swaps=state["swaps"], seconds=passed)

    def keep(self) -> None:
        """Write the newest state."""
        self._saved = time.monotonic()
        if self._newest is not None:
            write_json(self._path, self._newest)


def _state(path: Path) -> State | None:
    """The state that a stopped run has left; None if there is none.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        state: State = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"{path}: cannot be read ({cause}); remove it, and the run begins again"
        ) from cause
    return state


def _write(solution: ClusteringSolution, directory: Path) -> None:
    """Labels as Parquet, medoids as JSON, a picture of the sizes; each file whole or not at all."""
    arrow: Any = import_extra("pyarrow", extra="fields", purpose="writing labels")
    parquet: Any = import_extra("pyarrow.parquet", extra="fields", purpose="writing labels")
    columns = {
        "object": np.arange(len(solution.labels)),
        "label": solution.labels,
        "medoid": np.asarray(solution.result.medoids)[solution.labels],
        "dissimilarity": solution.nearest,
    }
    text = io.BytesIO()
    parquet.write_table(arrow.table(columns), text)
    write_atomic(directory / "labels.parquet", text.getvalue())
    sizes = np.bincount(solution.labels, minlength=len(solution.result.medoids))
    medoids = np.asarray(solution.result.medoids).tolist()
    write_json(
        directory / "medoids.json",
        {"medoids": medoids, "loss": solution.loss, "sizes": sizes.tolist()},
    )
    largest = np.argsort(-sizes, kind="stable")[:_SHOWN]
    picture = StackedBars(
        f"objects of the {len(largest)} largest of {len(sizes)} clusters",
        {
            f"{place}: medoid {medoids[place]}": {"objects": float(sizes[place])}
            for place in largest
        },
        lambda value: f"{value:,.0f}",
    )
    write_atomic(directory / "clusters.svg", picture.render())
