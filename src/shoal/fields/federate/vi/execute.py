"""A variational inequality from a plan to a report: a server here, workers in processes."""

from __future__ import annotations

from shoal.core.files import write_atomic, write_json
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.vi.job import SolveViPlan
from shoal.fields.federate.vi.planning import description_of
from shoal.fields.federate.vi.solving import solve_over_sockets
from shoal.fields.federate.wire.messages import pack
from shoal.fields.kinds import method_of
from shoal.fields.running import RunOutcome, RunProgress


def execute(plan: SolveViPlan, progress: RunProgress) -> RunOutcome:
    """Solve, and write ``solution.safetensors`` and ``curve.json``.

    Raises:
        ShoalError: the method diverges, or a worker ends.
    """
    job, method = plan.job, method_of(plan)
    links = [spec.bytes_per_s for spec in parse_clients(job.clients)]

    def watch(iteration: int, error: float | None, floats: float) -> bool:
        known = "" if error is None else f", error {error:.3g}"
        progress.tick(
            iteration / job.iterations, f"iteration {iteration:,}{known}",
            iteration=iteration, error=error, up_floats=floats,
        )  # fmt: skip
        return False

    found = solve_over_sockets(
        description_of(job, method), links, watch,
        step=plan.step, tolerance=job.tolerance, iterations=job.iterations,
    )  # fmt: skip
    write_atomic(
        progress.directory / "solution.safetensors",
        pack({"z": found.point}, {"problem": str(job.problem)}),
    )
    curve = [
        {"iteration": at, "up_floats": floats, "error": error} for at, floats, error in found.curve
    ]
    write_json(progress.directory / "curve.json", curve)
    traffic, workers = found.traffic, found.workers
    missed = found.error is not None and not found.reached
    return RunOutcome(
        measured={
            "total_s": found.seconds,
            "iterations": float(found.iterations),
            "up_payload_bytes": traffic.up_payload / workers,
            "down_payload_bytes": traffic.down_payload / workers,
            "up_bytes": traffic.up_bytes / workers,
            "down_bytes": traffic.down_bytes / workers,
            "up_floats": found.up_floats,
            **({} if found.error is None else {"error": found.error}),
            **found.judged,
        },
        details={
            "curve": curve,
            "step": found.step,
            **(
                {"missed": f"error {job.tolerance:g} was not reached; it is {found.error:.3g}"}
                if missed
                else {}
            ),
        },
    )
