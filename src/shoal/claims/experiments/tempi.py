"""[19] TEMPI: one canonical form of strided types, its kernels, and how they are sent.

Source: Pearson et al., TEMPI: An Interposed MPI Library with a Canonical Representation of
CUDA-aware Datatypes, 2021.

Counted: random nests of types packed against enumeration of their bytes, and objects in five
spellings and more. Timed with all cores, out of arrays that no cache holds: faces and tiny blocks
of 64 MiB cubes beside Open MPI's packing, torch's strided copy, a copy a block, and memcpy. On two
processes: 60 messages in every way; a method within 5 % of the fastest counts as such. The A/A run
leaves types as spelled, packs only vectors of primitives, has torch's copy, and always packs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.kernel.strided.canonical import StridedBlock, canonical, rewritten
from shoal.kernel.strided.datatype import (
    Datatype,
    Dense,
    StridedStream,
    contiguous,
    hindexed,
    hvector,
    indexed,
    named,
    resized,
    struct,
    subarray,
    vector,
)

_RANKS = "shoal.claims.experiments.tempi_ranks"
_SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 21, 22, 24))
_RUNS = (2, 4, 16, 64, 256, 1024, 4096)
_TIE = 1.05
_TIMED = ("mpi_speedup", "contiguous_speedup", "loop_speedup", "memcpy_speedup")


@part
class Tempi(BaseClaim, row=19, needs=("c++",)):
    """Types, packing and the choice of a method.

    Args:
        edge: cells of the edge of a cube of float32.
        arrays: cubes that are visited in turn.
        pairs: rounds of timings.
        nests: random types that are checked byte by byte.
        repeats: rounds of each of the 60 messages.
    """

    edge: Annotated[int, Ge(64)] = 256
    arrays: Annotated[int, Ge(4)] = 12
    pairs: Annotated[int, Ge(3)] = 31
    nests: Annotated[int, Ge(1)] = 300
    repeats: Annotated[int, Ge(3)] = 31

    def collect(self, run: ClaimRun) -> None:
        """Check types; the full run also times packing for a minute, and 60 messages."""
        nests = min(self.nests, 40) if run.quick else self.nests
        run.progress("types", 0.0)
        run.put("wrong_types", _wrong(nests, run.seed, run.as_baseline))
        run.put("one_form", (_one_form(spelled, run.as_baseline) for spelled in objects()))
        if run.quick:
            return
        run.progress("packing", 0.1)
        how: dict[str, Any] = {name: getattr(self, name) for name in ("edge", "arrays", "pairs")}

        def ran(name: str, world: int, **given: Any) -> Any:
            return on_ranks(f"{_RANKS}:{name}", world, timeout_s=600.0, **given)[0]

        packed = run.remember("packing", lambda: ran("packing", 1, **how, seed=run.seed))
        run.progress("60 messages in every way", 0.6)
        ways: dict[str, Any] = {"sizes": _SIZES, "runs": _RUNS, "repeats": self.repeats}
        sent = run.remember("methods", lambda: ran("methods", 2, **ways))
        _timings(run, packed)
        fastest = (
            row["taken_s"][run.pick(row["chosen"], "oneshot")]
            <= _TIE * min(row["taken_s"].values())
            for row in sent
        )
        run.put("fastest_method", fastest, bound=1.0)
        _gpu(run, self.pairs)


def _timings(run: ClaimRun, packed: dict[str, Any]) -> None:
    """The worst case of each comparison, and what memory would allow there."""
    from shoal.kernel.dispatch import here

    seconds: dict[str, dict[str, list[float]]] = packed["seconds"]
    machine = run.context.machine or here()
    # Memory is at least as fast as the fastest of all that was timed.
    reached = (
        packed["moved"][case] / statistics.median(taken)
        for case, ways in seconds.items()
        for taken in ways.values()
    )
    bandwidth = max(machine.device.main_memory.read_bandwidth or 0.0, *reached)
    ours = run.pick("pack", "contiguous")
    worst = {}
    for name, peer in zip(_TIMED, ("mpi", "contiguous", "loop", "memcpy"), strict=True):
        cases = [case for case, taken in seconds.items() if peer in taken]
        if name == "contiguous_speedup":
            cases.remove("whole")
        if not cases:
            continue
        case = min(
            cases, key=lambda case: np.median(np.divide(seconds[case][peer], seconds[case][ours]))
        )
        taken = seconds[case]
        bound = statistics.median(taken[peer]) / (packed["moved"][case] / bandwidth)
        run.put(name, taken[ours], taken[peer], bound=bound)
        worst[name] = case
    if packed["skipped"]:
        run.skip(packed["skipped"], "mpi_speedup", "mpi_wrong_bytes")
    else:
        run.put("mpi_wrong_bytes", packed["wrong"])
    rates = {
        case: {way: packed["bytes"][case] / statistics.median(t) / 1e9 for way, t in taken.items()}
        for case, taken in seconds.items()
    }
    run.details["worst_case"] = worst
    run.profile = "; ".join(
        f"{case}: " + ", ".join(f"{way} {rate:.2f} GB/s" for way, rate in row.items())
        for case, row in rates.items()
    )


def random_nest(random: np.random.Generator, depth: int = 4) -> Datatype:
    """Some type of at most a few thousand bytes."""
    if depth == 0 or random.random() < 0.2:
        return named(int(random.choice([1, 2, 4, 8, 12])))
    base = random_nest(random, depth - 1)
    count, length = (int(n) for n in random.integers(1, 5, 2))
    kind = random.integers(0, 6)
    if kind == 0:
        return vector(count, length, int(random.integers(-5, 8)), base)
    if kind == 1:
        return hvector(count, length, int(random.integers(-64, 97)), base)
    if kind == 2:
        return resized(base, int(random.integers(-8, 9)), int(random.integers(0, 65)))
    if kind == 3:
        sizes = [int(n) for n in random.integers(1, 5, random.integers(1, 4))]
        boxes = [int(random.integers(1, n + 1)) for n in sizes]
        starts = [int(random.integers(0, n - b + 1)) for n, b in zip(sizes, boxes, strict=True)]
        return subarray(sizes, boxes, starts, base, "CF"[int(random.integers(2))])
    if kind == 4:
        return contiguous(count, base)
    places = [int(at) for at in random.integers(-9, 17, count)]
    return indexed([int(n) for n in random.integers(0, 4, count)], places, base)


def _wrong(nests: int, seed: int, as_baseline: bool) -> float:
    """Types of which some byte is packed, or unpacked, from or to another place."""
    import torch

    from shoal.claims.lab.strided.api import pack, unpack

    wrong = 0
    for index in range(nests):
        random = generator(seed, purpose="tempi nests", index=index)
        datatype, count = random_nest(random), int(random.integers(1, 4))
        if as_baseline and not _is_vector(datatype):
            wrong += 1
            continue
        offsets = datatype.typemap(count)
        low, high = int(offsets.min(initial=0)), int(offsets.max(initial=0)) + 1
        memory = torch.from_numpy(random.integers(0, 256, high - low + 1, dtype=np.uint8))
        places = torch.from_numpy(offsets - low)
        packed = pack(memory[-low:], datatype, count=count)
        wrong += not torch.equal(packed, memory[places])
        layout = canonical(datatype, count)
        if not layout.overlaps:
            target, wanted = torch.zeros_like(memory), torch.zeros_like(memory)
            unpack(packed, target[-low:], datatype, count=count)
            wanted[places] = packed
            wrong += not torch.equal(target, wanted)
    return float(wrong)


def _is_vector(datatype: Datatype) -> bool:
    """Whether it is blocks of a primitive type at one stride, as spelled."""
    node, streams = datatype.node, 0
    while isinstance(node, StridedStream):
        streams, node = streams + 1, node.child
    return isinstance(node, Dense) and streams <= 2


def _one_form(spelled: Sequence[Datatype], as_baseline: bool) -> float:
    """1 if all spellings of an object have one canonical form."""
    forms: set[tuple[Any, ...]] = set()
    for datatype in spelled:
        result, steps = rewritten(datatype)
        if as_baseline:
            forms.add((steps[0].streams, steps[0].dense) if steps else ())
        elif isinstance(result, StridedBlock):
            forms.add((result.start, result.counts, result.strides))
        else:
            forms.add((result.offsets, result.lengths))
    return float(len(forms) == 1)


def objects() -> list[list[Datatype]]:
    """Objects, each spelled in at least five ways that name the same bytes in one order."""
    f32 = named("float32")
    box = subarray([4, 8, 16], [2, 3, 5], [1, 2, 3], f32)
    return [
        [  # dense bytes
            contiguous(64, f32),
            named(256),
            vector(8, 8, 8, f32),
            hvector(16, 4, 16, f32),
            subarray([4, 16], [4, 16], [0, 0], f32),
            indexed([32, 32], [0, 32], f32),
        ],
        [  # rows of a matrix
            vector(8, 5, 16, f32),
            hvector(8, 5, 64, f32),
            subarray([8, 16], [8, 5], [0, 0], f32),
            subarray([16, 8], [5, 8], [0, 0], f32, "F"),
            contiguous(8, resized(contiguous(5, f32), 0, 64)),
            hvector(2, 1, 256, hvector(4, 20, 64, named(1))),
            indexed([5] * 8, [16 * i for i in range(8)], f32),
        ],
        [  # a box of a cube
            box,
            struct([1], [0], [subarray([16, 8, 4], [5, 3, 2], [3, 2, 1], f32, "F")]),
            hindexed([1], [652], hvector(2, 1, 512, hvector(3, 1, 64, contiguous(5, f32)))),
            hindexed([1, 1], [652, 1164], hvector(3, 5, 64, f32)),
            contiguous(1, vector(1, 1, 7, box)),
            hindexed(
                [20] * 6, [652 + 512 * i + 64 * j for i in (0, 1) for j in (0, 1, 2)], named(1)
            ),
        ],
        [  # a transposed matrix: the outer stride is the smaller one
            hvector(3, 1, 4, hvector(4, 1, 64, f32)),
            struct([1] * 3, [0, 4, 8], [hvector(4, 1, 64, f32)] * 3),
            hvector(1, 1, 9, hvector(3, 1, 4, hvector(2, 1, 128, hvector(2, 1, 64, f32)))),
            hvector(3, 1, 4, hvector(4, 4, 64, named(1))),
            indexed([1] * 12, [16 * j + i for i in range(3) for j in range(4)], f32),
        ],
        [  # two columns, every third row
            hvector(5, 2, 192, f32),
            vector(5, 2, 48, f32),
            vector(5, 1, 24, contiguous(2, f32)),
            hvector(5, 1, 192, named(8)),
            hindexed([8] * 5, [192 * i for i in range(5)], named(1)),
            contiguous(5, resized(contiguous(2, f32), 0, 192)),
        ],
    ]


def _gpu(run: ClaimRun, pairs: int) -> None:
    """Blocks of 4 bytes on a GPU: the kernel, and a copy each, which is timed on few of them."""
    import torch

    if not torch.cuda.is_available():
        run.skip("no CUDA device here", "gpu_speedup")
        return
    from shoal.claims.lab.strided.api import pack

    blocks, sample = 2**20, 2**12
    memory = torch.zeros(blocks * 512, dtype=torch.uint8, device="cuda")
    view = memory.as_strided((blocks, 4), (512, 1))
    out = torch.empty(blocks * 4, dtype=torch.uint8, device="cuda")

    def kernel() -> None:
        pack(view, out=out)
        torch.cuda.synchronize()

    def copies() -> None:
        for index in range(sample):
            out[4 * index : 4 * index + 4].copy_(view[index], non_blocking=True)
        torch.cuda.synchronize()

    timed = run.race({"kernel": kernel, "copies": copies}, pairs, swaps={})
    each = [seconds * blocks / sample for seconds in timed["copies"]]
    run.put("gpu_speedup", run.pick(timed["kernel"], tuple(each)), each)
