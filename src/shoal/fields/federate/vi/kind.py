"""The job ``solve_vi``: solve a saddle point whose operator workers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.federate.vi.job import SolveViJob, SolveViPlan, SolveViReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Rows of the curve that are shown.
_SHOWN = 8


@part
class SolveViKind(KindHere):
    """Solve a saddle point or another variational inequality, with compressed messages."""

    summary: ClassVar = "solve saddle points whose operator workers share"
    job_type: ClassVar = SolveViJob
    plan_type: ClassVar = SolveViPlan
    report_type: ClassVar = SolveViReport
    subject: ClassVar = "problem"
    example: ClassVar = {
        "problem": {"name": "quadratic_saddle", "dimension": 10, "condition": 5},
        "clients": "2",
        "compressor": {"name": "rand_k", "share": 0.5},
        "tolerance": 0.01,
    }
    flags: ClassVar = (
        Flag(name="method", path="method", help="extragradient, masha1, masha2."),
        Flag(name="clients", path="clients", help="Workers, such as 5 or 20@20Mbit."),
        Flag(
            name="compressor",
            path="compressor",
            help="Compression of workers' messages, such as rand_k.",
        ),
        Flag(name="step", path="step", help="Step size gamma. [default: the method's bound]"),
        Flag(name="tolerance", path="tolerance", help="Error at which the run ends."),
        Flag(name="iterations", path="iterations", help="Maximum number of iterations."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity(name="iterations", label="iterations", better="lower"),
        Quantity(name="error", label="error", better="lower"),
        Quantity.of_bytes("up_payload_bytes", "tensors from a worker"),
        Quantity.of_bytes("up_bytes", "  with framing"),
        Quantity(name="up_floats", label="  numbers", better="lower"),
        Quantity.of_bytes("down_payload_bytes", "tensors to a worker"),
        Quantity.of_bytes("down_bytes", "  with framing"),
        Quantity(name="clean_loss", label="loss", better="lower"),
        Quantity(name="robust_loss", label="loss under attack", better="lower"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: SolveViJob, machine: Machine) -> Sequence[SolveViPlan]:
        """Every method that fits the problem and the compressors, the shortest run first."""
        from shoal.fields.federate.vi.planning import plan_solve_vi

        return plan_solve_vi(job, machine)

    def work(self, plan: SolveViPlan) -> Callable[[RunProgress], RunOutcome]:
        """Solve with processes of this machine."""
        from shoal.fields.federate.vi.execute import execute

        require_extra("safetensors", purpose="exchanging messages between workers")
        return partial(execute, plan)

    def describe(self, plan: SolveViPlan) -> str:
        """The method and its step."""
        return f"{plan.job.method}, step {plan.step:.3g}"

    def results(self, report: SolveViReport, directory: Path) -> Sequence[Table | str]:
        """Some points of the curve."""
        curve = report.details.get("curve", [])
        some = curve[:: max(1, len(curve) // _SHOWN)]
        rows = tuple(
            (f"{one['iteration']:,}", f"{one['up_floats']:,.0f}", f"{one['error']:.3g}")
            for one in some
        )
        shown = Table(
            title="error by numbers that a worker has sent",
            columns=("iteration", "numbers", "error"),
            rows=rows,
            right="rrr",
        )
        missed = report.details.get("missed")
        return [
            *([shown] if rows else []),
            *([missed] if missed else []),
            f"solution: {directory / 'solution.safetensors'}",
        ]
