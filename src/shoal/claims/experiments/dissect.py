"""[48] Dissect: does this machine show its insides to microbenchmarks?

Source: Luo et al., Benchmarking and Dissecting the NVIDIA Hopper GPU Architecture, 2024.

Caches that the operating system reports must be found by a pointer chase, levels must differ,
rooflines of probes must predict matrix products, and probes must repeat. The A/A run has the trap
that each avoids: a walk in the order of addresses, a data sheet's peak, one cold sample.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.measure import check_quiet
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.probes.gpu import GpuProbe
from shoal.machine.probes.matmul import Matmul
from shoal.machine.probes.memory_bandwidth import MemoryBandwidth
from shoal.machine.probes.memory_latency import MemoryLatency, PointerChain
from shoal.machine.probes.units import Units
from shoal.machine.protocols import ProbeContext as Probing

# (m, n, k): tokens x outputs x inputs, as in the linear layers of small language models,
# from a few tokens to a full batch, and squares between the sizes that were probed.
SHAPES: tuple[tuple[int, int, int], ...] = (
    (32, 512, 512),
    (64, 1024, 1024),
    (128, 768, 768),
    (128, 3072, 768),
    (192, 192, 192),
    (256, 320, 896),
    (256, 512, 2048),
    (256, 1024, 512),
    (320, 320, 320),
    (384, 1536, 384),
    (512, 256, 704),
    (512, 704, 256),
    (512, 1024, 1024),
    (640, 640, 640),
    (768, 768, 768),
    (1024, 512, 512),
    (1024, 1024, 384),
    (1024, 384, 1024),
    (1024, 2048, 512),
    (1536, 768, 768),
)
DTYPES = ("fp32", "bf16")
# Footprint of the chain whose steps are counted: 16,384 lines.
CHAIN_BYTES = 2**20
BYTES = {"fp32": 4, "bf16": 2}
# Compute probes whose repetition is compared, besides products on one core: several
# threads wait for each other, which measures the neighbours.
REPEATED = ("fma_fp32", "fma_fp64", "dot_bf16", "dot_int8", "permute_bytes", "popcount")


@part
class Dissect(BaseClaim, row=48):
    """Cache sizes, latency levels, roofline predictions and repeatability of this machine.

    Args:
        largest_bytes: last footprint of the full run's pointer chase.
        repeats: samples of each probe and of each predicted product.
        runs: runs of the pointer chase, from start to end.
        threads: threads of the predicted products; 0 for all cores. Several threads
            wait for each other, so on a shared machine they show the neighbours.
    """

    largest_bytes: int = 2**30
    repeats: Annotated[int, Ge(3)] = 9
    runs: Annotated[int, Ge(1)] = 5
    threads: int = 1

    def __post_init__(self) -> None:
        require(
            self.largest_bytes >= 2**23,
            "claim.dissect.largest_bytes",
            self.largest_bytes,
            expected="at least 8388608, beyond the private caches",
        )
        require(
            0 <= self.threads <= len(host.cpus()),
            "claim.dissect.threads",
            self.threads,
            expected=f"0 to {len(host.cpus())}, the cores of this process",
        )

    def refuses(self, context: ExperimentContext) -> str | None:
        """Without a compiler nothing can be probed."""
        if compiler() is None:
            return "no C++ compiler; install g++"
        if not host.caches():
            return "the operating system reports no caches to compare with"
        return None

    def collect(self, run: ClaimRun) -> None:
        """Count prefetchable steps; the full run also probes, for about 10 s."""
        share = prefetchable_steps(CHAIN_BYTES, seed=run.seed, random=not run.as_baseline)
        run.put("prefetchable_steps", share)
        if run.quick:
            return
        with Probing(fast=True, home=run.work_dir) as probing:
            latency = MemoryLatency(
                largest_bytes=int(min(self.largest_bytes, 0.25 * host.memory_available())),
                repeats=self.repeats,
                huge_pages="on",
                order=run.pick("random", "sequential"),
            )
            chases = []
            for number in range(self.runs):
                run.progress("memory latency", 0.2 * number / self.runs)
                chases.append(latency.run(probing))
            run.details |= {
                "caches_os": host.caches(),
                "latency_s": [[m.at, m.median] for m in chases[0] if m.quantity == "latency"],
                "levels": {m.quantity: m.median for m in chases[0] if m.at is None},
            }
            errors = [size_errors(chase, host.caches()) for chase in chases]
            run.put("cache_size_error", map(statistics.median, zip(*errors, strict=True)))
            run.put("level_ratio", (min(adjacent_ratios(chase)) for chase in chases))
            self._compute(run, probing)
            self._gpu(run, probing)
            if not run.as_baseline:
                # The frame looked before; a neighbour that came meanwhile spoils it too.
                # Our own child must not be taken for one.
                probing.close()
                check_quiet()

    def _compute(self, run: ClaimRun, probing: Probing) -> None:
        run.progress("units", 0.2)
        repeats, blocks = run.pick((self.repeats, 30_000), (1, 100))
        units = [Units(repeats=repeats, blocks=blocks).run(probing) for _ in range(2)]
        run.progress("memory bandwidth", 0.3)
        bandwidth = MemoryBandwidth(repeats=5).run(probing)
        run.progress("matrix products", 0.4)
        probed = Matmul(repeats=self.repeats).run(probing)
        products: list[list[Measurement]] = [[] for _ in units]
        if "matmul.torch" in probing.skipped:
            run.skip(probing.skipped["matmul.torch"], "roofline_error")
        else:
            predicted, measured = [], []
            threads = self.threads or len(probing.cpus)
            table = run.details["products"] = []
            for index, (m, n, k) in enumerate(SHAPES):
                run.progress("predicted products", 0.5 + 0.3 * index / len(SHAPES))
                for dtype in DTYPES:
                    seconds = probing.worker().call(
                        "matmul", m=m, n=n, k=k, dtype=dtype, threads=threads, repeats=self.repeats
                    )
                    measured.append(sorted(seconds)[len(seconds) // 2])
                    if run.as_baseline:
                        guess = 2.0 * m * n * k / _data_sheet(units[0], dtype, threads)
                    else:
                        guess = predict((m, n, k), dtype, probed, bandwidth, threads)
                    predicted.append(guess)
                    table.append([m, n, k, dtype, guess, measured[-1], *seconds])
            run.put("roofline_error", predicted, measured)
            run.progress("once more", 0.8)
            edge = Matmul(sizes=(512, 1024), repeats=repeats)
            products = [edge.run(probing) for _ in units]
        first, second = ([*units[at], *products[at]] for at in (0, 1))
        run.put("repeat_error", repeat_errors(first, second))

    def _gpu(self, run: ClaimRun, probing: Probing) -> None:
        result = GpuProbe(repeats=self.repeats).run(probing)
        if not result:
            run.skip(probing.skipped["gpu"], "gpu_bf16_over_fp32")
            return
        rates = {
            dtype: max((m.median for m in result if m.quantity == f"matmul_{dtype}"), default=0.0)
            for dtype in DTYPES
        }
        run.put("gpu_bf16_over_fp32", rates[run.pick("bf16", "fp32")] / rates["fp32"])


def prefetchable_steps(bytes_: int, *, seed: int, random: bool) -> float:
    """Share of the chase's steps that go to a neighbouring line, read from the chain itself."""
    with PointerChain(bytes_, huge=False, seed=seed, random=random) as chain:
        follows = chain.follow()
    return sum(abs(after - line) == 1 for line, after in enumerate(follows)) / len(follows)


