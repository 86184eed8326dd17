"""The timeline of a run: jobs, who is late, and what a resumed run did twice."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from driven_federations import Times, driven, info_of
from shoal.fields.federate.picture import FederationTimeline, accuracy_chart
from shoal.fields.federate.schedule.fedcompass import FedCompass


def timeline():
    clock, events = driven(
        FedCompass(q_max=10, q_min=2),
        info_of({"a": 2, "b": 1, "c": 1}),
        Times({"a": 1.0, "b": 2.0, "c": 4.0}, {15: 18.0}),
    )
    clock.begin()
    while clock.coordinator.version < 10:
        clock.step()
    return [{"kind": kind, **fields} for kind, fields in events]


def test_the_late_one_is_marked():
    made = FederationTimeline.of(timeline())
    assert [span.number for span in made.spans.values() if span.late] == [15]
    assert made.versions == [10, 20, 20, 30, 32, 40, 42, 52, 64, 74]
    text = made.render(["a", "b", "c"], "a run")
    ElementTree.fromstring(text)
    assert "1 updates came late" in text
    assert text.count("<rect") == len(made.spans)
    assert text.count("<circle") == 1


def test_events_that_were_done_again_count_once():
    events = timeline()
    until = [event for event in events if event["now"] <= 40]
    lost = [event for event in events if 40 < event["now"] <= 52]
    again = FederationTimeline.of(
        [*until, *lost, {"kind": "resume", "now": 40}, *events[len(until) :]]
    )
    assert again == FederationTimeline.of(events)


def test_accuracy_and_target():
    rows = [{"seconds": 0.0, "accuracy": 0.1}, {"seconds": 2.0, "accuracy": 0.8}]
    text = accuracy_chart(rows, 0.7, "a run")
    ElementTree.fromstring(text)
    assert "target" in text
    assert FederationTimeline.of([]).render(["a"], "nothing").startswith("<svg")


@pytest.mark.parametrize("clients", [1, 60])
def test_many_clients_are_cut(clients):
    names = [f"c{at}" for at in range(clients)]
    text = FederationTimeline.of([]).render(names, "cut")
    assert text.count('text-anchor="end"') == min(clients, 40)
