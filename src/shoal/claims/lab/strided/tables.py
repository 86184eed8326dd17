"""What :class:`~shoal.claims.lab.strided.method.MethodModel` needs to know of two ranks: measured.

All ranks call :func:`measure_parts`; ranks 0 and 1 time messages to each other, and all ranks
get rank 0's tables, so that both ends of a message choose the same method.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.claims.lab.strided.method import (
    MESSAGES,
    LocalityTimes,
    MethodModel,
    TimeGrid,
    measure_packing,
)
from shoal.core.errors import RankError, require

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

_TAG = "strided_tables"
# Bytes of many messages behind each other that are really sent; more take in proportion.
_MANY = 2**24


def measure_parts(comm: Comm, *, largest: int = 2**24, repeats: int = 5) -> LocalityTimes:
    """Tables of packing, copies and messages, the same on all ranks; takes seconds.

    Args:
        comm: at least two ranks; all call it.
        largest: bytes of the largest message.
        repeats: runs of which the median counts.

    Raises:
        RankError: there is one rank only.
    """
    require(
        comm.world >= 2, "strided tables ranks", comm.world, expected="at least 2", error=RankError
    )
    result = None
    if comm.rank < 2:
        send, blocks = _messages(comm, largest, repeats)
    if comm.rank == 0:
        packing, unpacking = measure_packing(largest=largest, repeats=repeats)
        copies = _copies(largest, repeats)
        result = LocalityTimes(
            pack=packing,
            unpack=unpacking,
            send=send,
            blocks=blocks,
            copy_out=copies,
            copy_in=copies,
        )
    return LocalityTimes.model_validate_json(
        _shared(comm, result.model_dump_json() if result else "")
    )


def agreed(comm: Comm, model: MethodModel) -> MethodModel:
    """Rank 0's model, on all ranks."""
    names = _shared(comm, ",".join(model.parts)).split(",")
    return MethodModel(
        {
            name: LocalityTimes.model_validate_json(
                _shared(comm, model.parts[name].model_dump_json() if comm.rank == 0 else "")
            )
            for name in names
        }
    )


def _shared(comm: Comm, text: str) -> str:
    """Rank 0's text."""
    import torch

    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    comm.broadcast(length, 0, tag=_TAG).wait()
    if comm.rank != 0:
        data = torch.empty(int(length), dtype=torch.uint8)
    comm.broadcast(data, 0, tag=_TAG).wait()
    return bytes(data.tolist()).decode()


def _messages(comm: Comm, largest: int, repeats: int) -> tuple[TimeGrid, TimeGrid]:
    """Seconds of one message by bytes, and of many by number and bytes; ranks 0 and 1."""
    import torch

    sizes = [2.0**k for k in range(0, largest.bit_length(), 2)]
    buffer = torch.zeros(max(_MANY, largest), dtype=torch.uint8)
    peer = 1 - comm.rank

    def there(count: int, size: int, answer: int) -> None:
        """So many messages to rank 1, and one back."""
        parts = [buffer[i * size : (i + 1) * size] for i in range(count)]
        moves = (comm.send, comm.receive) if comm.rank == 0 else (comm.receive, comm.send)
        pending = [moves[0](x, peer, tag=_TAG) for x in parts]
        for one in pending:
            one.wait()
        moves[1](buffer[:answer], peer, tag=_TAG).wait()

    def seconds(count: int, size: int, answer: int) -> float:
        return _median(repeats, lambda: there(count, size, answer))

    one_way = [seconds(1, int(size), int(size)) / 2 for size in sizes]
    numbers = [4.0**k for k in range(7) if 4**k <= MESSAGES]
    many: list[list[float]] = []
    for number in numbers:
        row = []
        for place, size in enumerate(sizes):
            if number * size > _MANY and many:
                row.append(many[-1][place] * 4)
            else:
                row.append(max(1e-9, seconds(int(number), int(size), 1) - one_way[0]))
        many.append(row)
    return (
        TimeGrid(rows=tuple(sizes), seconds=tuple((s,) for s in one_way)),
        TimeGrid(rows=tuple(numbers), columns=tuple(sizes), seconds=tuple(map(tuple, many))),
    )


def _copies(largest: int, repeats: int) -> TimeGrid:
    """Seconds of a copy from the host to the host, which is what staging costs there."""
    import torch

    sizes = [2.0**k for k in range(0, largest.bit_length(), 2)]
    buffers = [torch.zeros(largest, dtype=torch.uint8) for _ in range(2)]
    return TimeGrid(
        rows=tuple(sizes),
        seconds=tuple(
            (
                _median(
                    repeats,
                    lambda size=int(size): buffers[0][:size].copy_(buffers[1][:size]),  # type: ignore[misc]
                ),
            )
            for size in sizes
        ),
    )


def _median(repeats: int, run: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return max(1e-9, statistics.median(times[1:]))
