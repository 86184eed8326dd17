"""What kinds of job share that run in one process: how they plan, run, report and predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, load_object, part, table
from shoal.ir import Interval, Machine, Plan, Report, Watch

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class KindHere:
    """Base of a kind whose jobs run in this process.

    A kind names its two functions as ``module:function``, because a list of all kinds must not
    import them; one whose functions take other arguments has its own :meth:`plan` or :meth:`work`.

    Attributes:
        planner: ``(job, machine)`` -> plans, the best first.
        executor: ``(job, choice, progress)`` -> outcome.
        chooses: key of the job that the planner fills.
    """

    planner: ClassVar[str] = ""
    executor: ClassVar[str] = ""
    chooses: ClassVar[str] = "method"

    def plan(self, job: Any, machine: Machine) -> Sequence[Any]:
        """What the planner proposes, the best first."""
        plans: Sequence[Any] = load_object(self.planner)(job, machine)
        return plans

    def work(self, plan: Any) -> Callable[[RunProgress], RunOutcome]:
        """What a run of the plan does with its progress."""
        return partial(load_object(self.executor), plan.job, method_of(plan, self.chooses))

    def describe(self, plan: Any) -> str:
        """The choice with its options."""
        return str(getattr(plan.job, self.chooses) or f"no {self.chooses}")

    def run(
        self,
        plan: Any,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> Any:
        """Run in this process, or in a pool that the job names."""
        from shoal.fields.running import run_here

        work = self.work(plan)
        return run_here(plan, directory, work, resume=resume, watch=watch, anyway=anyway)

    def report(self, plan: Plan[Any], directory: Path) -> Report[Any]:
        """None before the end."""
        from shoal.fields.running import report_at_end

        return report_at_end(plan, directory)

    def predictions(self, plan: Plan[Any]) -> Mapping[str, Interval]:
        """What the plan says."""
        return plan.predicted


def unreadable_rows(details: Mapping[str, Any]) -> list[str]:
    """What the details of a report say of rows that could not be read; nothing if all could.

    Args:
        details: with ``bad_rows`` and ``first_bad``.
    """
    if not details.get("bad_rows"):
        return []
    return [f"{details['bad_rows']:,} rows could not be read, the first: {details['first_bad']}"]


def choices(given: Choice | None, kind: str) -> list[Choice]:
    """What a job says; every part of the kind where it says nothing."""
    return [Choice(name=name) for name in table(kind)] if given is None else [given]


def method_of(plan: Plan[Any], field: str = "method") -> Choice:
    """The method of a plan.

    Args:
        plan: of any kind.
        field: of the job that chooses it.

    Raises:
        ConfigError: it has none.
    """
    method: Choice | None = getattr(plan.job, field)
    if method is None:
        kind = plan.job.job
        raise ConfigError(f"{field}: the plan has none; make one with shoal plan {kind} --out")
    return method
