"""What kinds of job share that run in one process: how they run, report and predict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, part
from shoal.ir import Interval, Plan, Report, Watch

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class KindHere(ABC):
    """Base of a kind whose ``work(plan)`` returns what a run does with its progress."""

    @abstractmethod
    def work(self, plan: Any) -> Callable[[RunProgress], RunOutcome]:
        """What a run of the plan does."""

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
