"""Sentences about a serving plan: its bottleneck, what would fit, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.sizes import human_bytes
from shoal.cost.configs import notes as notes_of
from shoal.cost.kernels.own import own_table
from shoal.cost.latent import latent_of
from shoal.cost.serving.simulator import Simulation
from shoal.cost.step_cost.roofline import BYTES, FILL
from shoal.ir import Arrival, Estimate, Machine, ModelShape, ServeJob
from shoal.plan.serving.choices import splits
from shoal.plan.serving.decode_measured import decoding_notes
from shoal.plan.serving.memory import free_tokens, memory_of

SHORTEST = 512
"""Positions below which it is not worth serving a model that has more."""

# Beyond this share of the time of all steps the server is never idle.
BUSY = 0.95


_BOUND = {
    "compute": "arithmetic",
    "memory": "reading weights and cache",
    "overhead": "kernel launches and work on the host",
    "communication": "communication between ranks",
}


def reason(
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
    room = f"{human_bytes(sum(memory.values()))} of {human_bytes(most)} used"
    bound = (
        f"bottleneck of a decode step of {estimate.tokens:.0f} requests "
        f"({1e3 * estimate.step_s.value:.3g} ms): {_BOUND[estimate.bound]}"
    )
    backlog = _backlog(seen, arrivals)
    if arrivals[-1].at <= arrivals[0].at:
        first = "all requests arrive at once, and the server is busy until the end"
    elif backlog > max(8, 0.05 * len(arrivals)):
        first = (
            f"overloaded: when the last of {len(arrivals)} requests arrives, {backlog} wait for "
            f"their first token; the queue grows with time"
        )
    elif busy < BUSY:
        first = f"limited by arrivals: the server is idle {100 * (1 - busy):.0f} % of the time"
    else:
        first = "the server keeps up with the arrivals and is rarely idle"
    return f"{first}; {bound}; {room}"


def _backlog(seen: Simulation, arrivals: Sequence[Arrival]) -> int:
    """Requests without a first token when the last one comes; 0 if all come at once."""
    last = arrivals[-1].at
    return sum(one.first > last for one in seen.served) if last > arrivals[0].at else 0


def seen_notes(job: ServeJob, seen: Simulation) -> tuple[str, ...]:
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


def misfit(memory: dict[str, float], most: float) -> str:
    """What a rank would fill, and what it may."""
    parts = ", ".join(f"{cause} {size / 1e9:.2f}" for cause, size in memory.items())
    return (
        f"does not fit: {human_bytes(sum(memory.values()))} ({parts}) of {human_bytes(most)} usable"
    )


def remedies(
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
        f"unchanged, it needs a device with {human_bytes(needed / FILL[machine.device.kind])} for "
        f"requests of {longest} tokens; one of {machine.name} has {human_bytes(have)}"
    )
    return tuple(remedies)


def job_notes(job: ServeJob, machine: Machine, shape: ModelShape) -> tuple[str, ...]:
    """What the figures leave out, before anything is simulated."""
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
            "disagg: the numbers are for one engine that computes both phases; --slo prices "
            "instances by phase"
        )
    if shape.attention not in ("MHA", "GQA", "MQA") and latent_of(shape) is None:
        results.append(f"{shape.attention} attention is counted as grouped-query attention")
    results += notes_of(shape)
    if machine.device.kind != "cpu":
        own, wrong = own_table(machine.device.name)
        results += [f"kernels of {own.device}: your own table, {own.source}"] if own else []
        results += [wrong] if wrong else []
    return (*results, *decoding_notes(job, machine))