def size_errors(chase: Sequence[Measurement], caches: Mapping[str, int]) -> tuple[float, ...]:
    """|found / reported - 1| of L1d and L2; 1 for one that the chase did not find."""
    result = {m.quantity: m.median for m in chase}
    return tuple(
        abs(result.get(f"{name}.capacity", 0.0) / caches[name] - 1)
        for name in ("l1d", "l2")
        if name in caches
    )


def adjacent_ratios(chase: Sequence[Measurement]) -> tuple[float, ...]:
    """Latency of each level over the level above; 1 where fewer than three were found."""
    latencies = [m.median for m in chase if m.quantity.endswith(".latency")]
    ratios = tuple(b / a for a, b in itertools.pairwise(latencies))
    return ratios if len(ratios) >= 2 else (*ratios, 1.0)


def repeat_errors(first: Sequence[Measurement], second: Sequence[Measurement]) -> tuple[float, ...]:
    """|second / first - 1| of every compute probe of one core that both runs have."""
    again = {(m.probe, m.quantity, m.at): m.median for m in second}
    return tuple(
        abs(again[m.probe, m.quantity, m.at] / m.median - 1)
        for m in first
        if (m.probe, m.quantity, m.at) in again
        and (m.quantity in REPEATED or (m.probe == "matmul" and m.note == "threads=1"))
    )


def predict(
    shape: tuple[int, int, int],
    dtype: str,
    products: Sequence[Measurement],
    bandwidth: Sequence[Measurement],
    threads: int,
) -> float:
    """Seconds of a product by the roofline: the slower of arithmetic and memory.

    Arithmetic is the probed rate of a cube of equal volume, memory the bandwidth at the operands'
    size.
    """
    m, n, k = shape
    ceiling = _interpolate(
        {
            p.at: p.median
            for p in products
            if p.quantity.startswith(f"matmul_{dtype}") and p.note == f"threads={threads}" and p.at
        },
        (float(m) * n * k) ** (1 / 3),
    )
    touched = float(BYTES[dtype]) * (m * n + n * k + m * k)
    slope = _interpolate(
        {
            b.at * threads: b.median
            for b in bandwidth
            if b.quantity == f"read_{threads}threads" and b.at
        },
        touched,
    )
    return max(2.0 * m * n * k / ceiling, touched / slope)


def _interpolate(points: Mapping[float, float], x: float) -> float:
    known = sorted(points.items())
    require(bool(known), "roofline", "no probe", expected="probes of products and bandwidth")
    if x <= known[0][0]:
        return known[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
    return known[-1][1]


def _data_sheet(units: Sequence[Measurement], dtype: str, cores: int) -> float:
    """What a vendor would print: operations a cycle x clock x cores."""
    result = {m.quantity: m.median for m in units}
    names = {"fp32": ("fma_fp32",), "bf16": ("tile_bf16", "dot_bf16", "fma_fp32")}[dtype]
    rate = max(result.get(name, 0.0) for name in names)
    # A single vector unit stands in where no instruction could be measured.
    return (rate or 16.0) * result["clock"] * cores
