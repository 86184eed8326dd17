"""When nothing fits: the smallest change that would."""

from __future__ import annotations

from shoal.core.errors import ShoalError
from shoal.core.sizes import human_bytes
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.memory import tier_bytes
from shoal.cost.training.step import Pricer
from shoal.ir import Link, Machine, ModelShape, TrainJob
from shoal.plan.strategy.beyond import NONE, all_ways
from shoal.plan.strategy.bounded import best_of
from shoal.plan.strategy.judge import Judged, fits, rank, usable_bytes

# A link assumed between nodes that a description of one node does not mention.
ASSUMED_NODE_LINK = Link(scope="node", bandwidth=25e9, latency_s=1e-5)
ASSUMED_DEVICE_LINK = Link(scope="device", bandwidth=25e9, latency_s=1e-5)
OPEN = ("microbatch", "recompute", "shard", "base", "precision", "parallel")
WORDS = {
    "microbatch": lambda job: f"microbatch: {job.microbatch}",
    "recompute": lambda job: f"recompute: {job.recompute}",
    "shard": lambda job: f"shard: {job.shard}",
    "base": lambda job: f"base: {job.base}",
    "precision": lambda job: f"precision: {job.precision}",
    "parallel": lambda job: (
        f"parallel: dp={job.parallel.dp} tp={job.parallel.tp} pp={job.parallel.pp}"
    ),
}


def remedies(
    job: TrainJob, shape: ModelShape, machine: Machine, nearest: Judged
) -> tuple[str, ...]:
    """Sentences: by how much the nearest plan misses, and what would fit.

    Changes are tried in the order of how little they ask: one stated choice left open,
    two, all of them; then more devices; then shorter sequences and a smaller batch.
    """
    cost = nearest[1]
    room = usable_bytes(nearest[0], machine)
    largest = max(cost.memory_bytes, key=lambda cause: cost.memory_bytes[cause])
    need = tier_bytes(nearest[0], machine, cost.memory_bytes)["device"]
    remedies = [
        f"it does not fit: a rank needs {human_bytes(need)} and may fill "
        f"{human_bytes(room)}; the largest part is {largest} with "
        f"{human_bytes(cost.memory_bytes[largest])}"
    ]
    for would in (
        _opened(job, shape, machine),
        *_offloaded(job, shape, machine),
        _more_devices(job, shape, machine),
        _smaller(job, shape, machine),
    ):
        if would:
            remedies.append(f"this would: {would}")
    if len(remedies) == 1:
        remedies.append("no option that was tried would fit; choose a smaller model")
    return tuple(remedies)


def _best(job: TrainJob, shape: ModelShape, machine: Machine) -> Judged | None:
    """The fastest plan that fits, or None."""
    try:
        result = best_of(job, shape, machine, 1, Pricer(machine)).priced
    except ShoalError:  # the change makes no legal job, so it is no remedy
        return None
    best = rank(result, machine)[:1]
    return best[0] if best and fits(best[0][0], machine, best[0][1]) else None


def _open(job: TrainJob, names: tuple[str, ...]) -> TrainJob:
    """The job as if these fields had not been stated."""
    raw = {
        key: value
        for key, value in job.model_dump(mode="json").items()
        if key in job.model_fields_set and key not in names
    }
    return TrainJob.model_validate(raw)


def _changes(before: TrainJob, after: TrainJob, names: tuple[str, ...]) -> str:
    return ", ".join(
        WORDS[name](after) for name in names if getattr(before, name) != getattr(after, name)
    )


def _opened(job: TrainJob, shape: ModelShape, machine: Machine) -> str:
    stated = tuple(
        name
        for name in OPEN
        if name in job.model_fields_set and (name != "microbatch" or job.microbatch is not None)
    )
    attempts: list[tuple[str, ...]] = [(name,) for name in stated]
    attempts += [(a, b) for i, a in enumerate(stated) for b in stated[i + 1 :]]
    if len(stated) > 2:
        attempts.append(stated)
    for names in attempts:
        if "parallel" in names and "shard" in stated and "shard" not in names:
            continue
        try:
            opened = _open(job, names)
        except ShoalError:  # the remaining choices contradict each other
            continue
        item = _best(opened, shape, machine)
        if item is not None:
            return _changes(job, item[0], names)
    return ""


def _offloaded(job: TrainJob, shape: ModelShape, machine: Machine) -> list[str]:
    """Every part by which some of the state lies elsewhere than on the device, fastest first."""
    return [
        f"{way.spelled} ({way.best[1].step_s.value:.3g} s a step)"
        for way in all_ways(job, shape, machine)
        if way.fits and way.best is not None and way.name != NONE
    ]


def enlarged(machine: Machine, factor: int) -> Machine:
    """The same machine with ``factor`` times the devices."""
    links = {link.scope: link for link in machine.links}
    if machine.device.kind == "gpu" and machine.nodes == 1:
        inside = min(8, machine.devices_per_node * factor)
        if inside % machine.devices_per_node == 0:
            factor_inside = inside // machine.devices_per_node
        else:
            factor_inside, inside = 1, machine.devices_per_node
        rest = -(-factor // factor_inside)
        links.setdefault("device", ASSUMED_DEVICE_LINK)
    else:
        inside, rest = machine.devices_per_node, factor
    if machine.nodes * rest > 1:
        links.setdefault("node", ASSUMED_NODE_LINK)
    return machine.model_copy(
        update={
            "nodes": machine.nodes * rest,
            "devices_per_node": inside,
            "links": tuple(links.values()),
        }
    )


def _more_devices(job: TrainJob, shape: ModelShape, machine: Machine) -> str:
    opened = _open(job, OPEN)
    for factor in (2, 4, 8, 16, 32, 64):
        larger = enlarged(machine, factor)
        if larger.num_devices > 1024:
            break
        if opened.global_batch % larger.num_devices and larger.device.kind == "cpu":
            continue
        item = _best_fast(opened, shape, larger)
        if item is not None:
            names = ("parallel", "shard", "base", "recompute", "microbatch")
            how = _changes(opened, item[0], names)
            return f"{larger.num_devices} devices of this kind ({how})"
    return ""


def _best_fast(job: TrainJob, shape: ModelShape, machine: Machine) -> Judged | None:
    """Like :func:`_best`, for the thriftiest choices only."""
    thrifty = TrainJob.model_validate(
        {
            **{
                key: value
                for key, value in job.model_dump(mode="json").items()
                if key in job.model_fields_set
            },
            "microbatch": 1,
            "recompute": "full",
        }
    )
    return _best(thrifty, shape, machine)


def _smaller(job: TrainJob, shape: ModelShape, machine: Machine) -> str:
    seq_len = job.seq_len
    stated = job.model_fields_set & {"microbatch", "recompute"}
    while seq_len >= 256:
        seq_len //= 2
        shorter = job.model_copy(update={"seq_len": seq_len})
        # Where nothing fits with the least memory, the fastest plan need not be looked for.
        if not stated and _best_fast(shorter, shape, machine) is None:
            continue
        item = _best(shorter, shape, machine)
        if item is not None:
            return f"seq_len: {seq_len}, microbatch: {microbatch_of(item[0])}"
    return ""
