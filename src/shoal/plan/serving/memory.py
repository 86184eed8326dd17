"""Memory of a serving job on one rank: what lies there by cause, and how large a cache fits.

Ranks of a layer hold its heads and columns, ranks of the pipeline their layers; the ranks of a
CPU share its memory. With fewer heads of keys and values than ranks, some ranks hold the same.
"""

from __future__ import annotations

import math

from shoal.core.parts import table
from shoal.cost.arithmetic import block_weights, expert_parameters, parameters
from shoal.cost.latent import latent_of
from shoal.cost.price.rates import RankRates
from shoal.cost.step_cost.roofline import BYTES, FILL, RUNTIME_BYTES, activation_bytes
from shoal.ir import Expectation, Machine, ModelShape, Parallel, ServeJob, SpeculationEstimator
from shoal.ir.weight_formats import weight_format


def slot_length(job: ServeJob) -> float:
    """Most tokens of a request by the job's cache bookkeeping alone: those of a slot, or no end."""
    return float(getattr(table("kv").build(job.kv, where="kv"), "max_len", math.inf))


def token_bytes(job: ServeJob, shape: ModelShape, precision: str) -> float:
    """Bytes of the keys and values of one token on a rank of the job."""
    split = job.parallel
    if latent := latent_of(shape):
        # All heads share one compressed key, which every rank of a layer holds.
        width = latent.kv + latent.rotary
        form = table("kv_format").build(job.kv_format, where="kv_format")
        each = float(form.token_bytes(width, dtype_bytes=int(BYTES[precision])))
        return shape.num_layers * each / split.pp
    heads = max(1, shape.num_kv_heads // split.tp) * shape.architecture.streams.num
    return 2.0 * shape.num_layers * heads * head_bytes(job, shape, precision) / split.pp


def head_bytes(job: ServeJob, shape: ModelShape, precision: str) -> float:
    """Bytes of the key or the value of one token and head, in the job's format of the cache."""
    form = table("kv_format").build(job.kv_format, where="kv_format")
    return float(form.token_bytes(shape.head_dim, dtype_bytes=int(BYTES[precision])))


def weight_bytes(job: ServeJob, precision: str) -> float:
    """Bytes of a weight of a block's matrices, in the job's format of weights."""
    if job.weights == "plain":
        return BYTES[precision]
    return weight_format(job.weights).bits / 8


def memory_of(
    job: ServeJob, shape: ModelShape, machine: Machine, precision: str, longest: int
) -> tuple[dict[str, float], float, bool]:
    """(bytes of a rank by cause, bytes that it may fill, whether they are enough)."""
    memory = fixed_memory(job, shape, machine, precision)
    free = free_tokens(job, shape, machine, precision)
    groups = job.parallel.dp
    most_tokens = groups * job.max_running * longest
    wanted = job.kv_tokens or max(min(most_tokens, free), groups * _least(job, longest))
    memory["cache"] = wanted * token_bytes(job, shape, precision) / groups
    if _caches(job, machine) == 2:
        memory["host"] = memory["cache"]
    most = fillable(job, machine)
    return memory, most, sum(memory.values()) <= most


def fixed_memory(
    job: ServeJob, shape: ModelShape, machine: Machine, precision: str
) -> dict[str, float]:
    """Bytes of a rank by cause, the cache still empty."""
    split = job.parallel
    requests = min(job.max_running, job.max_step_tokens)
    # The host tier of a CPU lies in the memory that the device fills too.
    host = job.host_tokens or 0 if machine.device.kind == "cpu" else 0
    drafter = expectation(job)
    packed = block_weights(shape)
    plain = parameters(shape) - packed
    weights = plain * BYTES[precision] + packed * weight_bytes(job, precision)
    # Groups with attention of their own share the experts alone.
    shared = expert_parameters(shape) * weight_bytes(job, precision)
    return {
        "weights": (weights - shared) * split.dp / split.world + shared / split.world,
        "cache": 0.0,
        "activations": activation_bytes(shape, job.max_step_tokens, requests, precision) / split.tp,
        "runtime": RUNTIME_BYTES[machine.device.kind],
        **({"drafter": drafter.weight_bytes} if drafter is not None else {}),
        **({"host": host * token_bytes(job, shape, precision)} if host else {}),
    }


def expectation(job: ServeJob) -> Expectation | None:
    """What the drafter of a job is expected to do; None without guesses.

    Raises:
        ShoalError: its files are missing or damaged.
    """
    if job.speculative is None:
        return None
    part: SpeculationEstimator = table("speculative").build(job.speculative, where="speculative")
    return part.expects()


def _caches(job: ServeJob, machine: Machine) -> int:
    """How many times the memory of a device holds as much as the cache: a host tier doubles it."""
    doubled = job.host_tokens is None and job.host_tokens_of(1) > 0
    return 2 if doubled and machine.device.kind == "cpu" else 1


def fillable(job: ServeJob, machine: Machine) -> float:
    """Bytes of a device that one rank of a plan may fill."""
    ranks = Parallel(tp=job.parallel.world * job.replicas)
    capacity = RankRates(machine, ranks, job.threads).capacity_bytes
    return FILL[machine.device.kind] * capacity


def free_tokens(job: ServeJob, shape: ModelShape, machine: Machine, precision: str) -> int:
    """Tokens of the largest cache that fits, in whole blocks; 0 or less if there is no room."""
    free = fillable(job, machine) - sum(fixed_memory(job, shape, machine, precision).values())
    size = _unit(job)
    token = token_bytes(job, shape, precision) * _caches(job, machine)
    return math.floor(free / token / size) * size * job.parallel.dp


def _least(job: ServeJob, longest: int) -> int:
    """Tokens of the smallest cache that serves a request of full length, others' memory with it."""
    size = _unit(job)
    instances = int(getattr(table("kv").build(job.kv, where="kv"), "instances", 1))
    return -(-longest // instances // size) * size


def block_size(job: ServeJob) -> int:
    """Tokens of a block of the job's cache bookkeeping; 1 for one that has no blocks."""
    return int(getattr(table("kv").build(job.kv, where="kv"), "block_size", 1))


def _unit(job: ServeJob) -> int:
    """Tokens of what the job's cache is whole multiples of: slots, or blocks."""
    slot = slot_length(job)
    return int(slot) if math.isfinite(slot) else block_size(job)
