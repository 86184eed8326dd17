"""Plans of serving jobs: how large the cache is, how fast the workload is served, what binds.

The workload is simulated with the scheduler and the bookkeeping that the job names, three
times: with the predicted cost of a step, and with the ends of its interval. Latencies
under load do not grow in proportion to a step, so the interval of a latency is what the
slower and the faster simulation give.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.cost.host_link import host_link
from shoal.cost.rates import Rates
from shoal.cost.serve_sim import Simulation, simulate
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.fitted import Fitted
from shoal.cost.step_cost.lent import Lent
from shoal.cost.step_cost.roofline import (
    BYTES,
    Roofline,
    activation_bytes,
    cache_bytes_per_token,
)
from shoal.cost.workloads.describe import sentence
from shoal.ir import (
    Arrival,
    Estimate,
    HostLink,
    Interval,
    Limits,
    Machine,
    ModelShape,
    Parallel,
    Scheduler,
    ServeJob,
    ServePlan,
    StepCost,
)
from shoal.plan.batching.distributed import Distributed
from shoal.plan.lending import simulate_lending

__all__ = [
    "alternatives",
    "arrivals_of",
    "build_scheduler",
    "fillable",
    "fixed_memory",
    "plan_serve",
    "positions",
    "precision_of",
    "slot_length",
]

# Share of a device's memory that a plan may fill; the rest is for what nobody counted.
FILL = {"gpu": 0.92, "cpu": 0.85}
# What the engine's process holds before the model: framework, libraries, allocator.
RUNTIME_BYTES = {"cpu": 0.45e9, "gpu": 1.5e9}
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
    return "fp32" if resolve(job.model).family == "Shoal" else "bf16"


def arrivals_of(job: ServeJob, shape: ModelShape, *, count: int | None = None) -> list[Arrival]:
    """The job's workload for a model of this shape.

    Raises:
        DataError: a trace that cannot be read.
        ConfigError: a workload that does not go with the model.
    """
    found: list[Arrival] = (
        table("workload")
        .build(job.workload, where="workload")
        .arrivals(
            count=count,
            vocab_size=shape.vocab_size,
            max_position=positions(job, shape),
            seed=job.seed,
        )
    )
    return found


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


def slot_length(job: ServeJob) -> float:
    """Most tokens of a request by the job's cache bookkeeping alone: those of a slot, or no end."""
    return float(getattr(table("kv").build(job.kv, where="kv"), "max_len", math.inf))


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
    limits = Limits(
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
    found: Scheduler = part.build(kv, limits, preemption)
    return found


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
        machine: the machine; one device of it is used.
        cost: seconds of a step; None predicts them from the machine's rates.
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
    longest = positions(job, shape)
    memory, most, fits = _memory(job, shape, machine, precision, longest)
    notes = _notes(machine, shape)
    if not fits and job.max_position is None and job.kv_tokens is None:
        # The cache cannot hold a request as long as the model allows; a shorter one will do.
        shorter = _room(job, shape, machine, precision)
        if shorter >= min(longest, SHORTEST):
            notes = (
                f"max_position = {shorter}: the memory does not hold a request of the model's "
                f"{longest} tokens",
                *notes,
            )
            longest = shorter
            memory, most, fits = _memory(job, shape, machine, precision, longest)
    kv_tokens = max(1, int(memory["cache"] / cache_bytes_per_token(shape, precision)))
    concrete = ServeJob.model_validate(
        {
            **job.model_dump(),
            "precision": precision,
            "kv_tokens": kv_tokens,
            "host_tokens": job.host_tokens_of(kv_tokens),
            "threads": job.threads_of(machine.device.num_cores or 1)
            if machine.device.kind == "cpu"
            else 0,
            "max_position": longest,
        }
    )
    roofline = Roofline(machine, shape, precision, concrete.threads)
    model = cost or roofline
    spread = _spread(machine, cost)
    if not fits:
        return ServePlan(
            job=concrete,
            machine=machine,
            shape=shape,
            estimate=_decode_step(concrete, shape, roofline, model, spread, memory, longest // 2),
            fits=False,
            why=_misfit(memory, most),
            notes=(*_remedies(job, shape, machine, precision, longest, most), *notes),
        )
    arrivals = arrivals_of(concrete, shape, count=requests) if trace is None else list(trace)
    require(
        bool(arrivals), "trace", len(arrivals), expected="at least one request", hint="add some"
    )
    link = host_link(machine, shape, precision, _block_size(job))

    def simulated(cost: StepCost) -> Simulation:
        if concrete.kv.name == "distributed":
            return _lending(concrete, cost, arrivals, link)
        scheduler = build_scheduler(concrete, link=link, cost=cost)
        return simulate(scheduler, cost, arrivals, link=link)

    seen = simulated(model)
    ends = [
        simulated(_Scaled(model, factor)).quantities() for factor in (1 / (1 + spread), 1 + spread)
    ]
    context = round(sum(len(a.prompt) + a.output_tokens / 2 for a in arrivals) / len(arrivals))
    estimate = _decode_step(concrete, shape, roofline, model, spread, memory, context)
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


def _lending(
    job: ServeJob, cost: StepCost, arrivals: Sequence[Arrival], link: HostLink
) -> Simulation:
    """Instances that lend each other memory, each with ``kv_tokens`` of its own."""
    part = table("kv").build(job.kv, where="kv")
    assert isinstance(part, Distributed)
    assert job.kv_tokens is not None
    assert job.max_position is not None
    limits = Limits(
        max_running=job.max_running,
        max_step_tokens=job.max_step_tokens,
        max_position=job.max_position,
    )
    block_s = link.copy_s + link.block_bytes / link.bytes_per_s
    lent = Lent(cost=cost, layers=link.layers, hop_s=HOP_S, block_s=block_s)
    scheduler = table("scheduler").build(job.scheduler, where="scheduler")
    return simulate_lending(part, job.kv_tokens, scheduler, limits, lent, arrivals)


def _memory(
    job: ServeJob, shape: ModelShape, machine: Machine, precision: str, longest: int
) -> tuple[dict[str, float], float, bool]:
    """(bytes by cause, bytes that may be filled, whether they are enough)."""
    memory = fixed_memory(job, shape, machine, precision)
    room = _room(job, shape, machine, precision)
    wanted = job.kv_tokens or max(min(job.max_running * longest, room), _least(job, longest))
    memory["cache"] = wanted * cache_bytes_per_token(shape, precision)
    if _caches(job, machine) == 2:
        memory["host"] = memory["cache"]
    most = fillable(job, machine)
    return memory, most, sum(memory.values()) <= most


def fixed_memory(
    job: ServeJob, shape: ModelShape, machine: Machine, precision: str
) -> dict[str, float]:
    """Bytes by cause, the cache still empty."""
    requests = min(job.max_running, job.max_step_tokens)
    # The host tier of a CPU lies in the memory that the device fills too.
    host = job.host_tokens or 0 if machine.device.kind == "cpu" else 0
    return {
        "weights": parameters(shape) * BYTES[precision],
        "cache": 0.0,
        "activations": activation_bytes(shape, job.max_step_tokens, requests, precision),
        "runtime": RUNTIME_BYTES[machine.device.kind],
        **({"host": host * cache_bytes_per_token(shape, precision)} if host else {}),
    }


def _caches(job: ServeJob, machine: Machine) -> int:
    """How many times the memory of a device holds as much as the cache: a host tier doubles it."""
    doubled = job.host_tokens is None and job.host_tokens_of(1) > 0
    return 2 if doubled and machine.device.kind == "cpu" else 1


def fillable(job: ServeJob, machine: Machine) -> float:
    """Bytes of a device that a plan may fill."""
    capacity = Rates(machine, Parallel(), job.threads).capacity_bytes
    return FILL[machine.device.kind] * capacity


def _room(job: ServeJob, shape: ModelShape, machine: Machine, precision: str) -> int:
    """Tokens of the largest cache that fits, in whole blocks; 0 or less if there is no room."""
    free = fillable(job, machine) - sum(fixed_memory(job, shape, machine, precision).values())
    size = _unit(job)
    token = cache_bytes_per_token(shape, precision) * _caches(job, machine)
    return math.floor(free / token / size) * size


def _least(job: ServeJob, longest: int) -> int:
    """Tokens of the smallest cache that serves a request of full length."""
    size = _unit(job)
    return -(-longest // size) * size


def _block_size(job: ServeJob) -> int:
    """Tokens of a block of the job's cache bookkeeping; 1 for one that has no blocks."""
    return int(getattr(table("kv").build(job.kv, where="kv"), "block_size", 1))


def _unit(job: ServeJob) -> int:
    """Tokens of what the job's cache is whole multiples of: slots, or blocks."""
    slot = slot_length(job)
    return int(slot) if math.isfinite(slot) else _block_size(job)


def _spread(machine: Machine, cost: StepCost | None) -> float:
    noise = 2 * (machine.noise or 0.0)
    if cost is None:
        return math.hypot(SPREAD[machine.provenance], noise)
    own = cost.error_p90 if isinstance(cost, Fitted) else 0.0
    return math.hypot(max(SPREAD["fitted"], own), noise)


def _decode_step(
    job: ServeJob,
    shape: ModelShape,
    roofline: Roofline,
    cost: StepCost,
    spread: float,
    memory: dict[str, float],
    context: int,
) -> Estimate:
    """One step in which as many requests generate as the limits and the cache allow.

    The shares of its causes are the roofline's, whoever says how long it takes.
    """
    assert job.kv_tokens is not None
    number = max(1, min(job.max_running, job.max_step_tokens, job.kv_tokens // (context + 1)))
    chunks = [(context, 1)] * number
    seconds = cost.seconds(chunks)
    terms = roofline.terms(chunks)
    factor = seconds / terms.total
    causes = {
        "matmul": factor * terms.matmul,
        "attention": factor * terms.attention,
        "memory": factor * terms.memory,
        "overhead": factor * terms.overhead,
    }
    # A decode's attention reads keys and values: memory, not arithmetic, limits it.
    groups = {
        "compute": causes["matmul"],
        "memory": causes["memory"] + causes["attention"],
        "overhead": causes["overhead"],
    }
    return Estimate(
        step_s=Interval.around(seconds, spread),
        terms_s=causes,
        memory_bytes=memory,
        flops=number * flops_per_token(shape, max(1, 2 * context), training=False),
        tokens=float(number),
        bound=max(groups, key=lambda name: groups[name]),
    )


_BOUND = {
    "compute": "arithmetic",
    "memory": "reading weights and cache",
    "overhead": "launching operators and work on the host",
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
    busy = sum(step.seconds for step in seen.steps) / served["total_s"] / seen.engines
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
    found = []
    cached = sum(one.n_cached for one in seen.served)
    prompts = sum(one.n_prompt for one in seen.served)
    if cached:
        found.append(f"{100 * cached / prompts:.0f} % of the prompt tokens were in the cache")
    again = sum(one.preemptions for one in seen.served)
    if again:
        found.append(
            f"the cache of {job.kv_tokens} tokens was full: requests were preempted {again} "
            f"times, by {job.preempt}; more kv_tokens or a smaller max_running avoids it"
        )
    return tuple(found)


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
    room = {dtype: _room(job, shape, machine, dtype) for dtype in BYTES}
    found = []
    if precision == "fp32" and _memory(job, shape, machine, "bf16", longest)[2]:
        found.append("precision = bf16 would fit")
    if room[precision] >= least:
        found.append(f"{key} = {room[precision]} would fit")
    elif not found and room["bf16"] >= least:
        found.append(f"precision = bf16 with {key} = {room['bf16']} would fit")
    if job.max_position is None:
        longest = min(longest, SHORTEST)
    needed = sum(_memory(job, shape, machine, precision, longest)[0].values())
    have = machine.device.main_memory.capacity_bytes
    found.append(
        f"as it is, it needs a device with {needed / FILL[machine.device.kind] / 1e9:.1f} GB for "
        f"requests of {longest} tokens; one of {machine.name} has {have / 1e9:.1f} GB"
    )
    return tuple(found)


def _notes(machine: Machine, shape: ModelShape) -> tuple[str, ...]:
    found = []
    if machine.num_devices > 1:
        found.append(
            f"this version serves a model on one device: {machine.num_devices - 1} of the "
            f"{machine.num_devices} devices of {machine.name} are not used"
        )
    if shape.attention not in ("MHA", "GQA", "MQA"):
        found.append(f"{shape.attention} attention is counted as grouped-query attention")
    return tuple(found)


# Slots are whole multiples of so many tokens, the default size of a block.
_SLOT_STEP = 16


def alternatives(job: ServeJob, max_position: int | None = None) -> list[ServeJob]:
    """The job with every other scheduler and cache bookkeeping that needs no options.

    Args:
        job: that they compete with.
        max_position: most tokens of its requests, which all of them must be able to serve;
            slots are as long as that.
    """
    longest = max_position or job.max_position
    found = []
    for scheduler in _choices("scheduler", job.scheduler.name):
        for kv in _choices("kv", job.kv.name):
            if kv == "distributed" and kv != job.kv.name:
                continue  # further engines with memory of their own are no choice for this one
            changes: dict[str, object] = {}
            if scheduler != job.scheduler.name:
                changes["scheduler"] = scheduler
            if kv != job.kv.name:
                changes["kv"] = kv
                if kv == "slots" and longest is not None:
                    slot = -(-longest // _SLOT_STEP) * _SLOT_STEP
                    changes["kv"] = {"name": kv, "max_len": slot}
            if changes:
                changes["max_position"] = longest
                found.append(ServeJob.model_validate({**job.model_dump(), **changes}))
    return found


def _choices(kind: str, own: str) -> list[str]:
    parts = table(kind)
    return [own, *(name for name in parts if name != own and _optionless(parts.load(name)))]


def _optionless(part: type) -> bool:
    """Every option of the part has a default."""
    return all(
        option.default is not dataclasses.MISSING
        or option.default_factory is not dataclasses.MISSING
        for option in dataclasses.fields(part)
    )
