"""Running a job in this process: lock, plan, progress, a state to go on from, report, score.

A kind's ``run`` hands its work to :func:`run_here`; what the work says through its
:class:`RunProgress` is shown, written as events, and kept as the state with which a stopped run
goes on.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, ShoalError, StoreError
from shoal.core.files import write_json
from shoal.core.meter import SINKS, Meter
from shoal.cost.score import Score
from shoal.ir import Plan, Report, Watch, errors_of, kind_of
from shoal.machine.fingerprint import versions
from shoal.machine.host import peak_memory
from shoal.plan.saved import check_device, read_report
from shoal.train.layout import RunDir
from shoal.train.run_lock import alone

_STATE = "state.json"
# Seconds between states on disk, and between events.
_EVERY = 2.0


@dataclass(frozen=True)
class RunOutcome:
    """What the work of a run has measured.

    Args:
        measured: quantity -> value; ``memory_bytes`` is added.
        details: anything else that the report keeps, as JSON.
    """

    measured: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)


class RunProgress:
    """Shows how far the work is, and keeps its newest state on disk now and then.

    Args:
        directory: of the run.
        state: where a run that was stopped stood; None at the beginning.
        event: writes an event.
        watch: called with what is shown.
    """

    def __init__(
        self,
        directory: Path,
        state: Mapping[str, Any] | None,
        event: Callable[..., None],
        watch: Watch | None,
    ) -> None:
        self.directory, self.state, self.event = directory, state, event
        self._watch = watch
        self._begun = self._saved = time.monotonic()
        self._before = float((state or {}).get("seconds", 0.0))
        self._newest: Mapping[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the work began, those before a stop included."""
        return self._before + time.monotonic() - self._begun

    def say(self, done: float, text: str) -> None:
        """Show a share that is done, and what is being done."""
        if self._watch is not None:
            self._watch({"kind": "prepare", "state": (done, 1.0, text)})

    def tick(
        self, done: float, text: str, state: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        """The work has come so far.

        Args:
            done: share of it.
            text: what is done, with its rate; the time left is added.
            state: what a run that is stopped goes on from, as JSON.
            fields: of the event ``search``, which is written every two seconds.
        """
        self._newest = state
        passed = time.monotonic() - self._begun
        left = f", {passed / done - passed:.0f} s left" if done else ""
        self.say(done, text + left)
        if time.monotonic() - self._saved > _EVERY:
            self.keep()
            self.event("search", done=done, seconds=self.seconds, **fields)

    def keep(self) -> None:
        """Write the newest state."""
        self._saved = time.monotonic()
        if self._newest is not None:
            state = {**self._newest, "seconds": self.seconds}
            write_json(self.directory / _STATE, state)


@alone
def run_here(
    plan: Plan[Any],
    run_dir: Path,
    work: Callable[[RunProgress], RunOutcome],
    *,
    resume: bool = False,
    watch: Watch | None = None,
    anyway: bool = False,
) -> Report[Any]:
    """Run a plan on this host.

    Args:
        plan: what to run.
        run_dir: directory of the run.
        work: does it; its files go to ``progress.directory``, each whole or not at all.
        resume: go on from the state that lies there; a run that has ended is not run again.
        watch: called with every event.
        anyway: run on the CPU what was planned for GPUs; nothing of it is scored.

    Returns:
        The report, which is also in ``report.json`` and in the score.

    Raises:
        ConfigError: a run lies there that is not resumed, or is of another job.
        ShoalError: the run cannot start, or a file cannot be read or written.
    """
    job, directory, kind = plan.job, RunDir(run_dir), kind_of(plan)
    check_device(plan.machine, "cpu", f"the plan of {job.name}", anyway=anyway)
    if directory.plan.exists() and not resume:
        raise ConfigError(
            f"{run_dir}: already contains a run; continue it with --resume, or choose another "
            "name with --set name=..."
        )
    if resume and directory.plan.exists() and kind.plan_type.load(directory.plan).job != job:
        raise ConfigError(
            f"{run_dir}: contains a run of another job; give that job, or another --dir"
        )
    if resume and not (directory.root / _STATE).exists():
        before = read_report(directory.report, plan)
        if before is not None:
            if watch is not None:
                watch({"kind": "finished", "step": 1})
            return before
    Score().register(run_dir, job.job, job.name)
    plan.save(directory.plan, header="The plan of the run, with its prediction.")
    state = _state(directory.root / _STATE) if resume else None
    with Meter([SINKS.build({"name": "jsonl", "path": str(directory.events)})]) as meter:
        meter.event("start", step=0, total=1, resumed=state is not None, ranks=1, parameters=0)
        progress = RunProgress(directory.root, state, meter.event, watch)
        try:
            outcome = work(progress)
        except KeyboardInterrupt:
            progress.keep()
            meter.event("stop", step=1)
            raise
        except ShoalError as cause:
            meter.event("error", message=str(cause))
            raise
        meter.event("end", step=1)
    # Of this process and of the largest of those that worked for it.
    children = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    measured = {"memory_bytes": float(max(peak_memory(), children)), **outcome.measured}
    report = kind.report_type(
        plan=plan,
        measured=measured,
        errors=errors_of(plan, measured) if plan.machine.device.kind == "cpu" else {},
        details=dict(outcome.details),
        versions=versions(),
        device="cpu",
    )
    write_json(directory.report, report.model_dump(mode="json"))
    Score().append(report, directory.root)
    (directory.root / _STATE).unlink(missing_ok=True)
    return report


def report_at_end(plan: Plan[Any], directory: Path) -> Report[Any]:
    """The report of a run that has ended: what such a run measures on its way is no result.

    Raises:
        StoreError: it has not ended.
    """
    report = read_report(RunDir(directory).report, plan)
    if report is None:
        raise StoreError(f"{directory}: a job of kind {plan.job.job} reports when it ends")
    return report


def _state(path: Path) -> Mapping[str, Any] | None:
    """The state that a stopped run has left; None if there is none.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"{path}: cannot be read ({cause}); remove it, and the run begins again"
        ) from cause
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: not a state; remove it, and the run begins again")
    return state
