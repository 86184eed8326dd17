"""What a rank computes is told apart into phases, with waiting left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.core.parts import table
from shoal.train.watch.diagnose import heat_map
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.hangs import find_hangs
from shoal.train.watch.phases import open_phases
from shoal.train.watch.recorder import Recorder, read

MS = 1_000_000
WORLD, STEPS = 4, 14
SPANS: list[Any] = []
"""Spans that are never left: one that is dropped would end."""


def recorded(folder: Path, slow: str, *, hangs: int | None = None) -> Evidence:
    """Rank 2 takes twice as long in one phase; a sum inside of backward makes the others wait."""
    for rank in range(WORLD):
        now = [MS]
        recorder = Recorder(folder / f"rank-{rank}.flight", rank, WORLD, clock=lambda n=now: n[0])
        comm, op, tag = (recorder.name(n) for n in ("comm::0,1,2,3", "all_reduce", "x"))
        for step in range(STEPS):
            recorder.step = step
            begin = now[0]
            forward, backward = (
                (2 if rank == 2 and slow == name else 1) * MS * length
                for name, length in (("forward", 10), ("backward", 20))
            )
            with recorder.span("forward"):
                now[0] += forward
            span = recorder.span("backward")
            span.__enter__()
            SPANS.append(span)
            now[0] += backward
            if hangs == rank and step == STEPS - 1:
                break
            number = recorder.enter(comm, op, tag, seq=step + 1, nbytes=64)
            recorder.issued(number)
            recorder.waited(number)
            if hangs is not None and step == STEPS - 1:
                break
            now[0] = begin + 60 * MS  # all have come
            recorder.left(number)
            span.__exit__(None, None, None)
        recorder.close()
    return Evidence.load(folder, now=10_000 * MS)


@pytest.mark.parametrize("slow", ["forward", "backward"])
@pytest.mark.parametrize("locator", ["megascale", "c4d"])
def test_the_phase_of_a_slow_rank_is_named(tmp_path: Path, slow: str, locator: str) -> None:
    evidence = recorded(tmp_path, slow)
    assert evidence.phases[2][3][slow] == pytest.approx(0.02 if slow == "forward" else 0.04)
    assert evidence.phases[0][3]["backward"] == pytest.approx(0.02), "without its waiting"
    (fault,) = table("locator").build({"name": locator, "hang_s": 1e6}).locate(evidence).faults
    assert (fault.ranks, fault.phase) == ((2,), slow)
    assert f"100% of the difference is in {slow} (2.00 times)" in fault.text
    assert "busy in backward" in heat_map(evidence)


def test_the_phase_of_a_hanging_rank_is_named(tmp_path: Path) -> None:
    evidence = recorded(tmp_path, "none", hangs=1)
    (fault,) = find_hangs(evidence, 1.0).faults
    assert (fault.ranks, fault.phase) == ((1,), "backward")
    assert "it is in backward" in fault.text
    flight = read(tmp_path / "rank-1.flight")
    assert flight is not None and [one.name for one in open_phases(flight)] == ["backward"]
