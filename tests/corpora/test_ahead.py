"""Reading ahead: nothing is lost or repeated, and a save does not wait for the reader."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mixed import END, SOURCES, WEIGHTS, everything, loader, tokens_left

from shoal import checkpoint
from shoal.checkpoint.loader import LoaderState, merge, split
from shoal.core.errors import ConfigError
from shoal.corpora.ahead import ReadAhead
from shoal.corpora.mixture import MixtureLoader


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("fetched", [True, False])
def test_what_is_loaded_goes_on_bit_for_bit(readers: int, fetched: bool, tmp_path: Path) -> None:
    straight = loader(readers=readers)
    expected = [next(straight) for _ in range(20)]
    with (
        ReadAhead(loader(readers=readers), depth=3) as one,
        checkpoint.Checkpoints(tmp_path, mode="lazy") as checkpoints,
    ):
        for step in range(12):
            np.testing.assert_array_equal(next(one), expected[step])
            if fetched and step % 4 == 2:
                checkpoints.prepare({"loader": one})
            if step % 4 == 3:
                checkpoints.save(step + 1, {"loader": one})
    for step in (4, 8, 12):
        with ReadAhead(loader(readers=readers), depth=2) as two:
            next(two)  # what it has read is forgotten
            checkpoint.load(tmp_path, {"loader": two}, step=step)
            for batch in expected[step:]:
                np.testing.assert_array_equal(next(two), batch)


def test_other_numbers_of_ranks_lose_and_repeat_nothing() -> None:
    handed: Counter[int] = Counter()
    readers = [ReadAhead(loader(rank, 4, readers=2), depth=1 + rank) for rank in range(4)]
    states: list[LoaderState] = []
    for world in (3, 2, 5):
        for number, one in enumerate(readers):
            for turn in range(3 + number):
                if turn == 2 + number:
                    one.fetch_state()
                handed.update(next(one).reshape(-1).tolist())
        states = [one.state() for one in readers]
        assert handed + tokens_left(states) == everything(states)
        for one in readers:
            one.close()
        words = split(merge(states), world)
        readers = [ReadAhead(loader(rank, world)) for rank in range(world)]
        for one, state in zip(readers, words, strict=True):
            one.load_state(state)
    states = [one.state() for one in readers]
    assert handed + tokens_left(states) == everything(states)
    for one in readers:
        one.close()


def until(one: ReadAhead, there: Callable[[], bool]) -> None:
    """Return when the reader is so far."""
    for _ in range(30_000):
        if there():
            return
        one._thread.join(0.001)
    raise AssertionError("the reader does not come there")


class Gated:
    """Documents that can be held up.

    Args:
        documents: they.
    """

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents
        self.open, self.asked = threading.Event(), threading.Event()
        self.open.set()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> list[int]:
        if not self.open.is_set():
            self.asked.set()
        assert self.open.wait(30)
        return self.documents[number]


def test_a_fetched_state_does_not_wait_for_the_reader() -> None:
    gates = {name: Gated(documents) for name, documents in SOURCES.items()}
    slow = MixtureLoader(gates, WEIGHTS, seq_len=15, batch=2, seed=5, end=END, ahead=0)
    straight = loader(ahead=0)
    expected = [next(straight) for _ in range(8)]
    with ReadAhead(slow, depth=2) as one:
        until(one, lambda: one._read == 2)
        one.fetch_state()
        until(one, lambda: one._noted is not None)
        for gate in gates.values():
            gate.open.clear()
        np.testing.assert_array_equal(next(one), expected[0])
        until(one, lambda: any(gate.asked.is_set() for gate in gates.values()))
        fetched = one.state()  # though the reader is in the middle of the third batch
        assert one.waited_s == 0.0
        # Whoever has not fetched it waits until that batch is done.
        one._noted = None
        loader_states: list[LoaderState] = []
        asking = threading.Thread(target=lambda: loader_states.append(one.state()))
        asking.start()
        until(one, lambda: one._wanted is not None)
        assert not loader_states
        for gate in gates.values():
            gate.open.set()
        asking.join(30)
        assert one.waited_s > 0
    for state in (fetched, *loader_states):
        again = loader(ahead=0)
        again.load_state(state)
        for batch in expected[1:]:
            np.testing.assert_array_equal(next(again), batch)


def test_a_reader_that_fails_is_told_and_a_closed_one_refuses() -> None:
    class Broken(Gated):
        def __getitem__(self, number: int) -> list[int]:
            raise ValueError(f"document {number} is no text")

    sources = {name: Broken(documents) for name, documents in SOURCES.items()}
    broken = ReadAhead(MixtureLoader(sources, WEIGHTS, seq_len=15, batch=2, seed=5, end=END))
    with pytest.raises(ValueError, match="is no text"):
        next(broken)
    with pytest.raises(ValueError, match="is no text"):
        broken.state()
    broken.close()
    closed = ReadAhead(loader(), depth=1)
    closed.close()
    with pytest.raises(ConfigError, match="make another one"):
        for _ in range(3):
            next(closed)
    with pytest.raises(ConfigError, match="depth = 0"):
        ReadAhead(loader(), depth=0)
