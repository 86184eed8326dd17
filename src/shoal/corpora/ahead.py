"""Batches read ahead by a thread, and a state of them that a save does not wait for.

While a reader is in the middle of a batch it has no state to resume from, so a caller that asks for
one waits until the batch is done. A program that asks one step before it saves has it when
it saves: the reader notes its state between two batches, and what was read before that and not yet
handed out belongs to it.

Source: Wan et al., ByteCheckpoint, 2024, section 4.3 (states of data workers are fetched ahead).
Shapes: B sequences of T + 1 tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

from shoal.core.errors import ConfigError, require

if TYPE_CHECKING:
    import numpy as np

    from shoal.checkpoint.loader import LoaderState


class BatchLoader(Protocol):
    """A loader of one rank, such as :class:`~shoal.corpora.mixture.MixtureLoader`.

    Row r of a batch is from the reader r modulo their number.
    """

    def __next__(self) -> np.ndarray:
        """The next batch: int64 [B, T + 1]."""

    def state(self) -> LoaderState:
        """What is left and begun after the batches that were handed out."""

    def load_state(self, state: LoaderState) -> None:
        """Go on where a state was taken."""


class ReadAhead:
    """The batches of a loader, read by a thread while the program computes.

    Save it as ``{"loader": read_ahead}``, and call :meth:`fetch_state` one step before: what is
    saved is exactly what was not handed out, however much was read. Any number of ranks loads it.

    Args:
        loader: only this object uses it from now on.
        depth: batches that are kept ready.

    Attributes:
        waited_s: seconds for which :meth:`state` has waited for the reader, in all.
    """

    def __init__(self, loader: BatchLoader, *, depth: int = 2) -> None:
        require(depth >= 1, "depth", depth, expected="at least 1")
        self.waited_s = 0.0
        self._loader = loader
        self._depth = depth
        self._changed = threading.Condition()
        self._begin()

    def _begin(self) -> None:
        self._ready: deque[np.ndarray] = deque()
        self._read = self._handed = 0
        self._wanted: int | None = None
        self._noted: tuple[int, LoaderState] | None = None
        self._failure: Exception | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """The next batch.

        Raises:
            StopIteration: the loader has no more.
            ConfigError: it was closed.
        """
        with self._changed:
            self._await(lambda: bool(self._ready))
            batch = self._ready.popleft()
            self._handed += 1
            self._changed.notify_all()
        return batch

    def fetch_state(self) -> None:
        """Begin to note the state that is wanted when one more batch was handed out."""
        with self._changed:
            self._wanted = self._handed + 1
            self._changed.notify_all()

    def state(self) -> LoaderState:
        """What is left after the batches that were handed out; waits only if it was not fetched."""
        begin = time.perf_counter()
        with self._changed:
            if self._noted is None or self._noted[0] < self._handed:
                self._wanted = self._handed
                self._changed.notify_all()
                self._await(lambda: self._noted is not None and self._noted[0] >= self._handed)
                self.waited_s += time.perf_counter() - begin
            assert self._noted is not None
            read, noted = self._noted
            # The oldest that are ready; those behind were read after the state was noted.
            rows = [batch.tolist() for batch in list(self._ready)[: read - self._handed]]
        count = len(noted.own)
        own = []
        for number, reader in enumerate(noted.own):
            unused = [tuple(row) for batch in rows for row in batch[number::count]]
            own.append(replace(reader, ready=(*unused, *reader.ready)))
        return replace(noted, own=tuple(own))

    def load_state(self, state: LoaderState) -> None:
        """Go on where a state was taken; what was read is forgotten.

        Raises:
            CheckpointError: it is of other sources, ratios, lengths or another seed.
        """
        self.close()
        try:
            self._loader.load_state(state)
        finally:
            self._begin()

    def close(self) -> None:
        """End the thread, after the batch that it is reading."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await(self, there: Callable[[], bool]) -> None:
        """Wait for the reader; the caller has the lock."""
        self._changed.wait_for(lambda: there() or self._failure is not None or self._over)
        if there():
            return
        if self._failure is not None:
            raise self._failure
        raise ConfigError("read-ahead: it was closed; make another one to go on")

    def _run(self) -> None:
        try:
            while self._turn():
                batch = next(self._loader)
                with self._changed:
                    self._ready.append(batch)
                    self._read += 1
                    self._changed.notify_all()
        except Exception as cause:  # raised to the next caller
            with self._changed:
                self._failure = cause
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Note the state where it is wanted, and wait for room; false at the end."""
        with self._changed:
            while not self._over:
                if self._wanted is not None and self._read >= self._wanted:
                    self._noted = self._read, self._loader.state()
                    self._wanted = None
                    self._changed.notify_all()
                if len(self._ready) < self._depth:
                    return True
                self._changed.wait()
        return False
