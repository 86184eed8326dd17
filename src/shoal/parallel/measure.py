"""What probes of ranks run in their child processes: the collectives that training uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shoal.parallel.comm import TorchComm

__all__ = ["all_reduce", "crowd"]


@contextmanager
def _joined(rank: int, world: int, store: str) -> Iterator[TorchComm]:
    import torch

    from shoal.core.meter import Meter
    from shoal.parallel.comm import TorchComm

    torch.set_num_threads(1)
    with Meter([]) as meter:
        comm = TorchComm(
            meter, rank=rank, world=world, rendezvous=f"file://{store}", timeout_s=30.0
        )
        try:
            yield comm
        finally:
            comm.close()


def all_reduce(
    rank: int, world: int, store: str, sizes: list[int], repeats: int
) -> dict[str, list[float]]:
    """Seconds of one all-reduce between CPU ranks, by bytes; every rank calls it.

    Args:
        rank: this rank.
        world: number of ranks, all on this host.
        store: path of a file where they meet; it does not exist yet.
        sizes: bytes to sum.
        repeats: samples of each size.
    """
    with _joined(rank, world, store) as comm:
        return {str(size): _sums(comm, size, repeats) for size in sizes}


def crowd(
    rank: int, world: int, store: str, sizes: list[int], bursts: list[float], repeats: int
) -> dict[str, list[float]]:
    """Seconds of sums, and of turns of computing and meeting; every rank calls it.

    Args:
        rank: this rank.
        world: number of ranks, all on this host.
        store: path of a file where they meet; it does not exist yet.
        sizes: bytes to sum.
        bursts: seconds of computing before a meeting, on a core of one's own.
        repeats: samples of each.

    Returns:
        ``all_reduce BYTES``: seconds of one sum. ``meeting BURST``: seconds of computing so
        long and then summing 1 KiB. ``alone BURST``: one number, how long the computing takes
        while nobody else computes.
    """
    import torch

    with _joined(rank, world, store) as comm:
        found = {f"all_reduce {size}": _sums(comm, size, repeats) for size in sizes}
        a, b = torch.ones(128, 128), torch.ones(128, 128)
        out = torch.empty(128, 128)

        def compute(times: int) -> None:
            for _ in range(times):
                torch.mm(a, b, out=out)

        # One after the other, so that each has a core of its own.
        one = 0.0
        for turn in range(world):
            comm.barrier()
            if turn == rank:
                one = _seconds(lambda: compute(500)) / 500
        data = torch.zeros(256)
        for burst in bursts:
            times = max(1, round(burst / one))
            batch = max(4, round(0.04 / burst))
            samples = []
            for _ in range(repeats):
                comm.barrier()
                took = _seconds(partial(_turns, comm, compute, times, batch, data))
                samples.append(took / batch)
            found[f"meeting {burst}"] = samples
            found[f"alone {burst}"] = [times * one]
    return found


def _turns(
    comm: TorchComm, compute: Callable[[int], None], times: int, batch: int, x: Tensor
) -> None:
    for _ in range(batch):
        compute(times)
        comm.all_reduce(x, tag="probe").wait()


def _sums(comm: TorchComm, size: int, repeats: int) -> list[float]:
    import torch

    data = torch.zeros(max(1, size // 4))
    batch = 200 if size <= 65536 else 3

    def sums(times: int) -> None:
        for _ in range(times):
            comm.all_reduce(data, tag="probe").wait()

    sums(3)
    samples = []
    for _ in range(repeats):
        comm.barrier()
        samples.append(_seconds(lambda: sums(batch)) / batch)
    return samples


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
