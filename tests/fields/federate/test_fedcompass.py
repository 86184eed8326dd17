"""FedCompass: a schedule computed by hand, its bounds, and what it does with late clients."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from driven_federations import Times, driven, info_of
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.federate.protocols import FederationError, LocalJob
from shoal.fields.federate.schedule.fedcompass import FedCompass

SHARES = {"a": 2, "b": 1, "c": 1}
STEP_S = {"a": 1.0, "b": 2.0, "c": 4.0}
# Of an update that is s versions late, for a share of the examples: 0.9 (1 + s)^-1/2 share.
W = lambda share, s: 0.9 * (1 + s) ** -0.5 * share  # noqa: E731


def compass(**options):
    return FedCompass(**{"q_max": 10, "q_min": 2, **options})


def run_until(clock, end):
    clock.begin()
    while clock.coordinator.next_timer() is not None or clock._due:
        nexts = [clock._due[0][0]] if clock._due else []
        timer = clock.coordinator.next_timer()
        if min(nexts + ([] if timer is None else [timer])) > end:
            return
        clock.step()


def of(events, kind, *names):
    return [tuple(fields[name] for name in names) for one, fields in events if one == kind]


def test_a_schedule_computed_by_hand():
    """Three clients of 1, 2 and 4 s a step; the third job of c takes 18 s, and so comes late."""
    # It is job 15: two steps that end at 52 + 18.
    clock, events = driven(compass(), info_of(SHARES), Times(STEP_S, {15: 18.0}))
    run_until(clock, 74)
    assigned = of(events, "assign", "now", "client", "steps", "version")
    assert assigned == [
        (0, "a", 10, 0), (0, "b", 10, 0), (0, "c", 10, 0),
        (10, "a", 10, 1),  # group 1: expected at 20, at 22 at the latest
        (20, "b", 6, 2),  # group 2, which ends when a comes for the next time: (22 + 10 - 20) / 2
        (20, "a", 10, 3),  # group 3: 12 steps until group 2 ends are too many
        (30, "a", 2, 4),  # joins group 2, expected at 32
        (32, "a", 10, 5), (32, "b", 5, 5),  # group 4, the fastest first
        (40, "c", 3, 6),  # group 5: (44 + 10 - 40) / 4 = 3.5
        (42, "a", 10, 7), (42, "b", 5, 7),  # join group 5, expected at 52
        (52, "a", 10, 8), (52, "b", 5, 8), (52, "c", 2, 8),  # group 6, of all
        (64, "a", 10, 9), (64, "b", 5, 9),  # its latest time: without c
        (70, "c", 2, 9),  # late: (76 + 10 - 70) / 8.5 is 1, raised to 2
        (74, "a", 10, 10),  # group 9, expected at 84, in which b would make 5
        (74, "b", 6, 10),  # joins c's group, expected at 87
    ]  # fmt: skip
    made = of(events, "aggregate", "now", "clients", "stale", "weights")
    wanted = [
        (10, ["a"], [0]), (20, ["b"], [1]), (20, ["a"], [1]), (30, ["a"], [0]),
        (32, ["b", "a"], [2, 0]), (40, ["c"], [5]), (42, ["a", "b"], [1, 1]),
        (52, ["c", "a", "b"], [1, 0, 0]), (64, ["a", "b"], [0, 0]),
        (74, ["c", "a", "b"], [1, 0, 0]),  # with the late one
    ]  # fmt: skip
    assert [one[:3] for one in made] == wanted
    for _, clients, stale, weights in made:
        shares = [SHARES[name] / 4 for name in clients]
        assert weights == pytest.approx([W(a, s) for a, s in zip(shares, stale, strict=True)])
    # Clients send ones: the model is minus the sum of all weights.
    total = sum(sum(weights) for *_, weights in made)
    assert clock.coordinator.model[0] == pytest.approx(-total, rel=1e-6)
    seconds = clock.coordinator._machinery.scheduling.seconds
    assert seconds == pytest.approx({"a": 1.0, "b": 2.0, "c": 0.1 * 4 + 0.9 * 9})


def test_equal_speeds_make_one_group_with_most_steps():
    names = {f"c{at}": 5 for at in range(5)}
    clock, events = driven(compass(q_min=0), info_of(names), Times(dict.fromkeys(names, 0.013)))
    run_until(clock, 1.0)
    assert {steps for (steps,) in of(events, "assign", "steps")} == {10}
    groups = [sorted(clients) for (clients,) in of(events, "aggregate", "clients")]
    assert groups[:5] == [[name] for name in names]  # the first updates
    assert len(groups) > 8
    assert all(group == sorted(names) for group in groups[5:])


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_longer_than_the_latest_time_allows(seed):
    draw = np.random.default_rng(seed)
    step_s = {f"c{at}": float(draw.uniform(0.5, 3)) for at in range(6)}
    latest = 1.2
    clock, events = driven(
        compass(q_max=50, q_min=10, latest=latest), info_of(dict.fromkeys(step_s, 3)), Times(step_s)
    )
    run_until(clock, 3000)
    arrived, waited = {}, []
    for kind, fields in events:
        if kind == "arrive":
            arrived[fields["client"]] = fields["now"]
        elif kind == "assign" and fields["client"] in arrived:
            waited.append(fields["now"] - arrived[fields["client"]])
    tick = max(step_s.values())
    most = max(steps * step_s[name] for name, steps in of(events, "assign", "client", "steps"))
    assert len(waited) > 100
    assert 0 < max(waited) <= (latest - 1) * most + tick
    # With steps of a constant time nobody is late, and clients are in step with each other.
    sizes = [len(clients) for (clients,) in of(events, "aggregate", "clients")]
    assert np.mean(sizes[len(sizes) // 2 :]) > 2


def test_a_client_that_leaves_is_not_waited_for_and_comes_back_as_new():
    clock, events = driven(compass(), info_of(SHARES), Times(STEP_S))
    run_until(clock, 51)
    clock.now = 51.0
    clock.leave("c")  # was expected at 52 with a and b
    while clock.coordinator.version < 8:
        clock.step()
    assert of(events, "aggregate", "now", "clients")[-1] == (52, ["a", "b"])
    clock.join("c")
    assert of(events, "assign", "client", "steps", "now")[-1] == ("c", 10, 52)
    assert "c" not in clock.coordinator._machinery.scheduling.seconds


def test_one_that_leaves_after_it_has_arrived_counts_and_gets_no_work():
    clock, events = driven(compass(), info_of(SHARES), Times(STEP_S, {15: 18.0}))
    run_until(clock, 63)  # a and b have arrived, and wait for c
    clock.now = 63.0
    clock.leave("a")
    clock.step()
    assert of(events, "aggregate", "now", "clients")[-1] == (64, ["a", "b"])
    assert of(events, "assign", "client", "now")[-1] == ("b", 64)


def test_when_only_late_updates_are_there_they_are_used():
    clock, events = driven(compass(), info_of({"a": 1}), Times({"a": 1.0}, {2: 50.0}))
    run_until(clock, 80)
    numbers = list(itertools.chain(*(one for (one,) in of(events, "aggregate", "numbers"))))
    assert 2 in numbers


def test_normalised_weights_count_steps_alike():
    part = compass(normalise=True)
    scheduling = part.start(info_of({"a": 1, "b": 1}))
    for number, (client, steps) in enumerate([("a", 8), ("b", 2)]):
        scheduling._held[number] = LocalJob(
            number=number, client=client, version=0, steps=steps, started=0.0
        )
    weights = scheduling._aggregate([0, 1]).weights
    assert weights == pytest.approx({0: 0.45 * 5 / 8, 1: 0.45 * 5 / 2})


def test_its_state_is_all_of_it():
    whole, events = driven(compass(), info_of(SHARES), Times(STEP_S, {15: 18.0}))
    run_until(whole, 65)
    stopped = json.loads(json.dumps([whole.coordinator.state()[0], whole.state()]))
    again, later = driven(compass(), info_of(SHARES), Times(STEP_S, {15: 18.0}))
    again.coordinator.load(stopped[0], whole.coordinator.state()[1])
    again.load(stopped[1])
    before = len(events)
    for _ in range(40):
        assert whole.step()
        assert again.step()
    assert events[before:] == later
    np.testing.assert_array_equal(whole.coordinator.model, again.coordinator.model)


def test_what_cannot_be():
    with pytest.raises(FederationError, match="q_min = 20 above q_max = 10"):
        FedCompass(q_max=10, q_min=20).start(info_of(SHARES))
    with pytest.raises(ConfigError, match="latest"):
        table("client_scheduler").build({"name": "fedcompass", "latest": 0.9}, where="algorithm")
    with pytest.raises(FederationError, match="'b': 0 examples"):
        info_of({"a": 1, "b": 0})
    clock, _ = driven(compass(), info_of(SHARES), Times(STEP_S))
    with pytest.raises(FederationError, match="'z': not expected"):
        clock.coordinator.join("z", 0.0)
    clock.begin()
    clock.step()
    with pytest.raises(FederationError, match="went backward"):
        clock.coordinator.leave("a", 9.0)
