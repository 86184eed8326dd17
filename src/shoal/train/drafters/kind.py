"""The job ``drafter``: train a draft model for speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.counts import count
from shoal.core.errors import StoreError
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.corpora.files import corpus_at
from shoal.ir import (
    DrafterJob,
    DrafterPlan,
    DrafterReport,
    Flag,
    Interval,
    Machine,
    Quantity,
    Watch,
)


@part
class DrafterKind:
    """Train a draft model for a target model, which itself does not change."""

    summary: ClassVar = "train a draft model for speculative decoding"
    job_type: ClassVar = DrafterJob
    plan_type: ClassVar = DrafterPlan
    report_type: ClassVar = DrafterReport
    subject: ClassVar = "model"
    example: ClassVar = {"model": "shoal-4m", "tokens": 100_000}
    flags: ClassVar = (
        Flag(name="drafter", path="drafter", help="Which kind of draft model."),
        Flag(name="tokens", path="tokens", help="Training tokens, such as 300K.", read=count),
        Flag(
            name="data",
            path="data",
            help="Text; without, the target writes.",
            read=corpus_at,
        ),
        Flag(name="lr", path="drafter.lr", help="Learning rate of the draft model."),
        Flag(name="seq_len", path="seq_len", help="Tokens of a sequence."),
    )
    quantities: ClassVar = (
        Quantity.of_time("step_s", "step time", "ms"),
        Quantity(name="tokens_per_s", label="tokens per second", better="higher", headline=True),
        Quantity.of_time("features_s", "time for the target's features"),
        Quantity.of_time("total_s", "time for them and all steps"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="parameters", label="trained parameters"),
        Quantity.of_bytes("drafter_bytes", "the drafter's file"),
        Quantity(name="loss", label="training loss, last step", better="lower"),
    )

    def plan(self, job: DrafterJob, machine: Machine) -> Sequence[DrafterPlan]:
        """The one way to do it: in one process."""
        from shoal.plan.drafting import plan_drafter

        return [plan_drafter(job, machine)]

    def run(
        self,
        plan: DrafterPlan,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> DrafterReport:
        """Compute the target's features, then train in this process."""
        from shoal.train.drafters.execute import execute

        return execute(plan, directory, resume=resume, watch=watch, anyway=anyway)

    def report(self, plan: DrafterPlan, directory: Path) -> DrafterReport:
        """None before the end: how often its guesses are right is measured last."""
        raise StoreError(f"{directory}: the training of a drafter reports when it ends")

    def predictions(self, plan: DrafterPlan) -> Mapping[str, Interval]:
        """Of its estimate, under the names of the quantities."""
        cost = plan.estimate
        if cost is None:
            return plan.predicted
        result = {"step_s": cost.step_s, **plan.predicted}
        if cost.tokens:
            result["tokens_per_s"] = cost.tokens_per_s_interval
        if cost.total_s is not None:
            result["total_s"] = cost.total_s
        return {**result, "memory_bytes": Interval.exact(cost.memory_total)}

    def describe(self, plan: DrafterPlan) -> str:
        """The drafter and its precision."""
        return f"{plan.job.drafter.name} {plan.job.precision}"

    def results(self, report: DrafterReport, directory: Path) -> Sequence[Table | str]:
        """How often its guesses are right, and where it lies."""
        levels: list[list[float]] = report.details.get("calibration", [])
        among = (1, 2, 3, 5, 10)
        right = Table(
            title="acceptance rate, on the target's own greedy text",
            columns=("level", "first", *(f"among {n}" for n in among[1:])),
            rows=tuple(
                (str(level), *(f"{100 * sum(shares[:n]):.1f} %" for n in among))
                for level, shares in enumerate(levels)
            ),
            right="rrrrrr",
        )
        lines = [f"drafter: {directory / 'drafter'}"]
        if (directory / "target").is_dir():
            lines.append(f"target:  {directory / 'target'} (changed with it; serve this one)")
        return [right, *lines]
