"""Plans of serving jobs: how large the cache is, how fast the workload is served, what binds.

The workload is simulated with the scheduler and the bookkeeping that the job names, three
times: with the predicted cost of a step, and with the ends of its interval. Latencies
under load do not grow in proportion to a step, so the interval of a latency is what the
slower and the faster simulation give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from shoal.core.errors import PlanError, ServeError, require
from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.cost.arithmetic import flops_per_token
from shoal.cost.price.host_link import host_link
from shoal.cost.price.rates import RankRates
from shoal.cost.serving.fleet import SimulatedInstance, simulate_fleet
from shoal.cost.serving.simulator import Simulation, Speculation, simulate, simulate_ahead
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.cost.step_cost.lending import LendingStepCost
from shoal.cost.step_cost.roofline import BYTES, Roofline
from shoal.cost.step_cost.sharded import ShardedStepCost
from shoal.cost.workloads.describe import sentence
from shoal.ir import (
    Arrival,
    Estimate,
    HostLink,
    Interval,
    Machine,
    ModelShape,
    Parallel,
    Scheduler,
    SchedulerLimits,
    ServeJob,
    ServePlan,
    ServeWork,
    StepCost,
)
from shoal.plan.batching.balanced import Balanced
from shoal.plan.batching.cache.distributed import Distributed
from shoal.plan.batching.common import Queues
from shoal.plan.batching.schedulers.ahead import AheadScheduler, OpenScheduler
from shoal.plan.serving.choices import alternatives, check_split, offered, splits
from shoal.plan.serving.decode_measured import decoding_notes
from shoal.plan.serving.diffusion import simulate_passes, usual_pass
from shoal.plan.serving.lending import simulate_lending
from shoal.plan.serving.memory import (
    FILL,
    block_size,
    expectation,
    free_tokens,
    head_bytes,
    memory_of,
    slot_length,
    token_bytes,
    weight_bytes,
)
from shoal.plan.serving.table import rank
from shoal.plan.trees.drafting import PredictedRows, ProfitableDrafting

__all__ = [
    "arrivals_of",
    "build_scheduler",
    "competing",
    "plan_serve",
    "positions",
    "precision_of",
    "sharded_costs",
    "simulate_plan",
]

# Half-widths of the 90 % interval of a step, as shares: a roofline of declared rates, one of
# probed rates, and the least for a fit, whose own errors count beside it.
SPREAD = {"declared": 0.6, "emulated": 0.6, "probed": 0.4, "fitted": 0.1}
# Positions below which it is not worth serving a model that has more.
SHORTEST = 512
# A message to a process of the same host and its answer, s.
HOP_S = 1e-4
# Beyond this share of the time in steps the server is never idle.
BUSY = 0.95


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A cost times a factor."""

    cost: StepCost
    factor: float

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.factor * self.cost.seconds(chunks)


def precision_of(job: ServeJob) -> str:
    """fp32 or bf16: the job's own, or that of the model's files, or that of its kind.

    A shipped shape has no files: models of the zoo are saved in fp32, the others in bf16.

    Raises:
        ModelError: the model is none of those that can be named.
    """
    if job.precision != "auto":
        return job.precision
    path = Path(job.model).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        resolve(job.model)  # complains about a file that is no configuration
        raw = json.loads(config.read_text(encoding="utf-8"))
        named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        return "fp32" if named == "float32" else "bf16"
    return "fp32" if resolve(job.model).family in ("Shoal", "mdlm") else "bf16"


def arrivals_of(job: ServeJob, shape: ModelShape, *, count: int | None = None) -> list[Arrival]:
    """The job's workload for a model of this shape.

    Raises:
        DataError: a trace that cannot be read.
        ConfigError: a workload that does not go with the model.
    """
    arrivals: list[Arrival] = (
        table("workload")
        .build(job.workload, where="workload")
        .arrivals(
            count=count,
            vocab_size=shape.vocab_size,
            max_position=positions(job, shape),
            seed=job.seed,
        )
    )
    return arrivals


