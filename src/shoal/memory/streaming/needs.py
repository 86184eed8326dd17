"""What streamed training needs of each tier, counted before anything is allocated.

Symbols: N tokens of a micro-batch, D hidden, F feed-forward width, V vocabulary, L layers.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 3, equations 1 to 5; with this house's
states (fp32 weight, gradient and two moments: 16 bytes a parameter) and its operators' own buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cost.price.shares import microbatch_of, passes_of

if TYPE_CHECKING:
    from shoal.ir import Machine, ModelShape, Work

SMALL = 2**13
"""Elements below which a parameter stays in host memory: a transfer would be all overhead."""

_ROW = 2**14
_SECTOR = 4096
_MOST_STAGED = 4 * 2**20
# Staging buffers of parameters, of gradients with the one they are added to, of the update.
INCOMING, OUTGOING, UPDATING = 4, 3, 3
# Bounce buffers of what is swapped to a disk, each way, and their bytes.
BOUNCED, BOUNCE = 4, 2 * 2**20
# Transfers of that size by which a way is probed.
PROBED = 8
# Logits that the loss holds at a time (see shoal.model.loss).
_LOGITS = 2**24
# Scalars, norms and other small things.
_ASIDE = 2**16


@dataclass(frozen=True)
class Staging:
    """Bytes of the host that transfers go through.

    Args:
        incoming: of one buffer of parameters.
        outgoing: of one buffer of gradients.
        sub_group: elements of a sub-group.
        update: of one buffer of the update.
    """

    incoming: int
    outgoing: int
    sub_group: int
    update: int

    @classmethod
    def of(cls, largest: int, itemsize: int, states: int, sub_group_numel: int) -> Staging:
        """For parts of at most ``largest`` elements."""
        rows = -(-largest // _ROW)
        chunk = min(rows * _ROW * itemsize, _MOST_STAGED)
        sub_group = min(rows, max(1, sub_group_numel // _ROW)) * _ROW
        return cls(chunk, chunk, sub_group, sub_group * itemsize * (2 + states))

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        outgoing = (OUTGOING + 1) * self.outgoing
        return INCOMING * self.incoming + outgoing + UPDATING * self.update


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes by tier of one rank.

    Args:
        device: most at one time.
        host: most at one time.
        disk: in its file.
        fetched: bytes of parameters that the passes of a step read from disk.
        read: other bytes that a step reads from disk.
        written: bytes that a step writes there.
        moved: bytes of parameters and gradients between host and device in the passes of a step.
    """

    device: float
    host: float
    disk: float
    fetched: float
    read: float
    written: float
    moved: float


# Parameters that the host of one GPU updates in a second: Deep Optimizer States, 2024, found one to
# two billion.
HOST_OF_A_GPU = 1.5e9


