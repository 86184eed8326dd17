"""Planted faults are named by kind and place; nothing is named where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from watch_flights import Script

from shoal.core.errors import ConfigError, RankError
from shoal.core.parts import table
from shoal.train.watch.c4d import C4D, delay_matrix
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.megascale import MegaScale, growing_spread
from shoal.train.watch.protocols import Fault


def found(faults: tuple[Fault, ...]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(fault.kind, fault.place, fault.ranks) for fault in faults}


def slow_cells(cells: set[tuple[int, int]], by: float = 5.0) -> Script:
    return Script(delay=lambda s, t: by if (s, t) in cells else 1.0)


def row(rank: int) -> set[tuple[int, int]]:
    return {(rank, other) for other in range(8) if other != rank}


def column(rank: int) -> set[tuple[int, int]]:
    return {(other, rank) for other in range(8) if other != rank}


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_found_where_nothing_is_wrong(seed: int) -> None:
    evidence = Script(seed=seed).evidence()
    for name in ("c4d", "megascale"):
        verdict = table("locator").build(name).locate(evidence)
        assert verdict.faults == ()
        assert verdict.notes == ()


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({(2, 5)}, {("link", (2, 5))}),
        (row(3), {("sender", (3,))}),
        (column(6), {("receiver", (6,))}),
        (row(1) | column(1), {("rank", (1,))}),
        # Five of seven cells are 71 %.
        (set(sorted(row(4))[:5]), {("sender", (4,))}),
        (set(sorted(row(4))[:4]), {("link", (4, other)) for other in (0, 1, 2, 3)}),
        # Two at once.
        (row(0) | column(7), {("sender", (0,)), ("receiver", (7,))}),
        (row(0) | {(5, 6)}, {("sender", (0,)), ("link", (5, 6))}),
        ({(1, 2), (4, 3)}, {("link", (1, 2)), ("link", (4, 3))}),
    ],
)
def test_slow_communication_is_placed(
    cells: set[tuple[int, int]], expected: set[tuple[str, tuple[int, ...]]]
) -> None:
    verdict = C4D().locate(slow_cells(cells).evidence())
    assert found(verdict.faults) == {("communication_slow", *pair) for pair in expected}
    assert all(3 < fault.ratio < 7 for fault in verdict.faults)
    # Everybody waits for the messages; nobody computes longer.
    assert MegaScale().locate(slow_cells(cells).evidence()).faults == ()


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_row_or_column_of_a_matrix_is_found(seed: int) -> None:
    noise = np.random.default_rng(seed)
    matrix = np.abs(noise.normal(1.0, 0.1, (16, 16)))
    np.fill_diagonal(matrix, np.nan)
    rank = int(noise.integers(16))
    assert C4D().judge(matrix) == ([], [])
    rows, columns = matrix.copy(), matrix.copy()
    rows[rank] *= 4
    columns[:, rank] *= 4
    assert found(tuple(C4D().judge(rows)[0])) == {("communication_slow", "sender", (rank,))}
    assert found(tuple(C4D().judge(columns)[0])) == {("communication_slow", "receiver", (rank,))}


def test_a_delay_below_twice_the_usual_is_none() -> None:
    assert C4D().locate(slow_cells(row(3), by=1.8).evidence()).faults == ()


def test_the_matrix_is_in_multiples_of_the_usual() -> None:
    matrix = delay_matrix(slow_cells({(0, 1)}).evidence())
    assert matrix[0, 1] == pytest.approx(5.0, rel=0.05)
    assert matrix[1, 0] == pytest.approx(1.0, rel=0.05)
    assert np.isnan(matrix[3, 3])


def test_who_computes_longer_is_named_and_not_who_waits() -> None:
    evidence = Script(work=lambda rank, step: 20.0 if rank == 5 else 10.0).evidence()
    expected = {("non_communication_slow", "rank", (5,))}
    assert found(MegaScale().locate(evidence).faults) == expected
    assert found(C4D().locate(evidence).faults) == expected


def test_two_slow_ranks_and_a_slow_link_at_once() -> None:
    script = Script(
        work=lambda rank, step: 20.0 if rank in (2, 5) else 10.0,
        delay=lambda s, t: 4.0 if (s, t) == (6, 7) else 1.0,
    )
    assert found(C4D().locate(script.evidence()).faults) == {
        ("non_communication_slow", "rank", (2,)),
        ("non_communication_slow", "rank", (5,)),
        ("communication_slow", "link", (6, 7)),
    }


def test_one_slow_step_is_no_straggler() -> None:
    evidence = Script(work=lambda rank, step: 40.0 if (rank, step) == (1, 6) else 10.0).evidence()
    assert MegaScale().locate(evidence).faults == ()
    assert C4D().locate(evidence).faults == ()


@pytest.mark.parametrize("locator", [C4D(), MegaScale()])
def test_who_has_not_entered_hangs(locator: C4D | MegaScale) -> None:
    script = Script()
    script.reduce(script.steps, absent=(3,))
    assert locator.locate(script.evidence(after_ms=5)).faults == (), "too early to say"
    verdict = locator.locate(script.evidence(after_ms=500))
    assert found(verdict.faults) == {("non_communication_hang", "rank", (3,))}
    assert "7 ranks wait for it" in verdict.faults[0].text


def test_two_hang_at_once() -> None:
    script = Script()
    script.reduce(script.steps, absent=(3, 6))
    assert found(C4D().locate(script.evidence(after_ms=500)).faults) == {
        ("non_communication_hang", "rank", (3,)),
        ("non_communication_hang", "rank", (6,)),
    }


def test_a_victim_of_another_communicator_is_no_suspect() -> None:
    """Rank 1 has not come since it waits for rank 0's message, and rank 0 stands in nothing."""
    script = Script()
    script.add(1, "receive", 14, 15, 0, float(script.clock[1]), 0.0)
    script.reduce(script.steps, absent=(0, 1))
    assert found(C4D().locate(script.evidence(after_ms=500)).faults) == {
        ("non_communication_hang", "rank", (0,))
    }


