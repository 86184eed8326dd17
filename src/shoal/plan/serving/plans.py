"""Plans of serving jobs: how large the cache is, how fast the workload is served, what binds.

The workload is simulated with the scheduler and the bookkeeping that the job names, three
times: with the predicted cost of a step, and with the ends of its interval. Latencies
under load do not grow in proportion to a step, so the interval of a latency is what the
slower and the faster simulation give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from shoal.core.errors import PlanError, ServeError, require
from shoal.core.traits import traits
from shoal.cost.arithmetic import flops_per_token
from shoal.cost.calibration import corrected, corrected_latencies
from shoal.cost.serving.simulator import Simulation
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.accelerated import AcceleratedStepCost
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.cost.step_cost.predicted import PredictedStepCost
from shoal.cost.workloads.describe import sentence
from shoal.ir import (
    Arrival,
    Estimate,
    Interval,
    Machine,
    ModelShape,
    ServeJob,
    ServePlan,
    ServeWork,
    StepCost,
)
from shoal.plan.defaults import settled_serving
from shoal.plan.emit.expressed import refuses
from shoal.plan.serving.choices import alternatives, check_split, offered, splits
from shoal.plan.serving.diffusion import usual_pass
from shoal.plan.serving.inputs import arrivals_of, positions, precision_of
from shoal.plan.serving.memory import free_tokens, memory_of, token_bytes
from shoal.plan.serving.simulation import at_pace, simulate_plan, step_cost_of
from shoal.plan.serving.table import rank
from shoal.plan.serving.wording import SHORTEST, job_notes, misfit, reason, remedies, seen_notes

# Half-widths of the 90 % interval of a step, as shares: a roofline of declared rates, one of
# probed rates, kernels that were measured on such a device (nine of ten measured runs of models
# that set no constant lie closer), and the least for a fit, whose own errors count beside it.
SPREAD = {"declared": 0.6, "emulated": 0.6, "probed": 0.4, "kernels": 0.33, "fitted": 0.1}


@dataclasses.dataclass(frozen=True)
class _Served:
    """A plan's workload as it was simulated, for the ends of its intervals."""

    cost: StepCost
    spread: float
    arrivals: Sequence[Arrival]
    seen: Simulation

    def predicted(self, plan: ServePlan) -> dict[str, Interval]:
        """The quantities between those of a slower and a faster simulation."""
        ends = [
            at_pace(plan.job, plan.machine, self.cost, self.arrivals, self.seen, factor)
            for factor in (1 / (1 + self.spread), 1 + self.spread)
        ]
        predicted = {
            name: Interval(
                value=value,
                low=min([value, *(end[name] for end in ends)]),
                high=max([value, *(end[name] for end in ends)]),
            )
            for name, value in self.seen.quantities().items()
        }
        return corrected_latencies(predicted, plan.machine, plan.job.engine, plan.job.model)


def plan_serve(
    job: ServeJob,
    machine: Machine,
    *,
    cost: StepCost | None = None,
    trace: Sequence[Arrival] | None = None,
    requests: int | None = None,
) -> ServePlan:
    """Size the cache, simulate the workload and say what it will be like; needs no torch.

    Args:
        job: what to serve; what it leaves open is chosen here.
        machine: the machine; as many of its devices are used as all replicas have ranks.
        cost: seconds of a step, through all stages; None predicts them from the machine's rates,
            and corrects latencies by the machine's calibration.
        trace: what arrives; None takes the job's workload.
        requests: how many of the workload's; None takes its own number.

    Raises:
        ModelError: there is no such model.
        PlanError: a limit that the model or the workload cannot keep.
        MachineError: the machine has no value for a required rate.
        DataError: a trace that cannot be read.
        ConfigError: an option of a part is wrong.
    """

    def arrive(concrete: ServeJob, shape: ModelShape) -> Sequence[Arrival]:
        return arrivals_of(concrete, shape, count=requests) if trace is None else list(trace)

    plan, served = _simulated(job, machine, arrive, cost)
    return _with_ends(plan, served)


def _with_ends(plan: ServePlan, served: _Served | None) -> ServePlan:
    """The plan with the ends of its intervals; one that does not fit has none."""
    if served is None:
        return plan
    return plan.model_copy(update={"predicted": served.predicted(plan)})


