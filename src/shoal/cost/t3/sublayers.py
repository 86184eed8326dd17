"""T3: sublayers whose products trigger their reduce-scatter, beside the ways without it.

The product and the reduce-scatter that it triggers are simulated (:mod:`shoal.cost.t3.ring`);
what runs by itself, one after the other or at best, has a closed form.

Traffic of a device, in chunks (N devices; r reads, w writes or updates):

===================  ==================  =================
what                 sequential          T3
===================  ==================  =================
stores of product    N w                 N - 1 w
reduce-scatter       2 N - 1 r, N w      N - 2 r, N - 1 w
all-gather           N - 1 r, N - 1 w    N - 1 r, N - 1 w
===================  ==================  =================

Source: Pati et al., T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives, 2024. Hidden sizes: Microsoft, Turing-NLG, 2020; Brown
et al., GPT-3, 2020; Chowdhery et al., PaLM, 2022; Smith et al., Megatron-Turing NLG, 2022.
"""

from __future__ import annotations

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.cost.t3.ring import OverlapResult, PartialProduct, RingDevice, fuse, product_alone

__all__ = [
    "MODELS",
    "MemoryTraffic",
    "OverlapResult",
    "PartialProduct",
    "RingDevice",
    "Sublayer",
    "SublayerComparison",
    "all_gather_s",
    "compare",
    "fuse",
    "product_alone",
    "reduce_scatter_s",
    "sublayers",
]


class Sublayer(Value):
    """A product of a Transformer layer that ends in an all-reduce.

    Args:
        model: whose.
        name: ``attention output``, ``feed-forward output`` (forward passes), ``feed-forward
            input`` or ``attention input`` (backward passes).
        product: of a device.
    """

    model: str
    name: str
    product: PartialProduct


MODELS: dict[str, tuple[int, int]] = {
    "T-NLG": (4256, 8192),
    "GPT-3": (12288, 4096),
    "PALM": (18432, 4096),
    "MT-NLG": (20480, 4096),
}
"""Model -> hidden size, as its authors published it, and tokens of a pass, which are chosen:
eight sequences of 1,024 for the smallest, two of 2,048 for the others."""

# Inner dimension over hidden size, of all devices together.
_SUBLAYERS = {
    "attention output": 1,
    "feed-forward output": 4,
    "feed-forward input": 4,
    "attention input": 3,
}


def sublayers(model: str, hidden: int, tokens: int, tp: int) -> list[Sublayer]:
    """The four products of a layer that end in an all-reduce of [tokens, hidden].

    Raises:
        ConfigError: sizes that ``tp`` devices cannot share.
    """
    require(tp >= 2, "t3.tp", tp, expected="at least 2: one device sends nothing")
    require(
        hidden >= 1 and hidden % tp == 0, "t3.hidden", hidden, expected=f"a multiple of tp = {tp}"
    )
    require(tokens >= tp, "t3.tokens", tokens, expected=f"at least {tp}, a row for each device")
    return [
        Sublayer(
            model=model,
            name=name,
            product=PartialProduct(tokens=tokens, k=factor * hidden // tp, n=hidden, tp=tp),
        )
        for name, factor in _SUBLAYERS.items()
    ]


class MemoryTraffic(Value):
    """Bytes between a device and its memory.

    Args:
        operand_reads: of the product.
        product_writes: stores, or updates, of its output.
        scatter_reads: of the reduce-scatter.
        scatter_writes: of it: what comes over the link, and sums.
        gather: reads and writes of the all-gather.
    """

    operand_reads: float
    product_writes: float
    scatter_reads: float
    scatter_writes: float
    gather: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.operand_reads
            + self.product_writes
            + self.scatter_reads
            + self.scatter_writes
            + self.gather
        )


def reduce_scatter_s(
    product: PartialProduct, device: RingDevice, *, near_memory: bool = False
) -> float:
    """Seconds of a ring reduce-scatter by itself.

    Args:
        product: whose output it is.
        device: what all of them are.
        near_memory: what comes is added by the memory; else a kernel reads both summands, and
            writes the last sum.
    """
    chunk, steps = product.chunk_bytes, product.tp - 1
    link = chunk / device.link_bandwidth
    moved = (1 + device.update_cost) * chunk if near_memory else 3 * chunk
    step = max(link, moved / device.dram_bandwidth) + device.link_latency_s
    end = 0.0 if near_memory else 3 * chunk / device.dram_bandwidth
    return steps * step + end


def all_gather_s(product: PartialProduct, device: RingDevice) -> float:
    """Seconds of a ring all-gather of the summed rows."""
    chunk = product.chunk_bytes
    step = max(chunk / device.link_bandwidth, 2 * chunk / device.dram_bandwidth)
    return (product.tp - 1) * (step + device.link_latency_s)


class SublayerComparison(Value):
    """A sublayer in every way: product, reduce-scatter and all-gather.

    Args:
        product_s: the product alone.
        reduce_scatter_s: it alone.
        all_gather_s: it alone, which is not overlapped.
        sequential_s: one after the other.
        t3_s: simulated, with the all-gather behind it.
        ideal_s: the longer of product and reduce-scatter, and the all-gather.
        ideal_near_memory_s: the same with the reduce-scatter that memory helps.
        bound_s: what product and link need, each alone, of what is fused: the longer of both.
        sequential: traffic one after the other.
        t3: traffic of T3.
        fused: what the simulation saw.
    """

    sublayer: Sublayer
    product_s: float
    reduce_scatter_s: float
    all_gather_s: float
    sequential_s: float
    t3_s: float
    ideal_s: float
    ideal_near_memory_s: float
    bound_s: float
    sequential: MemoryTraffic
    t3: MemoryTraffic
    fused: OverlapResult

    @property
    def speedup(self) -> float:
        """Of T3 over one after the other."""
        return self.sequential_s / self.t3_s

    @property
    def movement(self) -> float:
        """Traffic of T3 over that of one after the other, less one."""
        return self.t3.total / self.sequential.total - 1.0


def compare(sublayer: Sublayer, device: RingDevice | None = None) -> SublayerComparison:
    """Simulate a sublayer with T3, and price the ways without it.

    Raises:
        ConfigError: as for :func:`fuse`.
    """
    device = device or RingDevice()
    product = sublayer.product
    chunk, tp = product.chunk_bytes, product.tp
    fused = fuse(product, device)
    alone, operands = product_alone(product, device)
    bypassed, _ = product_alone(product, device, bypass=True)
    scatter, gather = reduce_scatter_s(product, device), all_gather_s(product, device)
    near = reduce_scatter_s(product, device, near_memory=True)
    gathered = 2 * (tp - 1) * chunk
    return SublayerComparison(
        sublayer=sublayer,
        product_s=alone,
        reduce_scatter_s=scatter,
        all_gather_s=gather,
        sequential_s=alone + scatter + gather,
        t3_s=fused.seconds + gather,
        ideal_s=max(alone, scatter) + gather,
        ideal_near_memory_s=max(alone, near) + gather,
        bound_s=max(bypassed, (tp - 1) * chunk / device.link_bandwidth),
        sequential=MemoryTraffic(
            operand_reads=operands,
            product_writes=tp * chunk,
            scatter_reads=(2 * tp - 1) * chunk,
            scatter_writes=tp * chunk,
            gather=gathered,
        ),
        t3=MemoryTraffic(
            operand_reads=fused.operand_reads,
            product_writes=fused.product_writes,
            scatter_reads=fused.scatter_reads,
            scatter_writes=fused.scatter_writes,
            gather=gathered,
        ),
        fused=fused,
    )
