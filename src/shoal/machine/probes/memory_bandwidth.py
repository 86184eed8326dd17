"""Bandwidth of each level of memory: read, copy, triad and non-temporal copy.

Every thread works on a private slice of the footprint on its own core; a sample runs
from the first thread's start to the last one's end, after a barrier. Bytes are counted
as STREAM does: what the loop reads and writes, without what the cache fetches unasked.

Source: McCalpin, Memory Bandwidth and Machine Balance (STREAM), 1995.
"""

from __future__ import annotations

import ctypes
from statistics import median
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.native import library
from shoal.machine.protocols import ProbeContext

KERNELS = ("read", "copy", "triad", "stream_copy")
# Ways to read, as native/bandwidth.cpp numbers them: streams of a core, bytes fetched ahead.
READS = {0: "1 stream", 4: "2 streams", 5: "4 streams", 6: "8 streams"} | {
    7: "1 stream, 2 KiB ahead",
    8: "1 stream, 8 KiB ahead",
    9: "2 streams, 4 KiB ahead",
    10: "4 streams, 2 KiB ahead",
}
# A core does not load or store more than this in a second, from any level.
CORE_LIMIT = 1.5e12


def bandwidth_samples(
    kernel: str, footprint: int, cpus: tuple[int, ...], *, repeats: int, sample_bytes: float
) -> list[float]:
    """byte/s over all ``cpus``, ``repeats`` times.

    What a core reads depends on how it asks: ``read`` is the fastest of :data:`READS`.

    Args:
        kernel: one of :data:`KERNELS`.
        footprint: bytes of each thread, all its arrays together.
        cpus: a thread runs on each of these.
        repeats: number of samples.
        sample_bytes: bytes one thread moves in one sample, at least.

    Raises:
        MachineError: the footprints are above the free memory, or threads cannot start.
    """
    free = host.memory_available()
    require(
        footprint >= 8192 and footprint * len(cpus) <= 0.8 * free,
        "probe.memory_bandwidth footprint",
        footprint,
        expected=f"8192 to {int(0.8 * free / len(cpus))} bytes a thread, 80 % of the free memory",
        hint="choose a smaller probe.memory_bandwidth.largest_bytes",
        error=MachineError,
    )
    cores = (ctypes.c_int * len(cpus))(*cpus)
    passes = max(1, round(sample_bytes / footprint))

    def run(which: int) -> list[float]:
        rates = (ctypes.c_double * repeats)()
        failed = library("bandwidth").bandwidth_run(
            which, footprint, len(cpus), cores, repeats, passes, rates
        )
        if failed:
            raise MachineError(
                f"probe.memory_bandwidth: {len(cpus)} threads with {footprint} bytes each: "
                + ("no memory" if failed == -1 else "threads cannot be started")
                + "; choose a smaller largest_bytes"
            )
        return list(rates)

    return max(map(run, READS), key=median) if kernel == "read" else run(KERNELS.index(kernel))


@part
class MemoryBandwidth:
    """Bandwidth per footprint and number of threads.

    Args:
        smallest_bytes: the first footprint of one thread.
        largest_bytes: the last footprint of one thread; 0 for 256 MiB, less if memory is
            scarce.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    smallest_bytes: Annotated[int, Ge(8192)] = 16384
    largest_bytes: int = 0
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        where = "probe.memory_bandwidth"
        require(
            self.largest_bytes == 0 or self.largest_bytes >= self.smallest_bytes,
            f"{where}.largest_bytes",
            self.largest_bytes,
            expected="0, or smallest_bytes or more",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``KERNEL_Nthreads`` in byte/s of all threads, at bytes of one thread."""
        repeats = self.repeats or (5 if context.fast else 15)
        all_cpus = context.cpus
        largest = self.largest_bytes or int(
            min(2**28, max(2**20, 0.3 * host.memory_available() / len(all_cpus)))
        )
        factor = 4 if context.fast else 2
        sizes, size = [], self.smallest_bytes
        while size < largest:
            sizes.append(size)
            size *= factor
        sizes.append(largest)
        counts = sorted({1, len(all_cpus)})
        if not context.fast:
            counts = sorted({*counts, *(2**i for i in range(len(all_cpus).bit_length()))})
            counts = [count for count in counts if count <= len(all_cpus)]
        moved = 24e6 if context.fast else 64e6
        results = []
        for kernel in KERNELS:
            if not library("bandwidth").bandwidth_has(KERNELS.index(kernel)):
                context.skip(f"memory_bandwidth.{kernel}", "no non-temporal stores on this CPU")
                continue
            for count in counts:
                for at in sizes:
                    rates = bandwidth_samples(
                        kernel, at, all_cpus[:count], repeats=repeats, sample_bytes=moved
                    )
                    fine = sorted(rates)[len(rates) // 2] <= CORE_LIMIT * count
                    results.append(
                        context.measured(
                            "memory_bandwidth",
                            f"{kernel}_{count}threads",
                            "B/s",
                            rates,
                            at=at,
                            plausible=fine,
                            note="" if fine else "above what cores can load and store",
                        )
                    )
        return results