def positions(job: ServeJob, shape: ModelShape) -> int:
    """Most tokens of one request.

    Raises:
        PlanError: more than the model was made for.
    """
    wanted = job.max_position or int(min(shape.max_position, slot_length(job)))
    require(
        2 <= wanted <= shape.max_position,
        "max_position",
        wanted,
        expected=f"2 to {shape.max_position}, the longest that {shape.name} was made for",
        error=PlanError,
    )
    return wanted


def build_scheduler(
    job: ServeJob, *, link: HostLink | None = None, cost: StepCost | None = None
) -> Scheduler:
    """The scheduler of a concrete job, with its bookkeeping and without requests.

    Args:
        job: with ``kv_tokens`` and ``max_position``.
        link: between cache and host, where it is known.
        cost: seconds of a step, for ``preempt = auto``.

    Raises:
        PlanError: the job leaves ``kv_tokens`` or ``max_position`` open.
        ConfigError: an option of a part is wrong.
    """
    if job.kv_tokens is None or job.max_position is None:
        raise PlanError(
            "kv_tokens and max_position: expected numbers in the job of a scheduler; plan it first"
        )
    kv = table("kv").build(job.kv, where="kv").build(job.kv_tokens)
    limits = SchedulerLimits(
        max_running=job.max_running,
        max_step_tokens=job.max_step_tokens,
        max_position=job.max_position,
    )
    preemption = (
        table("preempt")
        .build(job.preempt, where="preempt")
        .build(kv, limits, host_tokens=job.host_tokens_of(job.kv_tokens), link=link, cost=cost)
    )
    part = table("scheduler").build(job.scheduler, where="scheduler")
    scheduler: Scheduler = part.build(kv, limits, preemption)
    return scheduler


def simulate_plan(
    job: ServeJob, machine: Machine, cost: StepCost, arrivals: Sequence[Arrival]
) -> Simulation:
    """Serve ``arrivals`` in virtual time, as a concrete job says.

    Args:
        job: with ``kv_tokens``, ``max_position`` and a precision.
        machine: between whose memories caches are swapped.
        cost: seconds of a step.
        arrivals: what comes.

    Raises:
        PlanError: the job leaves a limit open.
        ServeError: a request that can never run.
    """
    link = host_link(machine, resolve(job.model), job.precision, block_size(job))
    split = job.parallel
    if "whole_blocks" in traits("decode", job.decode):
        return simulate_passes(job, cost, arrivals)
    if "lends_blocks" in traits("kv", job.kv):
        return _lending(job, cost, arrivals, link)
    if job.replicas > 1:
        balancer = table("balancer").build(job.balancer, where="balancer").build()
        replicas = [
            SimulatedInstance(build_scheduler(job, cost=cost), cost) for _ in range(job.replicas)
        ]
        dispatcher = Balanced(balancer, job.replicas, arrivals)
        fleet = simulate_fleet(replicas, [], dispatcher, arrivals)
        return Simulation(fleet.served, busy_s=sum(fleet.busy_s) / job.replicas)
    scheduler = build_scheduler(job, link=link, cost=cost)
    if split.pp == split.depth == 1:
        speculation = guessing(job, machine)
        if speculation is not None:
            assert isinstance(scheduler, Queues)
            context = round(sum(len(one.prompt) for one in arrivals) / len(arrivals))
            costs = PredictedRows(cost, context, speculation.guess_s)
            scheduler.drafting = ProfitableDrafting(speculation.tokens, costs)
        return simulate(scheduler, cost, arrivals, link=link, speculation=speculation)
    ahead = AheadScheduler(cast(OpenScheduler, scheduler), split.depth)
    return simulate_ahead(scheduler, ahead, cost, arrivals, stages=split.pp)


