"""Words of a serving plan: what binds it, what would fit, what a reader should know."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cost.configs import notes as notes_of
from shoal.cost.gpu.spec import latent_of
from shoal.cost.serving.simulator import Simulation
from shoal.cost.step_cost.roofline import BYTES
from shoal.ir import Arrival, Estimate, Machine, ModelShape, ServeJob
from shoal.plan.serving.choices import splits
from shoal.plan.serving.decode_measured import decoding_notes
from shoal.plan.serving.memory import FILL, free_tokens, memory_of

__all__ = ["SHORTEST", "job_notes", "misfit", "reason", "remedies", "seen_notes"]

SHORTEST = 512
"""Positions below which it is not worth serving a model that has more."""

# Beyond this share of the time in steps the server is never idle.
BUSY = 0.95


_BOUND = {
    "compute": "arithmetic",
    "memory": "reading weights and cache",
    "overhead": "launching operators and work on the host",
    "communication": "what the ranks send each other",
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
        f"does not fit: {sum(memory.values()) / 1e9:.2f} GB ({parts}) of {most / 1e9:.2f} GB that "
        "may be filled"
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
        f"as it is, it needs a device with {needed / FILL[machine.device.kind] / 1e9:.1f} GB for "
        f"requests of {longest} tokens; one of {machine.name} has {have / 1e9:.1f} GB"
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
            "disagg: figures are those of one engine that computes both phases; --slo prices "
            "instances by phase"
        )
    if shape.attention not in ("MHA", "GQA", "MQA") and latent_of(shape) is None:
        results.append(f"{shape.attention} attention is counted as grouped-query attention")
    results += notes_of(shape)
    return (*results, *decoding_notes(job, machine))
