"""What a rank checks of its machine before it trains: arithmetic, loopback, neighbours.

A product of integers small enough to be exact in fp32 has one right answer; a unit that
computes wrongly gives another one, and says so before it spoils a run.

Source: Jiang et al., MegaScale, 2024, section 4.3 (self-check diagnostics).
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from typing import TYPE_CHECKING

from shoal.core.errors import MachineError
from shoal.ir.hooks import StepHook, TrainStep

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.protocols import Comm

_ROWS, _INNER, _COLUMNS = 64, 256, 64
_MOST = 7
_LOOPBACK_BYTES = 8 << 20
_LOOPBACK_S = 10.0


@functools.cache
def _factors(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two integer matrices and their product, computed with integers."""
    import torch

    source = torch.Generator().manual_seed(seed)
    shape = {"generator": source, "dtype": torch.int64}
    x = torch.randint(-_MOST, _MOST + 1, (_ROWS, _INNER), **shape)  # type: ignore[call-overload]
    weight = torch.randint(-_MOST, _MOST + 1, (_COLUMNS, _INNER), **shape)  # type: ignore[call-overload]
    exact = (x[:, None, :] * weight[None]).sum(-1)
    return x.float(), weight.float(), exact.float()


def check_arithmetic(device: str = "cpu", *, seed: int = 0) -> None:
    """Compute a product whose exact value is known, as the model's layers do.

    Raises:
        MachineError: the result is wrong.
    """
    import torch
    import torch.nn.functional as F

    x, weight, exact = _factors(seed)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result = F.linear(x.to(device), weight.to(device)).cpu()
    wrong = int((result != exact).sum())
    if wrong:
        raise MachineError(
            f"self-check: {wrong} of {exact.numel()} elements of a matrix product are wrong; this "
            "device computes wrongly, exclude it"
        )


class WatchHook(StepHook):
    """Reports to watchers which step a rank is in, and checks its arithmetic now and then.

    Args:
        comm: all ranks; its recorder, where it has one, is updated, too.
        every: steps between checks of a watched rank; 0 for none.
    """

    kind = "watch"

    def __init__(self, comm: TorchComm, every: int, device: str) -> None:
        self._comm, self._every, self._device = comm, every, device

    def before_step(self, step: TrainStep) -> None:
        """Raises a MachineError where the device computes wrongly."""
        if self._comm.beat is not None:
            self._comm.beat.step(step.number)
        recorder = getattr(self._comm, "recorder", None)
        if recorder is not None:
            recorder.step = step.number
            if self._every and step.number % self._every == self._every - 1:
                check_arithmetic(self._device, seed=step.number)


def loopback_rate() -> float:
    """Bytes a second through this host's own network stack."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        listener.settimeout(_LOOPBACK_S)
        data = bytes(1 << 20)

        def send() -> None:
            with socket.create_connection(listener.getsockname(), _LOOPBACK_S) as out:
                for _ in range(_LOOPBACK_BYTES // len(data)):
                    out.sendall(data)

        sender = threading.Thread(target=send, daemon=True)
        begin = time.perf_counter()
        sender.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_LOOPBACK_S)
            got = 0
            while got < _LOOPBACK_BYTES and (data := connection.recv(1 << 20)):
                got += len(data)
        seconds = time.perf_counter() - begin
        sender.join(_LOOPBACK_S)
    return _LOOPBACK_BYTES / seconds


def check_rank(device: str = "cpu") -> dict[str, float]:
    """What a rank can check alone; returns its rates.

    Raises:
        MachineError: arithmetic is wrong.
    """
    begin = time.perf_counter()
    for seed in range(3):
        check_arithmetic(device, seed=seed)
    return {
        "arithmetic_s": time.perf_counter() - begin,
        "loopback_bytes_per_s": loopback_rate(),
    }


def check_neighbours(comm: Comm) -> tuple[int, ...]:
    """All-reduce with the neighbour below and with the one above; called by all ranks.

    Returns:
        Ranks whose sums were wrong with every neighbour; both of a pair where there are two
        ranks alone, which cannot be distinguished.
    """
    import torch

    world = comm.world
    turns = [[[first, first + 1] for first in range(turn, world - 1, 2)] for turn in range(2)]
    if world > 2:  # the last is the first one's neighbour
        turns += [[]] if world % 2 else []
        turns[-1].append([0, world - 1])
    wrong = torch.zeros(len(turns), world, device=comm.device)
    for turn, pairs in enumerate(turns):
        paired = {rank for pair in pairs for rank in pair}
        groups = sorted([*pairs, *([rank] for rank in range(world) if rank not in paired)])
        pair = comm.split(groups)
        x = torch.arange(4096, dtype=torch.float32, device=comm.device) * (comm.rank + 1)
        pair.all_reduce(x, tag="self-check").wait()
        numbers = sum(comm.ranks.index(rank) + 1 for rank in pair.ranks)
        exact = torch.arange(4096, dtype=torch.float32, device=comm.device) * numbers
        bad = not torch.equal(x, exact)
        if pair.world > 1:
            wrong[turn, comm.rank] = 1.0 if bad else -1.0
    comm.all_reduce(wrong, tag="self-check").wait()
    # A rank that was right with one neighbour is right.
    return tuple(
        rank
        for rank in range(world)
        if bool((wrong[:, rank] > 0).any()) and not bool((wrong[:, rank] < 0).any())
    )
