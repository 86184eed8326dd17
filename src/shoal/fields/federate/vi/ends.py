"""Both ends of an exchange: vectors become tensors, and the mean goes back to all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.core.random import seed64
from shoal.fields.federate.protocols import UpdateCompressor
from shoal.fields.federate.vi.protocols import SERVER, MeanExchange

Tensors = Mapping[str, np.ndarray]


class Sender:
    """Compresses the vectors of one place, and keeps what compression leaves out.

    Args:
        seed: of the run.
        place: number of a worker, or SERVER.
    """

    def __init__(self, seed: int, place: int) -> None:
        self._seed, self._place = seed, place
        self._left: np.ndarray | None = None

    def encode(
        self, number: int, vector: np.ndarray, compressor: UpdateCompressor, *, feedback: bool
    ) -> Tensors:
        """Tensors of the exchange with a number."""
        if not feedback:
            return compressor.encode(vector, exchange_key(self._seed, number, self._place))
        wanted = vector if self._left is None else vector + self._left
        key = exchange_key(self._seed, number, self._place)
        tensors = compressor.encode(wanted, key)
        self._left = wanted - compressor.decode(tensors, len(vector), key)
        return tensors


def exchange_key(seed: int, number: int, place: int) -> int:
    """Key of a compressor, which both ends know."""
    return seed64(seed, purpose="compressed exchange", step=number, index=place + 1)


class Center:
    """The server's end: the mean of what has arrived, compressed once for all.

    Args:
        seed: of the run.
        workers: M.
        size: of vectors.
    """

    def __init__(self, seed: int, workers: int, size: int) -> None:
        self._seed, self._workers, self._size = seed, workers, size
        self._sender = Sender(seed, SERVER)

    def members(self, exchange: MeanExchange) -> tuple[int, ...]:
        """Workers that send in an exchange."""
        return tuple(range(self._workers)) if exchange.members is None else exchange.members

    def mean(
        self, number: int, exchange: MeanExchange, arrived: Mapping[int, Tensors]
    ) -> tuple[Tensors, np.ndarray]:
        """What goes to all workers, and the vector float32 [n] that it stands for.

        Raises:
            UpdateRefusedError: a worker's tensors are not what its compressor writes.
        """
        total = np.zeros(self._size)
        for worker in self.members(exchange):
            key = exchange_key(self._seed, number, worker)
            total += exchange.up.decode(arrived[worker], self._size, key)
        mean = total / len(arrived)
        tensors = self._sender.encode(number, mean, exchange.down, feedback=exchange.feedback)
        return tensors, received(self._seed, number, exchange, tensors, self._size)


def received(
    seed: int, number: int, exchange: MeanExchange, tensors: Tensors, size: int
) -> np.ndarray:
    """The mean, as every place receives it.

    Raises:
        UpdateRefusedError: the tensors are not what the server's compressor writes.
    """
    return exchange.down.decode(tensors, size, exchange_key(seed, number, SERVER))
