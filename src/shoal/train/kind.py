"""The job ``train``: a model, over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.counts import count
from shoal.core.parts import part
from shoal.corpora.files import corpus_at
from shoal.cost.training.memory import ARENAS, TIERS, tier_bytes
from shoal.ir import Flag, Interval, Machine, Quantity, TrainJob, TrainPlan, TrainReport, Watch
from shoal.plan.table import spell

__all__ = ["TrainKind"]


@part
class TrainKind:
    """Train a decoder-only language model from text, or fine-tune one."""

    summary: ClassVar = "train a language model, or fine-tune one"
    job_type: ClassVar = TrainJob
    plan_type: ClassVar = TrainPlan
    report_type: ClassVar = TrainReport
    subject: ClassVar = "model"
    example: ClassVar = {"model": "shoal-4m", "steps": 10}
    flags: ClassVar = (
        Flag(name="tokens", path="tokens", help="Training tokens, such as 300M.", read=count),
        Flag(
            name="data",
            path="data",
            help="Text: a file or a directory.",
            read=corpus_at,
        ),
        Flag(name="ranks", path="parallel.dp", help="Data-parallel ranks."),
        Flag(name="steps", path="steps", help="Steps; instead of tokens."),
        Flag(name="minutes", path="minutes", help="Minutes; instead of tokens."),
    )
    quantities: ClassVar = (
        Quantity.of_time("step_s", "step time", "ms"),
        Quantity(name="tokens_per_s", label="tokens per second", better="higher", headline=True),
        Quantity.of_bytes("memory_bytes", "memory of a rank"),
        *(Quantity.of_bytes(f"{tier}_bytes", f"  most on the {tier}") for tier in TIERS),
        Quantity.of_bytes("base_bytes", "  the base's weights"),
        Quantity.of_bytes("adapter_bytes", "  the adapter's"),
        Quantity.of_bytes("gradients_bytes", "  gradients"),
        Quantity.of_bytes("optimizer_bytes", "  optimizer state"),
        Quantity.of_bytes("activations_bytes", "  activations and all else of passes"),
        Quantity.of_bytes("wire_bytes", "bytes a rank sends in a step"),
        Quantity.of_time("total_s", "time in steps"),
        Quantity.of_time("outer_exposed_s", "  waiting for other workers"),
        Quantity.of_share("outer_exposed", "  as a share of it", "lower"),
        Quantity.of_time("lost_s", "time lost with ranks"),
        Quantity.of_share("mfu", "model FLOPs utilisation", "higher"),
        Quantity(name="loss", label="training loss, last step", unit="nats/token", better="lower"),
        Quantity(name="heldout_loss", label="held-out loss", unit="nats/token", better="lower"),
        Quantity(name="bits_per_byte", label="held-out bits per byte", better="lower"),
        Quantity(name="gzip_bits_per_byte", label="  gzip -9 on the same files"),
        Quantity(name="xz_bits_per_byte", label="  xz -9e on the same files"),
        Quantity(name="energy_j", label="energy", unit="J", better="lower"),
        Quantity(name="usd", label="price", unit="$", better="lower"),
    )

    def plan(self, job: TrainJob, machine: Machine) -> Sequence[TrainPlan]:
        """The plan that runs: the best one whose choices can all be executed."""
        from shoal.train.run import plan_job

        return [plan_job(job, machine)]

    def run(
        self,
        plan: TrainPlan,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> TrainReport:
        """Start the ranks on this host, watch them, export the model."""
        from shoal.train.run import execute

        return execute(plan, directory, resume=resume, watch=watch, anyway=anyway)

    def report(self, plan: TrainPlan, directory: Path) -> TrainReport:
        """What the events of a run say up to now."""
        from shoal.train.layout import RunDir
        from shoal.train.report import make_report

        return make_report(plan, RunDir(directory))

    def predictions(self, plan: TrainPlan) -> Mapping[str, Interval]:
        """Of its estimate, under the names of the quantities."""
        cost = plan.estimate
        if cost is None:
            return {}
        predictions = {"step_s": cost.step_s}
        if cost.tokens:
            predictions["tokens_per_s"] = cost.tokens_per_s_interval
        if cost.total_s is not None:
            predictions["total_s"] = cost.total_s
        exact: dict[str, float] = {}
        causes = cost.memory_bytes
        if causes:
            exact["memory_bytes"] = tier_bytes(plan.job, plan.machine, causes)["device"]
        if "base" in causes:
            exact |= {f"{arena}_bytes": causes[arena] for arena in ARENAS}
            # What passes allocate is counted as one.
            exact["activations_bytes"] = causes["activations"] + causes["logits"]
        if plan.job.offload is not None:
            exact |= {f"{tier}_bytes": causes[tier] for tier in TIERS if tier in causes}
        if cost.wire_bytes:
            exact["wire_bytes"] = sum(cost.wire_bytes.values())
        predictions |= {name: Interval.exact(value) for name, value in exact.items()}
        if cost.energy_j is not None:
            predictions["energy_j"] = cost.energy_j
        if cost.usd is not None:
            predictions["usd"] = cost.usd
        return predictions

    def describe(self, plan: TrainPlan) -> str:
        """Its split and its choices."""
        return spell(plan)

    def results(self, report: TrainReport, directory: Path) -> Sequence[str]:
        """Where the page, the adapter and the model lie."""
        lines = [f"report: {directory / 'report.html'}"]
        adapter, model = directory / "adapter", directory / "export"
        if adapter.is_dir():
            lines.append(f"adapter: {adapter} (shoal serve BASE --adapter NAME=DIR)")
        if model.is_dir():
            lines.append(f"model:  {model} (a Hugging Face directory)")
        elif adapter.is_dir():
            lines.append("model:  none: no directory of this family holds what was learned, merged")
        return lines
