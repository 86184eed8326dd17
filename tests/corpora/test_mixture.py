"""The mixing loader: resumed as if nothing had happened, resharded with nothing lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mixed import SOURCES, WEIGHTS, everything, loader, tokens_left

from shoal import checkpoint
from shoal.checkpoint.loader import LoaderState, merge, split
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import CheckpointError, ConfigError
from shoal.corpora.mixture import MixtureLoader


@pytest.mark.parametrize("readers", [1, 2])
def test_four_three_two_ranks_hand_out_what_one_run_would(readers: int) -> None:
    handed: Counter[int] = Counter()
    loaders = [loader(rank, 4, readers=readers) for rank in range(4)]
    for world in (3, 2, 5):
        for number, one in enumerate(loaders):
            for _ in range(2 + number):  # some ranks are ahead of others
                handed.update(next(one).reshape(-1).tolist())
        states = [one.state() for one in loaders]
        assert handed + tokens_left(states) == everything(states)
        words = split(merge(states), world)
        loaders = [loader(rank, world) for rank in range(world)]
        for one, state in zip(loaders, words, strict=True):
            one.load_state(state)
    states = [one.state() for one in loaders]
    assert handed + tokens_left(states) == everything(states)
    assert sum(handed.values()) > 40 * 16


def test_the_same_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    def run(comm: ThreadComm) -> None:
        one, two = loader(comm.rank, 2), loader(comm.rank, 2)
        for _ in range(3):
            next(one)
        checkpoint.save(tmp_path, {"loader": one}, comm=comm)
        checkpoint.load(tmp_path, {"loader": two}, comm=comm)
        for _ in range(5):
            np.testing.assert_array_equal(next(one), next(two))

    run_ranks(2, run, timeout_s=20)

    def other(comm: ThreadComm) -> LoaderState:
        three = loader(comm.rank, 3)
        checkpoint.load(tmp_path, {"loader": three}, comm=comm)
        return three.state()

    states = run_ranks(3, other, timeout_s=20)
    assert [state.first for state in states] == [0, 1, 2] and states[0].generation == 1
    merge(states)


def test_ratios_hold() -> None:
    one = loader(seq_len=31)
    drawn = Counter(
        token // 1000 for _ in range(40) for token in next(one).reshape(-1).tolist() if token
    )
    mean = {name: np.mean([len(d) for d in docs]) for name, docs in SOURCES.items()}
    share = (drawn[1] / mean["prose"]) / (drawn[1] / mean["prose"] + drawn[2] / mean["code"])
    assert share == pytest.approx(0.75, abs=0.07)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="one for each source: code, prose"):
        MixtureLoader(SOURCES, {"prose": 1.0}, seq_len=4, batch=1, seed=0, end=0)
    with pytest.raises(ConfigError, match=r"sources\.code = .23 documents.*24 readers"):
        loader(0, 24)
    with pytest.raises(ConfigError, match=r"weights\.prose"):
        MixtureLoader(SOURCES, {**WEIGHTS, "prose": 0.0}, seq_len=4, batch=1, seed=0, end=0)
    with pytest.raises(CheckpointError, match=r"shared.*as this loader has it"):
        loader(seed=6).load_state(loader().state())
    (many,) = split(merge([loader().state()]), 1, readers=24)
    with pytest.raises(CheckpointError, match="at most 23"):
        loader().load_state(many)
