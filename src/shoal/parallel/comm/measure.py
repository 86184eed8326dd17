"""What the collective probe runs in its child processes: the collectives that training uses."""

from __future__ import annotations

import time

__all__ = ["all_reduce"]


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
    import torch

    from shoal.core.meter import Meter
    from shoal.parallel.comm.collectives import TorchComm

    torch.set_num_threads(1)
    with Meter([]) as meter:
        comm = TorchComm(
            meter, rank=rank, world=world, rendezvous=f"file://{store}", timeout_s=30.0
        )
        found = {}
        try:
            for size in sizes:
                data = torch.zeros(max(1, size // 4))
                batch = 200 if size <= 65536 else 3
                samples = []
                for _ in range(3):
                    comm.all_reduce(data, tag="probe").wait()
                for _ in range(repeats):
                    comm.barrier()
                    begin = time.perf_counter()
                    for _ in range(batch):
                        comm.all_reduce(data, tag="probe").wait()
                    samples.append((time.perf_counter() - begin) / batch)
                found[str(size)] = samples
        finally:
            comm.close()
    return found
