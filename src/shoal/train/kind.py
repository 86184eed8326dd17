"""The job ``train``: a model, over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.counts import count
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.corpora.files import corpus_at
from shoal.cost.training.memory import ARENAS, TIERS, tier_bytes
from shoal.ir import (
    Explanation,
    Flag,
    Interval,
    Machine,
    Quantity,
    TrainJob,
    TrainPlan,
    TrainReport,
    Watch,
)
from shoal.plan.defaults import training_defaults
from shoal.plan.table import spell, tables


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
            help="Text or chats: a file, a directory, or hf://datasets/ORG/NAME.",
            read=corpus_at,
        ),
        Flag(name="lr", path="optimizer.lr", help="Learning rate of the optimizer."),
        Flag(name="seq_len", path="seq_len", help="Tokens of a sequence."),
        Flag(name="ranks", path="parallel.dp", help="Data-parallel ranks."),
        Flag(name="steps", path="steps", help="Steps; instead of tokens."),
        Flag(name="minutes", path="minutes", help="Minutes; instead of tokens."),
    )
    rests_on: ClassVar = (
        *("seq_len", "global_batch", "tokens", "steps", "precision", "products", "recompute"),
        *("optimizer.name", "optimizer.lr", "engine", "checkpoint.every", "checkpoint.mode"),
    )
    quantities: ClassVar = (
        Quantity.of_time("step_s", "step time", "ms"),
        Quantity(name="tokens_per_s", label="tokens per second", better="higher", headline=True),
        Quantity(name="targets", label="target tokens per step", unit="tokens"),
        Quantity.of_bytes("memory_bytes", "memory per rank"),
        *(Quantity.of_bytes(f"{tier}_bytes", f"  most on the {tier}") for tier in TIERS),
        Quantity.of_bytes("base_bytes", "  the base's weights"),
        Quantity.of_bytes("adapter_bytes", "  the adapter's"),
        Quantity.of_bytes("gradients_bytes", "  gradients"),
        Quantity.of_bytes("optimizer_bytes", "  optimizer state"),
        Quantity.of_bytes("activations_bytes", "  activations and buffers"),
        Quantity.of_bytes("wire_bytes", "bytes sent per step"),
        Quantity.of_time("total_s", "time of all steps"),
        Quantity.of_time("outer_exposed_s", "  waiting for other workers"),
        Quantity.of_share("outer_exposed", "  as a share of it", "lower"),
        Quantity.of_time("lost_s", "time lost by rank failures"),
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
        from shoal.train.planning import plan_job

        return [plan_job(job, machine)]

    def defaults(self, job: TrainJob, machine: Machine) -> Mapping[str, Any]:
        """See :func:`~shoal.plan.defaults.training_defaults`."""
        return training_defaults(job, machine)

    def rank(
        self,
        job: TrainJob,
        machine: Machine,
        *,
        planner: str = "search",
        offload: str | None = None,
        finetune: str | None = None,
        planner_options: Mapping[str, Any] | None = None,
    ) -> Sequence[TrainPlan]:
        """All plans, best first, those of other engines included.

        Args:
            job: what is to be trained.
            machine: where.
            planner: who searches: search, rules, megatron or galvatron.
            offload: auto searches all ways beyond the device's memory, too; for some of them give
                ``planner_options={"offload": "none,zero_infinity"}``.
            finetune: auto takes the best method that fits.
            planner_options: options of the planner, by name.
        """
        from shoal.plan.peft import advise
        from shoal.plan.strategy import PLANNERS

        if finetune is not None:
            require(finetune == "auto", "finetune", finetune, expected="auto, or a method")
            best = advise(job, machine)[0]
            job = job.model_copy(update={"finetune": best.method})
        options = dict(planner_options or {})
        if offload is not None:
            require(offload == "auto", "offload", offload, expected="auto, or a part")
            options["offload"] = offload
        plans: list[TrainPlan] = PLANNERS.build({"name": planner, **options}, where="planner").plan(
            job, machine
        )
        if finetune is not None:
            plans[0] = plans[0].model_copy(
                update={"notes": (f"finetune {best.method}: {best.reason}", *plans[0].notes)}
            )
        return plans

    def tables(self, plans: Sequence[TrainPlan], *, verbose: bool = False) -> Sequence[Table | str]:
        """See :func:`shoal.plan.table.tables`."""
        return tables(plans, verbose=verbose)

    def pictures(self, plans: Sequence[TrainPlan]) -> Sequence[str]:
        """SVG of where time and memory go, and of the best plan's pipeline."""
        from shoal.plan.picture import pictures

        return [one.render() for one in pictures(plans)]

    def explain(self, plan: TrainPlan) -> Explanation:
        """See ``shoal explain price``."""
        from shoal.plan.price_study import explain_plan

        return explain_plan(plan)

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
        from shoal.core.hub import fetched
        from shoal.train.run import execute

        plan = plan.model_copy(update={"job": fetched(plan.job)})
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
        if cost.whole_s:
            predictions["total_s"] = cost.step_s.scaled(cost.whole_s["steps"] / cost.step_s.value)
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
            lines.append(
                "model:  none: the result cannot be stored as a merged directory of this family"
            )
        return lines
