"""The job ``sparse_code``: learn components of which few explain each vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.sparse_coding.job import SparseCodeJob, SparseCodePlan, SparseCodeReport
from shoal.fields.kinds import KindHere, method_of
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class SparseCodeKind(KindHere):
    """Learn components of which few explain each vector."""

    summary: ClassVar = "learn components of which few explain each vector"
    job_type: ClassVar = SparseCodeJob
    plan_type: ClassVar = SparseCodePlan
    report_type: ClassVar = SparseCodeReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "bars:200", "iterations": 10}
    flags: ClassVar = (
        Flag(name="method", path="method", help="Model of the causes, such as bsc or gsc."),
        Flag(name="components", path="components", help="Number of components."),
        Flag(name="candidates", path="candidates", help="Causes whose combinations are tried."),
        Flag(name="active", path="active", help="Maximum active causes per vector."),
        Flag(name="iterations", path="iterations", help="Iterations of learning."),
        Flag(name="restarts", path="restarts", help="Restarts; the best is kept."),
        Flag(name="workers", path="workers", help="Processes that share the vectors, in a pool."),
        Flag(name="pool", path="pool", help="Where the vectors are: local or ray."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("read_s", "time to read"),
        Quantity(name="points_per_s", label="rate", unit="vectors/s", better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="free_energy", label="free energy", unit="nats", better="higher"),
        Quantity(name="noise", label="noise"),
    )

    def plan(self, job: SparseCodeJob, machine: Machine) -> Sequence[SparseCodePlan]:
        """Every model for such data that fits, the fastest first."""
        from shoal.fields.data.sparse_coding.planning import plan_sparse_code

        return plan_sparse_code(job, machine)

    def work(self, plan: SparseCodePlan) -> Callable[[RunProgress], RunOutcome]:
        """Learn, in this process or in a pool."""
        from shoal.fields.data.sparse_coding.execute import execute

        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: SparseCodePlan) -> str:
        """The model with its options."""
        return str(plan.job.method or "no method")

    def results(self, report: SparseCodeReport, directory: Path) -> Sequence[Table | str]:
        """How often causes are active, and where components and pictures lie."""
        return [
            f"active causes per vector (mean): {report.details.get('active', 0.0):.3g}",
            f"components:  {directory / 'components.npy'}",
            f"prior:       {directory / 'prior.json'}",
            f"pictures:    {directory / 'components.svg'}, {directory / 'free_energy.svg'}",
        ]
