"""How many nodes pay, by what steps cost and what came of earlier guesses."""

from __future__ import annotations

from itertools import accumulate

import pytest

from shoal.plan.trees.drafting import ProfitableDrafting, RowCosts

EXPECTED = tuple(accumulate(0.6**level for level in range(9)))
CHEAP = RowCosts(rows=(1, 64), seconds_of=(1.0, 1.2))
DEAR = RowCosts(rows=(1, 64), seconds_of=(1.0, 64.0))
MIXED = RowCosts(rows=(1, 16, 64), seconds_of=(1.0, 1.1, 8.0))


def test_guesses_are_made_where_rows_are_cheap_and_nowhere_else():
    assert ProfitableDrafting(EXPECTED, CHEAP).nodes(1) == 8
    assert ProfitableDrafting(EXPECTED, DEAR).nodes(1) == 0
    mixed = ProfitableDrafting(EXPECTED, MIXED)
    assert [mixed.nodes(requests) for requests in (1, 2, 32)] == [8, 6, 0]


def test_what_a_guess_takes_beside_its_rows_turns_it_off():
    dear = RowCosts(rows=CHEAP.rows, seconds_of=CHEAP.seconds_of, draft_request_s=0.5)
    assert ProfitableDrafting(EXPECTED, dear).nodes(1) > 0
    assert ProfitableDrafting(EXPECTED, dear).nodes(8) == 0


def test_wrong_guesses_turn_it_off_and_it_is_tried_again():
    paying = ProfitableDrafting(EXPECTED, CHEAP)
    for _ in range(300):
        if paying.nodes(1):
            paying.observe([4], [0])
    tries = [step for step in range(1000) if paying.nodes(1)]
    assert len(tries) in (6, 7, 8)
    assert tries[1] == tries[0] + 1


def test_nothing_is_tried_where_rows_are_too_dear_for_any_guess():
    paying = ProfitableDrafting(EXPECTED, MIXED)
    for _ in range(300):
        paying.nodes(1)
        paying.observe([4], [0])
    assert any(paying.nodes(1) for _ in range(600))
    assert not any(paying.nodes(32) for _ in range(600))


def test_requests_that_find_nothing_to_guess_count():
    """Of a text of which one place in twenty has a guess, the rest pays for looking."""
    cost = RowCosts(rows=CHEAP.rows, seconds_of=CHEAP.seconds_of, draft_request_s=0.2)
    paying = ProfitableDrafting(EXPECTED, cost)
    assert paying.nodes(1)
    for step in range(400):
        paying.observe([4 if step % 20 == 0 else 0], [2 if step % 20 == 0 else 0])
    assert paying.share == pytest.approx(0.05, abs=0.05)
    assert paying.worth > 0.8
    assert paying.nodes(1) == 0


def test_a_drafter_that_was_told_nothing_while_it_was_off_is_forgiven():
    paying = ProfitableDrafting(EXPECTED, MIXED)
    assert not paying.nodes(32)
    assert paying.nodes(1)
    paying.observe([0, 0], [0, 0])
    assert paying.share == 1.0
    assert paying.nodes(1)
    paying.observe([0, 0], [0, 0])
    assert paying.share < 1.0


def test_the_table_is_the_choice():
    paying = ProfitableDrafting(EXPECTED, MIXED)
    table = paying.table(2)
    assert table[0] == (1.0, MIXED.seconds(2), 1.0)
    assert max(table, key=lambda nodes: table[nodes][2]) == paying.best(2)


def steps(paying, requests, really, count):
    """Let it decide so many steps of a machine whose steps really cost this; how many guessed."""
    guessing = 0
    for _ in range(count):
        nodes = paying.nodes(requests)
        guessing += nodes > 0
        seconds = really.seconds(requests * (1 + nodes))
        paying.took(requests, requests if nodes else 0, requests * nodes, seconds)
        if nodes:
            hoped = EXPECTED[nodes] - 1
            paying.observe([nodes] * requests, [hoped] * requests)
    return guessing


def test_a_table_that_was_measured_on_a_busy_machine_is_put_right():
    busy = RowCosts(rows=(1, 16, 64), seconds_of=(1.9, 2.0, 2.2))
    really = RowCosts(rows=(1, 16, 64), seconds_of=(1.0, 1.1, 5.0))
    for cost, most in ((really, 40), (DEAR, 60)):  # the farther off, the longer it takes
        paying = ProfitableDrafting(EXPECTED, busy)
        assert paying.nodes(16)
        assert steps(paying, 16, cost, 100) < most
        assert steps(paying, 16, cost, 600) <= 6


def test_guesses_that_were_dear_for_a_while_come_back():
    """Something else took the machine while there were guesses; a few tries say that it ended."""
    paying = ProfitableDrafting(EXPECTED, CHEAP)
    steps(paying, 1, RowCosts(rows=(1, 2, 64), seconds_of=(1.0, 9.0, 9.0)), 2000)
    assert steps(paying, 1, CHEAP, 100) <= 2
    steps(paying, 1, CHEAP, 2000)
    assert steps(paying, 1, CHEAP, 100) > 95


def test_looking_in_vain_is_seen_too():
    """A drafter that finds nothing, and takes longer to say so than was measured."""
    paying = ProfitableDrafting(EXPECTED, CHEAP)
    for _ in range(120):
        value = 8 if paying.nodes(8) else 0
        paying.took(8, value, 0, CHEAP.seconds(8) * (4.0 if value else 1.0))
    assert not any(paying.nodes(8) for _ in range(100))


def test_a_table_that_is_right_stays_on():
    paying = ProfitableDrafting(EXPECTED, CHEAP)
    assert steps(paying, 1, CHEAP, 1000) > 980
    slower = RowCosts(rows=CHEAP.rows, seconds_of=tuple(3 * one for one in CHEAP.seconds_of))
    assert steps(ProfitableDrafting(EXPECTED, CHEAP), 1, slower, 1000) > 980


def test_steps_that_are_late_now_and_then_change_nothing():
    paying = ProfitableDrafting(EXPECTED, CHEAP)
    for step in range(400):
        nodes = paying.nodes(2)
        late = 50.0 if step % 5 == 0 and nodes else 1.0
        took = CHEAP.seconds(2 * (1 + nodes)) * late
        paying.took(2, 2 if nodes else 0, 2 * nodes, took)
    assert sum(paying.nodes(2) > 0 for _ in range(100)) >= 98
