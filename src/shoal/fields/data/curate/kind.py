"""The job ``curate``: choose the rows that a model should see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table, table_of
from shoal.fields.data.curate.job import CurateJob, CuratePlan, CurateReport
from shoal.fields.kinds import KindHere, method_of, unreadable_rows
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class CurateKind(KindHere):
    """Choose the rows of a data set for a model."""

    summary: ClassVar = "choose the rows that a model should see"
    job_type: ClassVar = CurateJob
    plan_type: ClassVar = CuratePlan
    report_type: ClassVar = CurateReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "stdlib"}
    flags: ClassVar = (
        Flag(name="method", path="method", help="How rows are chosen, such as random."),
        Flag(name="keep", path="keep", help="Share of the rows to keep."),
        Flag(name="workers", path="workers", help="Shards processed at the same time."),
        Flag(name="pool", path="pool", help="Where shards are processed: local or ray."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity(name="bytes_per_s", label="rate", unit="MB/s", factor=1e-6, better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="rows", label="rows"),
        Quantity.of_share("kept_share", "rows kept", "higher"),
    )

    def plan(self, job: CurateJob, machine: Machine) -> Sequence[CuratePlan]:
        """Every method for such data in every way it offers that fits."""
        from shoal.fields.data.curate.planning import plan_curate

        return plan_curate(job, machine)

    def work(self, plan: CuratePlan) -> Callable[[RunProgress], RunOutcome]:
        """Curate, in this process or in a pool."""
        from shoal.fields.data.curate.execute import execute

        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: CuratePlan) -> str:
        """The method with its options."""
        return str(plan.job.method or "no method")

    def results(self, report: CurateReport, directory: Path) -> Sequence[Table | str]:
        """What each stage dropped, the method's own tables, and where the kept rows are."""
        stages = report.details.get("stages", [])
        blocks: list[Table | str] = [
            table_of(
                "what was dropped",
                ("stage", "rows", "dropped", "share", "time", "most often"),
                [
                    (
                        stage["name"],
                        f"{stage['rows']:,}",
                        f"{stage['dropped']:,}",
                        f"{100 * stage['dropped'] / max(stage['rows'], 1):.1f} %",
                        f"{stage['seconds']:.2f} s" if stage.get("seconds") else "",
                        _most_often(stage.get("counts", {})),
                    )
                    for stage in stages
                ],
                right=" rrrr ",
            )
        ]
        examples = [
            (stage["name"], _short(text), why)
            for stage in stages
            for text, why in stage.get("examples", [])[:_EXAMPLES]
        ]
        if examples:
            blocks.append(
                table_of("examples", ("stage", "dropped or changed", "why"), examples, right="   ")
            )
        blocks += [table_of(**table) for table in report.details.get("tables", [])]
        if effect := report.details.get("effect"):
            blocks.append(_effect(effect))
        blocks.append(f"kept: {directory / 'kept'}/*.parquet")
        if stages:
            blocks.append(f"why:  {directory / 'stages.json'}, picture: {directory / 'stages.svg'}")
        return [*blocks, *unreadable_rows(report.details)]


# Reasons and counts of a stage that are shown; its examples, and letters of each.
_SHOWN, _EXAMPLES, _LETTERS = 3, 2, 60


def _short(text: str) -> str:
    whole = " ".join(text.split())
    return whole if len(whole) <= _LETTERS else whole[: _LETTERS - 1] + "…"


def _most_often(counts: Mapping[str, int]) -> str:
    largest = sorted(counts.items(), key=lambda one: -one[1])[:_SHOWN]
    return ", ".join(f"{name} {count:,}" for name, count in largest)


def _effect(effect: Mapping[str, Any]) -> Table:
    """Losses of a model on held-out rows, by what it was trained on."""
    settings, losses = effect["settings"], effect["losses"]
    rows = []
    for name, change in effect["change"].items():
        low, value, high = (f"{100 * change[key]:+.1f}" for key in ("low", "value", "high"))
        means = [f"{sum(one[name]) / len(one[name]):.3f}" for one in losses.values()]
        rows.append((name, *means, f"{value} % ({low} to {high})"))
    return table_of(
        f"bits a byte of {settings['model']} after {settings['tokens']:,} tokens, "
        f"{settings['seeds']} seeds",
        ("held out of", *(f"trained on {name}" for name in losses), "change (90 %)"),
        rows,
        right=" rrr",
    )
