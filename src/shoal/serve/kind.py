"""The job ``serve``: answer a workload of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.errors import StoreError
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.ir import Flag, Interval, Machine, Quantity, ServeJob, ServePlan, ServeReport, Watch
from shoal.plan.defaults import serving_defaults

# Of ranked plans so many have intervals; each takes two simulations more.
_WITH_INTERVALS = 5

_LATENCIES = (
    ("ttft", "TTFT (time to first token)"),
    ("tpot", "TPOT (time per output token after the first)"),
    ("itl", "ITL (inter-token latency)"),
    ("e2e", "E2E (latency of a whole request)"),
)
_AMONG = (("mean", ""), ("p50", "median"), ("p95", "95 % within"), ("p99", "99 % within"))


@part
class ServeKind:
    """Answer the requests of a workload with a decoder-only language model."""

    summary: ClassVar = "answer a workload of requests"
    job_type: ClassVar = ServeJob
    plan_type: ClassVar = ServePlan
    report_type: ClassVar = ServeReport
    subject: ClassVar = "model"
    example: ClassVar = {
        "model": "shoal-4m",
        "max_position": 256,
        "workload": {"name": "chat", "requests": 8},
    }
    flags: ClassVar = (
        Flag(name="workload", path="workload", help="chat, code, summary, multiturn ..."),
        Flag(name="rate", path="workload.rate", help="Requests per second."),
        Flag(name="requests", path="workload.requests", help="Requests of the workload."),
        Flag(name="scheduler", path="scheduler", help="Which requests are in the next step."),
        Flag(name="precision", path="precision", help="auto, fp32 or bf16."),
    )
    rests_on: ClassVar = (
        *("workload.name", "workload.rate", "precision", "weights", "kv_format", "max_running"),
        *("max_step_tokens", "engine"),
    )
    quantities: ClassVar = (
        Quantity(
            name="tokens_per_s", label="output tokens per second", better="higher", headline=True
        ),
        Quantity(name="prompt_tokens_per_s", label="prompt tokens per second", better="higher"),
        Quantity(name="requests_per_s", label="requests per second", better="higher"),
        Quantity(name="goodput_per_s", label="  of which met the targets", better="higher"),
        Quantity.of_share("slo_share", "requests that met the targets", "higher"),
        Quantity.of_time("total_s", "time for all requests"),
        *(
            Quantity.of_time(
                f"{name}_{which}_s", f"{label}, mean" if which == "mean" else f"  {words}", "ms"
            )
            for name, label in _LATENCIES
            for which, words in _AMONG
        ),
        Quantity.of_time("lag_p99_s", "requests sent late, 99 % within", "ms"),
        Quantity.of_bytes("memory_bytes", "memory of the process"),
        Quantity.of_time("step_s", "time of a step", "ms"),
        Quantity.of_share("prefix_hit_share", "prompt tokens found in the cache", "higher"),
        Quantity(name="preemptions", label="requests preempted", better="lower"),
    )

    def plan(self, job: ServeJob, machine: Machine) -> Sequence[ServePlan]:
        """The job as it is, then with the other parts that could serve it, best first."""
        from shoal.plan.serving.plans import competing, plan_serve  # a server needs no planner

        request = plan_serve(job, machine)
        others = competing(job, request, divide=False)
        return [request, *(one for one in others if one is not request)]

    def defaults(self, job: ServeJob, machine: Machine) -> Mapping[str, Any]:
        """See :func:`~shoal.plan.defaults.serving_defaults`."""
        return serving_defaults(job, machine)

    def rank(
        self,
        job: ServeJob,
        machine: Machine,
        *,
        drafters: Sequence[str] = (),
        compare: bool = True,
    ) -> Sequence[ServePlan]:
        """The job as it is among all that could serve it, other splits included, best first.

        Args:
            job: what is to be served.
            machine: where.
            drafters: directories of drafters or draft models that may guess.
            compare: with other parts and splits; only the job as it is otherwise.
        """
        from shoal.plan.serving.plans import competing, plan_serve

        request = plan_serve(job, machine)
        if not compare:
            return [request]
        return competing(job, request, drafters=drafters, most=_WITH_INTERVALS)

    def tables(self, plans: Sequence[ServePlan], *, verbose: bool = False) -> Sequence[Table | str]:
        """See :func:`shoal.plan.serving.table.tables`."""
        from shoal.plan.serving.table import tables

        return tables(plans, verbose=verbose)

    def run(
        self,
        plan: ServePlan,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> ServeReport:
        """Serve the workload in real time on this host, and write the report."""
        from shoal.serve.bench.replay import run_plan

        return run_plan(plan, directory, resume=resume, watch=watch, anyway=anyway)

    def report(self, plan: ServePlan, directory: Path) -> ServeReport:
        """None before the end: latencies are of all requests."""
        raise StoreError(f"{directory}: a served workload reports when it ends")

    def predictions(self, plan: ServePlan) -> Mapping[str, Interval]:
        """What the simulator predicts, and the memory."""
        cost = plan.estimate
        if cost is None or not cost.memory_bytes:
            return plan.predicted
        return {**plan.predicted, "memory_bytes": Interval.exact(cost.memory_total)}

    def describe(self, plan: ServePlan) -> str:
        """Scheduler, cache and precision."""
        return f"{plan.job.scheduler.name} {plan.job.kv.name} {plan.job.precision}"

    def results(self, report: ServeReport, directory: Path) -> Sequence[str]:
        """Where the report lies."""
        return [f"report: {directory / 'report.json'}"]
