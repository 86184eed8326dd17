"""What the page of a federation's run shows."""

from __future__ import annotations

import pytest

from shoal.core.svg import Chart
from shoal.fields.federate.follow import _POINTS, FederationFollower
from shoal.fields.federate.job import FederateJob, FederatePlan
from shoal.machine.described import load


def plan(**values: object) -> FederatePlan:
    job = FederateJob.model_validate({"clients": "4", "algorithm": "fedavg", **values})
    return FederatePlan(
        job=job, machine=load("laptop"), predicted={}, parameters=7, samples=(1,) * 4
    )


def evaluate(at: int) -> dict[str, object]:
    row = {"seconds": 1.0 * at, "up_bytes": 100.0 * at, "accuracy": at / 5000, "loss": 1.0}
    return {"kind": "evaluate", "version": at, "steps": at, **row}


def arrive(client: str, seconds: float, stale: int = 0) -> dict[str, object]:
    return {"kind": "arrive", "client": client, "seconds": seconds, "stale": stale, "loss": 0.5}


def test_clients_are_counted_and_those_to_look_at_come_first() -> None:
    follower = FederationFollower()
    for name in ("c0", "c1", "c2", "c3"):
        follower.take({"kind": "assign", "client": name})
    for event in (arrive("c0", 1.0), arrive("c1", 1.0), arrive("c2", 9.0, stale=3)):
        follower.take(event)
    follower.take({"kind": "aggregate", "clients": ["c0", "c2"]})
    follower.take({"kind": "refuse", "client": "c3", "reason": "has numbers that are not finite"})
    follower.take({"kind": "leave", "client": "c3"})
    follower.take({"kind": "unheard", "of": 1})
    (table,) = follower.tables(plan(attack="sign_flip", attackers=1))
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["c3", "c0", "c2", "c1"]
    assert rows["c3"][:4] == ("refused 1 times, gone", "1", "0", "0")
    assert rows["c0"][:4] == ("malicious", "1", "1", "0")
    assert rows["c2"][0] == "slow"
    assert rows["c2"][5:7] == ("3.00", "3")
    assert rows["c1"][:4] == ("–", "1", "0", "1")  # it arrived, and was not used
    assert len(table.columns) == len(table.right) == len(table.rows[0])


def test_curves_are_against_time_and_bytes_and_stay_short() -> None:
    follower = FederationFollower()
    assert not follower.charts()
    for at in range(5000):
        follower.take(evaluate(at))
    time, nbytes, loss = follower.charts()
    assert all(isinstance(one, Chart) and one.render() for one in (time, nbytes, loss))
    x = time.series[0].x
    assert _POINTS / 2 < len(x) <= 2 * _POINTS
    assert (x[0], x[-1]) == (0.0, 4999.0)
    assert nbytes.series[0].x[-1] == pytest.approx(0.4999)
    follower.take({"kind": "fairness", "accuracy": [0.25, 0.5, 1.0]})
    clients = follower.charts()[-1]
    assert clients.series[0].y == [25.0, 50.0, 100.0]
    assert clients.series[0].x == [0.0, 50.0, 100.0]


@pytest.mark.parametrize("event", [{"kind": "evaluate"}, {"kind": "arrive", "client": "c0"}, {}])
def test_a_damaged_event_is_one_that_the_page_counts(event: dict) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        FederationFollower().take(event)
