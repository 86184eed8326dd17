"""Plans of a variational inequality: every method that fits, the shortest run first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.core.errors import PlanError
from shoal.core.parts import Choice, table
from shoal.fields.federate.clients import ClientSpec, parse_clients
from shoal.fields.federate.vi.job import SolveViJob, SolveViPlan
from shoal.fields.federate.vi.protocols import ViMethod
from shoal.fields.federate.vi.setting import ViSetting, built, described_as
from shoal.fields.rates import core_share
from shoal.ir import Interval, Machine

# FLOP/s of small products in numpy and torch on a core whose rate is the second.
_SMALL, _CORE = 1e9, 1e11
# Seconds of a message at one end, and of what a place does in an iteration beside evaluations.
_MESSAGE_S, _ITERATION_S = 1.2e-4, 1.5e-4
# A worker's process.
_WORKER_BYTES = 7e7


def setting_of(job: SolveViJob, method: Choice) -> ViSetting:
    """The setting of a job."""
    return built(description_of(job, method), step=job.step, tolerance=job.tolerance,
                 iterations=job.iterations)  # fmt: skip


def description_of(job: SolveViJob, method: Choice) -> dict[str, Any]:
    """The same as JSON."""
    workers = len(parse_clients(job.clients))
    return described_as(
        job.problem, method, workers, job.compressor, job.server_compressor, job.seed
    )


def plan_solve_vi(job: SolveViJob, machine: Machine) -> list[SolveViPlan]:
    """The ways to do it, the shortest run first.

    Raises:
        ShoalError: the method or a compressor does not fit the problem, or no method does.
    """
    plans = [_plan(job, machine, choice) for choice in _methods(job, machine)]
    if not plans:
        raise PlanError(
            f"problem = {job.problem}: no method takes compressor = {job.compressor} and "
            f"server_compressor = {job.server_compressor}; give unbiased ones such as rand_k"
        )
    return [plan for _, plan in sorted(plans, key=lambda one: one[0])]


def _methods(job: SolveViJob, machine: Machine) -> Iterator[Choice]:
    if job.method is not None:
        yield job.method
        return
    work = setting_of(job, Choice(name="extragradient")).work()
    for choice, _ in table("vi_method").offered(work, machine):
        yield choice


def _plan(
    job: SolveViJob, machine: Machine, choice: Choice
) -> tuple[tuple[bool, float], SolveViPlan]:
    """A plan, and its rank: those that get there, then the quickest."""
    setting = setting_of(job, choice)
    method: ViMethod = setting.method
    step, specs = setting.checked_step(), parse_clients(job.clients)
    costs = method.costs(setting.work(), step)
    promised = costs.iterations
    most = float(job.iterations)
    iterations = most if promised is None else min(most, max(1.0, promised))
    workers = len(specs)
    rate = _SMALL * core_share(machine, _CORE)
    cores = min(max(machine.device.num_cores or 1, 1), workers)
    evaluated = costs.evaluations * (setting.operator.flops / rate)
    busy = (evaluated + _ITERATION_S + 2 * costs.exchanges * _MESSAGE_S) * workers / cores
    served = costs.exchanges * workers * _MESSAGE_S
    link = max(_link_s(spec, costs.up_bits + costs.down_bits) for spec in specs)
    seconds = iterations * (busy + served + link)
    memory = _WORKER_BYTES * (workers + 1) + 8.0 * setting.operator.size * (6 * workers)
    capacity = machine.device.main_memory.capacity_bytes
    notes = ["seconds are derived from a description of the machine"]
    if promised is None:
        notes.append(f"the method promises no rate here: {job.iterations:,} iterations are made")
    elif promised > most:
        notes.append(f"the theory asks for {promised:,.0f} iterations; {job.iterations:,} are made")
    spread = 1.0 if promised is None else 3.0
    plan = SolveViPlan(
        job=job.model_copy(update={"method": choice}),
        machine=machine,
        predicted={
            "total_s": Interval.around(seconds, max(spread, 2.0)),
            "iterations": Interval.around(iterations, spread),
            "up_payload_bytes": Interval.around(iterations * costs.up_bits / 8, spread),
            "down_payload_bytes": Interval.around(iterations * costs.down_bits / 8, spread),
            "memory_bytes": Interval.around(memory, 0.6),
        },
        planner="rates of the methods' theory",
        fits=not capacity or memory <= capacity,
        why=f"{choice}: {costs.up_bits / 8:,.0f} bytes of a worker in an iteration",
        notes=tuple(notes),
        size=setting.operator.size,
        step=step,
    )
    return (promised is not None and promised > most, seconds), plan


def _link_s(spec: ClientSpec, bits: float) -> float:
    return bits / 8 / spec.bytes_per_s if spec.bytes_per_s else 0.0