def sizes(shape: ModelShape, tp: int = 1, pp: int = 1) -> list[int]:
    """Elements of the matrices of one rank, largest part of a pipeline."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    hidden = shape.hidden
    experts = max(1, shape.num_experts)
    width = shape.expert_hidden if shape.num_experts else shape.ffn_hidden
    block = [
        heads * hidden // tp,
        shape.num_heads * shape.head_dim * hidden // tp,
        experts * 2 * width * hidden // tp,
        experts * width * hidden // tp,
    ]
    tables = 1 if shape.tied else 2
    return [shape.vocab_size * hidden // tp] * tables + block * -(-shape.num_layers // pp)


def vectors(shape: ModelShape) -> list[int]:
    """Elements of what is no large matrix: norms, biases of attention, routers of experts."""
    block = [shape.hidden] * 2
    if shape.qk_norm:
        block += [shape.head_dim] * 2
    if shape.attention_bias:
        block.append((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    if shape.num_experts:
        block.append(shape.num_experts * shape.hidden)
    return [shape.hidden, *block * shape.num_layers]


def _rows(numels: list[int]) -> float:
    """Bytes of fp32 rows, each of whole sectors."""
    return float(sum(-(-4 * numel // _SECTOR) * _SECTOR for numel in numels))


def _device_bytes(work: Work, *, act: str, prefetch_numel: int) -> float:
    """Most bytes of the device at one time: an upper bound that is met where memory is short.

    The largest of three moments: the loss, with the output matrix, its gradient and the logits;
    the backward pass of the largest operator; and, with recomputation, that of a block whose
    tensors and weights are all there again.
    """
    job, shape, split = work.job, work.shape, work.job.parallel
    low = job.precision == "bf16"
    a = 2.0 if low else 4.0
    layers = -(-shape.num_layers // split.pp)
    tokens = microbatch_of(job) * job.seq_len / split.cp
    hidden, vocab = shape.hidden, shape.vocab_size / split.tp
    width = (shape.expert_hidden if shape.num_experts else shape.ffn_hidden) / split.tp
    if shape.num_experts:
        width *= shape.top_k
    heads = shape.num_heads * shape.head_dim / split.tp
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / split.tp
    stream = tokens * hidden * a
    # Both norms' inputs and outputs; q, k, v and what attention gives; gate and up, the activation
    # and the product.
    saved = 4 * stream + tokens * a * (qkv + heads + 4 * width)
    saved += tokens * 4.0 * (shape.num_heads / split.tp + 2)
    matrices = sizes(shape, split.tp, split.pp)
    kept = layers * (stream if job.recompute != "none" else saved)
    if act == "host":
        # What is on its way out or comes early; of a block, no more than all of it.
        kept = min(kept, 3 * tokens * 2 * width * a + stream)
    rows = min(tokens, max(1.0, _LOGITS // vocab))
    table = vocab * hidden * 4.0
    logits = rows * vocab * a
    loss = kept + 3 * stream + 2 * table + logits
    if low:
        loss += table
    if rows < tokens:
        loss += table
    largest = max(matrices[len(matrices) - 4 * layers :])
    follower = hidden * width * 4.0
    inner = tokens * width * a
    # Of the last block, from behind: down, the activation, and gate and up, which is the largest:
    # its weight, its gradient, that in bf16 it is made from, and the one before on its way out.
    made = 10.0 if low else 8.0
    operator = (
        kept
        + stream
        + max(
            made / 4 * follower + inner,
            follower + 2 * inner,
            made * largest + follower + stream - 2 * inner,
        )
    )
    embedding = 3 * table + 2 * stream
    moments = [loss, operator, embedding]
    if job.recompute != "none":
        block = sum(matrices[-4:]) * a
        # The gradient of the last matrix may still be leaving when that of the largest is there.
        gradients = 2 * hidden * width * 4.0 + (hidden * width * 2.0 if low else 0.0)
        again = saved + block + gradients
        moments.append(kept + again)
    ahead = min(4.0 * prefetch_numel, 4.0 * sum(matrices))
    data = split.dp * split.cp
    gathered = 4.0 * max(matrices) / data if data > 1 else 0.0
    batch = job.global_batch / split.dp * job.seq_len * 16.0
    rotation = 4.0 * job.seq_len * shape.head_dim  # sines and cosines of half of a head each
    return max(moments) + ahead + gathered + batch + rotation + _ASIDE


def needs(
    work: Work,
    *,
    param: str,
    optim: str,
    act: str,
    sub_group_numel: int,
    prefetch_numel: int,
    states: int = 2,
) -> MemoryNeeds:
    """Bytes by tier of one rank of a job."""
    job, split = work.job, work.job.parallel
    ranks = split.dp * split.cp
    mine = [-(-size // ranks) for size in sizes(work.shape, split.tp, split.pp)]
    staging = Staging.of(max(mine), 4, states, sub_group_numel)
    host = float(staging.nbytes)
    small = vectors(work.shape)
    weights = _rows([*mine, *(numel for numel in small if numel >= SMALL)])
    host += _rows([numel for numel in small if numel < SMALL]) * (2 + states)
    kept = weights * (1 + states)
    disk = weights * (param == "disk") + kept * (optim == "disk")
    host += weights * (param == "host") + kept * (optim == "host")
    if act == "host":
        host += _saved_on_host(work)
    # Weights forward and backward; all of it to update, and back without the gradient.
    passes = passes_of(job)
    again = 3 if job.recompute != "none" else 2
    on_disk = weights * (optim == "disk") * (states + passes)
    return MemoryNeeds(
        device=_device_bytes(work, act=act, prefetch_numel=prefetch_numel),
        host=host,
        disk=disk,
        fetched=weights * (param == "disk") * again * passes,
        read=weights * (param == "disk") + on_disk,
        written=weights * (param == "disk") + on_disk,
        moved=weights * (again + 1) * passes,
    )


def _saved_on_host(work: Work) -> float:
    """Bytes of what autograd saves of one micro-batch."""
    job, shape, split = work.job, work.shape, work.job.parallel
    a = 2.0 if job.precision == "bf16" else 4.0
    tokens = microbatch_of(job) * job.seq_len / split.cp
    stream = tokens * shape.hidden * a
    layers = -(-shape.num_layers // split.pp)
    # Storages begin at sectors; tables of the rotation are saved too.
    aside = (layers + 1) * 12 * _SECTOR + 4.0 * job.seq_len * shape.head_dim * 2
    if job.recompute != "none":
        return (layers + 3) * stream + aside
    width = (shape.expert_hidden if shape.num_experts else shape.ffn_hidden) / split.tp
    width *= max(1, shape.top_k)
    heads = shape.num_heads * shape.head_dim
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    block = 4 * stream + tokens * a * ((qkv + heads) / split.tp + 4 * width)
    return layers * (block + tokens * 4.0 * (shape.num_heads + 2) * 2) + 3 * stream + aside


def efficiency(flops_per_byte: float, bandwidth: float, peak: float) -> float:
    """Share of the time that computes: equation 6 of the paper."""
    moved = flops_per_byte * bandwidth
    return moved / (moved + peak)


def disk_bandwidth(machine: Machine, *, writing: bool = False) -> float:
    """Bytes per second that the machine's disk reads; what a plain drive does if unknown."""
    for tier in machine.device.memory:
        if tier.name in ("disk", "nvme", "ssd") and tier.read_bandwidth:
            return (tier.write_bandwidth if writing else None) or tier.read_bandwidth
    return 1e9


def peak_flops(work: Work, machine: Machine) -> float:
    """Operations per second of a rank's matrix products."""
    device = machine.device
    rates = {**device.peak_flops, **device.matmul_flops}
    value = rates.get(work.job.precision) or rates.get("fp32") or 1e11
    return value / (work.job.parallel.world if device.kind == "cpu" else 1)