def _simulated(
    job: ServeJob,
    machine: Machine,
    arrive: Callable[[ServeJob, ModelShape], Sequence[Arrival]],
    cost: StepCost | None = None,
) -> tuple[ServePlan, _Served | None]:
    """A plan whose intervals are their values, and what was simulated for it.

    ``arrive`` says what comes, of the concrete job and its shape.
    """
    job = settled_serving(job, machine)
    shape = resolve(job.model)
    precision = precision_of(job)
    check_split(job, shape, machine)
    if cost is not None:
        machine = machine.model_copy(update={"calibration": None})
    masked = shape.family == "mdlm"
    require(
        ("whole_blocks" in traits("decode", job.decode)) == masked,
        "decode",
        job.decode.name,
        expected=f"{'diffusion' if masked else 'autoregressive'} for {shape.name}",
        hint="models of family mdlm are decoded by diffusion, and no others",
        error=PlanError,
    )
    longest = positions(job, shape)
    memory, most, fits = memory_of(job, shape, machine, precision, longest)
    notes = job_notes(job, machine, shape)
    if not fits and job.max_position is None and job.kv_tokens is None:
        # The cache cannot hold a request as long as the model allows; a shorter one will do.
        shorter = free_tokens(job, shape, machine, precision)
        if shorter >= min(longest, SHORTEST):
            notes = (
                f"max_position = {shorter}: the memory does not hold a request of the model's "
                f"{longest} tokens",
                *notes,
            )
            longest = shorter
            memory, most, fits = memory_of(job, shape, machine, precision, longest)
    kv_tokens = max(1, round(memory["cache"] / token_bytes(job, shape, precision)))
    concrete = ServeJob.model_validate(
        {
            **job.model_dump(),
            "precision": precision,
            "kv_tokens": kv_tokens,
            "host_tokens": job.host_tokens_of(kv_tokens),
            "threads": _threads(job, machine),
            "max_position": longest,
        }
    )
    priced = step_cost_of(concrete, machine)
    model = cost or priced
    spread = _spread(machine, cost, priced)
    if not fits:
        unfit = ServePlan(
            job=concrete,
            machine=machine,
            shape=shape,
            estimate=_decode_step(concrete, shape, priced, model, spread, memory, longest // 2),
            fits=False,
            why=misfit(memory, most),
            notes=(*remedies(job, shape, machine, precision, longest, most), *notes),
        )
        return unfit, None
    arrivals = arrive(concrete, shape)
    require(
        bool(arrivals), "trace", len(arrivals), expected="at least one request", hint="add some"
    )
    seen = simulate_plan(concrete, machine, model, arrivals)
    context = round(sum(len(a.prompt) + a.output_tokens / 2 for a in arrivals) / len(arrivals))
    # Requests that generate while a replica computes, in the mean.
    decoding_s = sum(one.finish - one.first for one in seen.served)
    running = decoding_s / max(seen.busy_s, 1e-9) / concrete.replicas
    estimate = _decode_step(concrete, shape, priced, model, spread, memory, context, running)
    predicted = {name: Interval.exact(value) for name, value in seen.quantities().items()}
    plan = ServePlan(
        job=concrete,
        machine=machine,
        shape=shape,
        estimate=corrected(estimate, machine, job.engine, "tpot", job.model),
        predicted=corrected_latencies(predicted, machine, job.engine, job.model),
        why=reason(concrete, estimate, seen, arrivals, memory, most),
        notes=(sentence(arrivals, seed=job.seed), *seen_notes(concrete, seen), *notes),
    )
    return plan, _Served(model, spread, arrivals, seen)


def competing(
    job: ServeJob,
    asked: ServePlan,
    *,
    drafters: Sequence[str] = (),
    divide: bool = True,
    most: int | None = None,
) -> list[ServePlan]:
    """A plan among those that compete with it, best first.

    Args:
        job: the requested job.
        asked: its plan.
        drafters: directories of drafters that may guess.
        divide: other splits over the machine's devices compete, too.
        most: so many of them have intervals, the best ones; all if None.

    Raises:
        PlanError: a directory has no drafter, or guesses cannot be verified.
        ShoalError: a drafter's files are damaged.
    """
    machine, shape, concrete = asked.machine, resolve(job.model), asked.job
    job = settled_serving(job, machine)
    arrivals = arrivals_of(concrete, shape)
    open_job = job.model_copy(update={"max_position": concrete.max_position})
    work = ServeWork(
        shape=shape,
        job=open_job,
        arrivals=arrivals,
        room=free_tokens(job, shape, machine, concrete.precision),
        cost=step_cost_of(concrete, machine),
        drafters=tuple(drafters),
    )
    guessing = {one.options.get("path") for one in offered("speculative", work, machine)}
    for directory in drafters:
        require(
            directory in guessing,
            "--drafter",
            directory,
            expected="the directory of a drafter (drafter.json) or of a smaller model "
            "(config.json), and one engine of one rank, which verifies guesses",
            hint="train one with shoal run drafter",
            error=PlanError,
        )
    others = [*alternatives(work, machine), *(splits(job, machine) if divide else ())]
    others = [one for one in others if not refuses(one, shape, machine)]
    # All have the workload of the job; what is longer than a plan's longest request is clipped.
    arriving = {positions(concrete, shape): arrivals}

    def arrive(other: ServeJob, shape: ModelShape) -> Sequence[Arrival]:
        longest = positions(other, shape)
        if longest not in arriving:
            arriving[longest] = arrivals_of(other, shape)
        return arriving[longest]

    known: dict[str, tuple[ServePlan, _Served | None]] = {
        asked.job.model_dump_json(): (asked, None)
    }
    for other in others:
        # What a combination cannot serve, such as a request that its cache never holds.
        with contextlib.suppress(PlanError, ServeError):
            plan, served = _simulated(other, machine, arrive)
            # Two ways to ask for one job are one plan.
            known.setdefault(plan.job.model_dump_json(), (plan, served))
    ranked = rank([plan for plan, _ in known.values()])
    for place, plan in enumerate(ranked[:most]):
        ranked[place] = _with_ends(*known[plan.job.model_dump_json()])
    return ranked


def _threads(job: ServeJob, machine: Machine) -> int:
    """Threads of a rank."""
    if machine.device.kind != "cpu":
        return 0
    cores = machine.device.num_cores or 1
    world = job.parallel.world
    alone = job.threads_of(cores) if world == 1 else max(1, cores // job.replicas // world)
    return job.threads or alone


def _spread(machine: Machine, cost: StepCost | None, priced: PredictedStepCost) -> float:
    noise = 2 * (machine.noise or 0.0)
    if cost is None:
        known = isinstance(priced, AcceleratedStepCost) and priced.measured
        return math.hypot(SPREAD["kernels" if known else machine.provenance], noise)
    own = cost.error_p90 if isinstance(cost, FittedStepCost) else 0.0
    return math.hypot(max(SPREAD["fitted"], own), noise)


def _decode_step(
    job: ServeJob,
    shape: ModelShape,
    priced: PredictedStepCost,
    cost: StepCost,
    spread: float,
    memory: dict[str, float],
    context: int,
    running: float = math.inf,
) -> Estimate:
    """One step, or pass, of ``running`` requests, or of as many as the limits and cache allow.

    The shares of its causes are those of the rates, whatever the source of its time.
    """
    assert job.kv_tokens is not None
    most = job.parallel.dp * min(job.max_running, job.max_step_tokens)
    number = max(1, round(min(most, job.kv_tokens // (context + 1), running)))
    blocks = "whole_blocks" in traits("decode", job.decode)
    one = usual_pass(job, context) if blocks else (context, 1)
    chunks = [one] * number
    seconds = cost.seconds(chunks)
    terms = priced.terms(chunks)
    factor = seconds / terms.total
    causes = {
        "matmul": factor * terms.matmul,
        "attention": factor * terms.attention,
        "memory": factor * terms.memory,
        "overhead": factor * terms.overhead,
        **({"communication": factor * terms.communication} if terms.communication else {}),
    }
    # A decode's attention reads keys and values: memory, not arithmetic, limits it.
    groups = {
        "compute": causes["matmul"],
        "memory": causes["memory"] + causes["attention"],
        "overhead": causes["overhead"],
        "communication": causes.get("communication", 0.0),
    }
    return Estimate(
        step_s=Interval.around(seconds, spread),
        terms_s=causes,
        memory_bytes=memory,
        flops=number * one[1] * flops_per_token(shape, max(1, 2 * context), training=False),
        tokens=float(number),
        bound=max(groups, key=lambda name: groups[name]),
    )
