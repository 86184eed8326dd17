"""What every scheduler must keep, whatever happens; and what is particular to each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driven_federations import Times, driven, info_of
from shoal.core.parts import table
from shoal.fields.federate.schedule.fedbuff import FedBuff
from shoal.fields.federate.schedule.tiered import Tiered

NAMES = ("fedavg", "tiered", "fedasync", "fedbuff", "fedcompass")


class Drawn:
    """Durations that a test draws: a factor for each job, the same for the same number."""

    def __init__(self, factors):
        self.factors = factors

    def seconds(self, job):
        return self.factors[job.number % len(self.factors)] * (1 + 0.1 * job.steps)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(
    factors=st.lists(st.floats(0.01, 20), min_size=3, max_size=12),
    samples=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    faults=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=4),
)
def test_nothing_is_done_twice_and_nobody_is_forgotten(name, factors, samples, faults):
    names = {f"c{at}": count for at, count in enumerate(samples)}
    info = info_of(names)
    clock, events = driven(table("client_scheduler").build(name), info, Drawn(factors))
    clock.begin()
    out = set()
    for event in range(80):
        for at, who in faults:
            client = f"c{who % len(names)}"
            if at == event and client not in out:
                clock.leave(client)
                out.add(client)
            elif at + 5 == event and client in out:
                clock.join(client)
                out.discard(client)
        if len(out) < len(names):
            assert clock.step()
        else:
            clock.step()
    for client in sorted(out):
        clock.join(client)
    before = {fields["client"]: fields["number"] for kind, fields in events if kind == "assign"}
    for _ in range(60 * len(names) ** 2):
        assert clock.step()

    used, arrived, working = [], set(), set()
    for kind, fields in events:
        if kind == "assign":
            assert fields["client"] not in working, "two jobs at once"
            working.add(fields["client"])
        elif kind == "arrive":
            working.discard(fields["client"])
            arrived.add(fields["number"])
        elif kind == "leave":
            working.discard(fields["client"])
        elif kind == "aggregate":
            used += fields["numbers"]
            assert np.all(np.isfinite(fields["weights"]))
            assert min(fields["weights"]) > 0
    assert len(used) == len(set(used)), "an update was aggregated twice"
    assert set(used) <= arrived
    after = {fields["client"]: fields["number"] for kind, fields in events if kind == "assign"}
    assert all(after[client] > number for client, number in before.items()), "one is forgotten"
    # Nothing but the newest updates waits to be aggregated.
    waiting = clock.coordinator._waiting
    assert len(waiting) <= 2 * len(names)


def test_a_buffer_is_a_mean_that_falls_with_staleness():
    clock, events = driven(
        FedBuff(size=2, by_samples=True), info_of({"a": 3, "b": 1}), Times({"a": 1.0, "b": 2.5})
    )
    clock.begin()
    while clock.coordinator.version < 2:
        clock.step()
    made = [fields for kind, fields in events if kind == "aggregate"]
    # a at 10 and 20; b at 25 from version 0, which is one late, with a's third from version 1.
    assert [one["clients"] for one in made] == [["a", "a"], ["b", "a"]]
    assert made[0]["weights"] == pytest.approx([0.75, 0.75])
    assert made[1]["stale"] == [1, 0]
    assert made[1]["weights"] == pytest.approx([0.25 / 2**0.5, 0.75])


def test_tiers_hold_clients_of_one_speed():
    step_s = {"c0": 1.0, "c1": 1.1, "c2": 5.0, "c3": 5.2}
    clock, events = driven(Tiered(tiers=2), info_of(dict.fromkeys(step_s, 1)), Times(step_s))
    clock.begin()
    for _ in range(200):
        clock.step()
    made = [tuple(sorted(fields["clients"])) for kind, fields in events if kind == "aggregate"]
    assert made[0] == tuple(step_s)
    assert set(made[1:]) == {("c0", "c1"), ("c2", "c3")}
    # In proportion to clients, so about as often.
    assert 0.25 < np.mean([one == ("c0", "c1") for one in made[1:]]) < 0.75