def test_a_message_that_does_not_arrive() -> None:
    script = Script()
    now = float(script.clock[0])
    script.add(2, "send", 14, 15, 4, now, 0.0)
    script.add(4, "receive", 14, 15, 2, now, 0.0)
    script.reduce(script.steps, absent=(2, 4))
    assert found(C4D().locate(script.evidence(after_ms=500)).faults) == {
        ("communication_hang", "link", (2, 4))
    }


def test_all_have_entered_and_nobody_leaves() -> None:
    script = Script()
    script.reduce(script.steps, leave=False)
    verdict = C4D().locate(script.evidence(after_ms=500))
    assert found(verdict.faults) == {("communication_hang", "communicator", tuple(range(8)))}
    assert "do not tell them apart" in verdict.faults[0].text


def test_ranks_that_wait_in_a_circle() -> None:
    script = Script(world=2)
    for rank in range(2):
        script.add(rank, "receive", 14, 15, 1 - rank, float(script.clock[rank]), 0.0)
    verdict = C4D().locate(script.evidence(after_ms=500))
    assert found(verdict.faults) == {("communication_hang", "communicator", (0, 1))}
    assert "circle" in verdict.faults[0].text


def test_missing_records_are_told() -> None:
    script = Script(work=lambda rank, step: 20.0 if rank == 5 else 10.0)
    verdict = C4D().locate(script.evidence(without=(1,)))
    assert found(verdict.faults) == {("non_communication_slow", "rank", (5,))}
    assert "no records of ranks [1]" in verdict.notes[0]
    script.reduce(script.steps, absent=(1,))
    verdict = C4D().locate(script.evidence(without=(1,), after_ms=500))
    assert found(verdict.faults) == {("non_communication_hang", "rank", (1,))}
    assert any("have no records" in note for note in verdict.notes)


def test_clocks_of_hosts_are_put_in_line() -> None:
    skew = {2: 4000.0, 3: -1500.0}
    script = Script(work=lambda rank, step: 20.0 if rank == 5 else 10.0, skew=skew)
    evidence = script.evidence()
    assert evidence.offsets[2] == pytest.approx(4000e6, abs=2e6)
    assert evidence.offsets[3] == pytest.approx(-1500e6, abs=2e6)
    assert found(C4D().locate(evidence).faults) == {("non_communication_slow", "rank", (5,))}
    link = Script(delay=lambda s, t: 5.0 if (s, t) == (2, 6) else 1.0, skew=skew)
    assert found(C4D().locate(link.evidence()).faults) == {("communication_slow", "link", (2, 6))}


def test_two_ranks_cannot_tell_ends_from_links() -> None:
    script = Script(world=2, delay=lambda s, t: 6.0 if s == 0 else 1.0)
    verdict = C4D().locate(script.evidence())
    assert {fault.place for fault in verdict.faults} <= {"link"}
    assert any("cannot be told" in note for note in verdict.notes)
    notes = MegaScale().locate(script.evidence()).notes
    assert any("have no peers with the same work" in note for note in notes)


def test_a_slow_decline_shows_in_the_spread() -> None:
    steady = growing_spread(Script(steps=30).evidence())
    script = Script(steps=30, work=lambda rank, step: 10.0 + (0.2 * step if rank == 4 else 0.0))
    assert growing_spread(script.evidence()) > 10 * abs(steady)


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ({"name": "c4d", "share": 1.5}, "share"),
        ({"name": "c4d", "factor": 1.0}, "factor"),
        ({"name": "c4d", "hang_s": 0.0}, "hang_s"),
        ({"name": "megascale", "steps": 0}, "steps"),
        ({"name": "megascale", "window": 3}, "window"),
        ({"name": "megascale", "ratio": 0.5}, "ratio"),
    ],
)
def test_wrong_options_are_refused(choice: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} = "):
        table("locator").build(choice)


def test_no_records_at_all() -> None:
    with pytest.raises(RankError, match=r"watch\.record"):
        Evidence({})


def test_a_slow_sender_of_four_ranks_is_seen_though_its_answers_are_slow_as_well() -> None:
    """Delays of four hosts of which one sends at a quarter of the rate, as measured."""
    nan = np.nan
    matrix = np.array(
        [
            [nan, 1.51, 1.61, 1.75],
            [5.91, nan, 4.87, 11.83],
            [1.0, 4.14, nan, 1.0],
            [0.99, 3.41, 0.99, nan],
        ]
    )
    faults, notes = C4D().judge(matrix)
    assert found(tuple(faults)) == {("communication_slow", "sender", (1,))}
    assert notes == []


def test_a_message_that_nobody_awaited_is_no_delay() -> None:
    """Rank 5 computes long: messages to it are there long before it looks."""
    matrix = delay_matrix(Script(work=lambda r, s: 40.0 if r == 5 else 10.0).evidence())
    assert np.nanmax(matrix) < 1.5