def guessing(job: ServeJob, machine: Machine) -> Speculation | None:
    """What guesses of a job's drafter give, and the seconds in which its weights are read.

    Raises:
        ShoalError: the drafter's files are missing or damaged.
    """
    if job.speculative is None:
        return None
    result = expectation(job)
    assert result is not None
    rate = RankRates(machine, Parallel(), job.threads).stream_curve()(max(1.0, result.weight_bytes))
    return Speculation(result.tokens, result.reads * result.weight_bytes / rate)


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
        cost: seconds of a step, through all stages; None predicts them from the machine's rates.
        trace: what arrives; None takes the job's workload.
        requests: how many of the workload's; None takes its own number.

    Raises:
        ModelError: there is no such model.
        PlanError: a limit that the model or the workload cannot keep.
        MachineError: the machine lacks a rate that is needed.
        DataError: a trace that cannot be read.
        ConfigError: an option of a part is wrong.
    """
    shape = resolve(job.model)
    precision = precision_of(job)
    check_split(job, shape, machine)
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
    notes = _notes(job, machine, shape)
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
    split = concrete.parallel
    priced = sharded_costs(concrete, machine)(split.tp, split.pp)
    model = cost or priced
    spread = _spread(machine, cost)
    if not fits:
        return ServePlan(
            job=concrete,
            machine=machine,
            shape=shape,
            estimate=_decode_step(concrete, shape, priced, model, spread, memory, longest // 2),
            fits=False,
            why=_misfit(memory, most),
            notes=(*_remedies(job, shape, machine, precision, longest, most), *notes),
        )
    arrivals = arrivals_of(concrete, shape, count=requests) if trace is None else list(trace)
    require(
        bool(arrivals), "trace", len(arrivals), expected="at least one request", hint="add some"
    )
    seen = simulate_plan(concrete, machine, model, arrivals)
    ends = [
        simulate_plan(concrete, machine, _Scaled(model, factor), arrivals).quantities()
        for factor in (1 / (1 + spread), 1 + spread)
    ]
    context = round(sum(len(a.prompt) + a.output_tokens / 2 for a in arrivals) / len(arrivals))
    estimate = _decode_step(concrete, shape, priced, model, spread, memory, context)
    return ServePlan(
        job=concrete,
        machine=machine,
        shape=shape,
        estimate=estimate,
        predicted={
            name: Interval(
                value=value,
                low=min(value, *(end[name] for end in ends)),
                high=max(value, *(end[name] for end in ends)),
            )
            for name, value in seen.quantities().items()
        },
        why=_why(concrete, estimate, seen, arrivals, memory, most),
        notes=(sentence(arrivals, seed=job.seed), *_seen(concrete, seen), *notes),
    )


def competing(
    job: ServeJob, asked: ServePlan, *, drafters: Sequence[str] = (), divide: bool = True
) -> list[ServePlan]:
    """A plan among those that compete with it, best first.

    Args:
        job: as it was asked for.
        asked: its plan.
        drafters: directories of drafters that may guess.
        divide: other splits over the machine's devices compete, too.

    Raises:
        PlanError: a directory has no drafter, or guesses cannot be verified.
        ShoalError: a drafter's files are damaged.
    """
    machine, shape, concrete = asked.machine, resolve(job.model), asked.job
    arrivals = arrivals_of(concrete, shape)
    split = concrete.parallel
    open_job = job.model_copy(update={"max_position": concrete.max_position})
    work = ServeWork(
        shape=shape,
        job=open_job,
        arrivals=arrivals,
        room=free_tokens(job, shape, machine, concrete.precision),
        cost=sharded_costs(concrete, machine)(split.tp, split.pp),
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
            hint="shoal run drafter trains one",
            error=PlanError,
        )
    others = [*alternatives(work, machine), *(splits(job, machine) if divide else ())]
    results = [asked]
    for other in others:
        # What a combination cannot serve, such as a request that its cache never holds.
        with contextlib.suppress(PlanError, ServeError):
            results.append(plan_serve(other, machine))
    return rank(results)


def sharded_costs(job: ServeJob, machine: Machine) -> Callable[[int, int], ShardedStepCost]:
    """(tp, pp) -> seconds of a step on that many devices, predicted from the machine's rates.

    Args:
        job: the model, and its precision.
        machine: what the devices are; an instance stays on links between devices if it can.
    """
    inside = machine.link("device") or machine.link("node") or machine.link("loopback")
    shape, precision = resolve(job.model), precision_of(job)

    @functools.cache
    def cost(tp: int, pp: int) -> ShardedStepCost:
        # Ranks of a CPU share it; devices of their own are those of the machine.
        ranks = tp * pp * job.replicas
        roofline = Roofline(
            machine,
            shape,
            precision,
            job.threads,
            ranks=ranks,
            weight_bytes=weight_bytes(job, precision),
            head_bytes=head_bytes(job, shape, precision),
        )
        return ShardedStepCost(roofline, tp, pp, inside)

    return cost


def _lending(
    job: ServeJob, cost: StepCost, arrivals: Sequence[Arrival], link: HostLink
) -> Simulation:
    """Instances that lend each other memory, each with ``kv_tokens`` of its own."""
    part = table("kv").build(job.kv, where="kv")
    assert isinstance(part, Distributed)
    assert job.kv_tokens is not None
    assert job.max_position is not None
    limits = SchedulerLimits(
        max_running=job.max_running,
        max_step_tokens=job.max_step_tokens,
        max_position=job.max_position,
    )
    block_s = link.copy_s + link.block_bytes / link.bytes_per_s
    lent = LendingStepCost(cost=cost, layers=link.layers, hop_s=HOP_S, block_s=block_s)
    scheduler = table("scheduler").build(job.scheduler, where="scheduler")
    return simulate_lending(part, job.kv_tokens, scheduler, limits, lent, arrivals)


def _threads(job: ServeJob, machine: Machine) -> int:
    """Threads of a rank."""
    if machine.device.kind != "cpu":
        return 0
    cores = machine.device.num_cores or 1
    world = job.parallel.world
    alone = job.threads_of(cores) if world == 1 else max(1, cores // job.replicas // world)
    return job.threads or alone


def _spread(machine: Machine, cost: StepCost | None) -> float:
    noise = 2 * (machine.noise or 0.0)
    if cost is None:
        return math.hypot(SPREAD[machine.provenance], noise)
    own = cost.error_p90 if isinstance(cost, FittedStepCost) else 0.0
    return math.hypot(max(SPREAD["fitted"], own), noise)


def _decode_step(
    job: ServeJob,
    shape: ModelShape,
    priced: ShardedStepCost,
    cost: StepCost,
    spread: float,
    memory: dict[str, float],
    context: int,
) -> Estimate:
    """One step, or pass, in which as many requests generate as the limits and the cache allow.

    The shares of its causes are those of the rates, whoever says how long it takes.
    """
    assert job.kv_tokens is not None
    number = max(1, min(job.max_running, job.max_step_tokens, job.kv_tokens // (context + 1)))
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


_BOUND = {
    "compute": "arithmetic",
    "memory": "reading weights and cache",
    "overhead": "launching operators and work on the host",
    "communication": "what the ranks send each other",
}


def _why(
    job: ServeJob,
    estimate: Estimate,
    seen: Simulation,
    arrivals: Sequence[Arrival],
    memory: dict[str, float],
    most: float,
) -> str:
    """What binds, in a sentence."""
    served = seen.quantities()
    busy = seen.busy_s / served["total_s"]
    room = f"{sum(memory.values()) / 1e9:.1f} of {most / 1e9:.1f} GB are filled"
    bound = (
        f"{_BOUND[estimate.bound]} binds a decode step of {estimate.tokens:.0f} requests, "
        f"{1e3 * estimate.step_s.value:.3g} ms"
    )
    backlog = _backlog(seen, arrivals)
    if arrivals[-1].at <= arrivals[0].at:
        first = "all requests come at once, and the server is busy to the end"
    elif backlog > max(8, 0.05 * len(arrivals)):
        first = (
            f"overloaded: when the last of {len(arrivals)} requests comes, {backlog} wait for "
            "their first token; the longer it goes on, the longer they wait"
        )
    elif busy < BUSY:
        first = f"arrivals bind it: the server is idle {100 * (1 - busy):.0f} % of the time"
    else:
        first = "it keeps up with the arrivals and is hardly ever idle"
    return f"{first}; {bound}; {room}"


def _backlog(seen: Simulation, arrivals: Sequence[Arrival]) -> int:
    """Requests without a first token when the last one comes; 0 if all come at once."""
    last = arrivals[-1].at
    return sum(one.first > last for one in seen.served) if last > arrivals[0].at else 0


def _seen(job: ServeJob, seen: Simulation) -> tuple[str, ...]:
    """What the simulation saw that a reader should know."""
    results = []
    cached = sum(one.n_cached for one in seen.served)
    prompts = sum(one.n_prompt for one in seen.served)
    if cached:
        results.append(f"{100 * cached / prompts:.0f} % of the prompt tokens were in the cache")
    again = sum(one.preemptions for one in seen.served)
    if again:
        results.append(
            f"the cache of {job.kv_tokens} tokens was full: requests were preempted {again} "
            f"times, by {job.preempt}; more kv_tokens or a smaller max_running avoids it"
        )
    return tuple(results)


def _misfit(memory: dict[str, float], most: float) -> str:
    parts = ", ".join(f"{cause} {size / 1e9:.2f}" for cause, size in memory.items())
    return (
        f"does not fit: {sum(memory.values()) / 1e9:.2f} GB ({parts}) of {most / 1e9:.2f} GB that "
        "may be filled"
    )


def _remedies(
    job: ServeJob, shape: ModelShape, machine: Machine, precision: str, longest: int, most: float
) -> tuple[str, ...]:
    """What would fit: the smallest changes, each tried."""
    # What a smaller cache is asked for with.
    key = "max_position" if job.kv_tokens is None else "kv_tokens"
    least = min(longest, SHORTEST)
    room = {dtype: free_tokens(job, shape, machine, dtype) for dtype in BYTES}
    remedies = []
    if precision == "fp32" and memory_of(job, shape, machine, "bf16", longest)[2]:
        remedies.append("precision = bf16 would fit")
    if room[precision] >= least:
        remedies.append(f"{key} = {room[precision]} would fit")
    elif not remedies and room["bf16"] >= least:
        remedies.append(f"precision = bf16 with {key} = {room['bf16']} would fit")
    fitting = [
        other.parallel
        for other in splits(job, machine)
        if memory_of(other, shape, machine, precision, longest)[2]
    ]
    if fitting:
        split = min(fitting, key=lambda one: (one.world, one.pp))
        names = [f"parallel.{n} = {v}" for n, v in (("tp", split.tp), ("pp", split.pp)) if v > 1]
        remedies.append(f"{' with '.join(names)} would fit")
    if job.max_position is None:
        longest = min(longest, SHORTEST)
    needed = sum(memory_of(job, shape, machine, precision, longest)[0].values())
    have = machine.device.main_memory.capacity_bytes
    remedies.append(
        f"as it is, it needs a device with {needed / FILL[machine.device.kind] / 1e9:.1f} GB for "
        f"requests of {longest} tokens; one of {machine.name} has {have / 1e9:.1f} GB"
    )
    return tuple(remedies)


def _notes(job: ServeJob, machine: Machine, shape: ModelShape) -> tuple[str, ...]:
    results = []
    world = job.parallel.world * job.replicas
    if machine.num_devices > world:
        results.append(
            f"{machine.num_devices - world} of the {machine.num_devices} devices of "
            f"{machine.name} are not used; parallel.tp and parallel.pp split a model over them, "
            "and --slo searches how to use all of them"
        )
    if job.disagg is not None:
        results.append(
            "disagg: figures are those of one engine that computes both phases; --slo prices "
            "instances by phase"
        )
    if shape.attention not in ("MHA", "GQA", "MQA"):
        results.append(f"{shape.attention} attention is counted as grouped-query attention")
    return (*results, *decoding_notes(job, machine))
