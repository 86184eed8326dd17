"""The server without sockets: what it takes, what it refuses, and what it remembers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.parts import Choice, table
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.protocols import (
    Arrived,
    ClientInfo,
    FederationError,
    FederationInfo,
    LocalJob,
    Update,
    UpdateRefusedError,
)
from shoal.fields.federate.virtual import ClientTimes, Lazily, VirtualClock

SIZE = 8


def coordinator(
    algorithm: str = "fedavg", clients: int = 3, events: list[Any] | None = None, **options: Any
) -> Coordinator:
    info = FederationInfo(
        clients=tuple(ClientInfo(name=f"c{at}", samples=10 * (at + 1)) for at in range(clients)),
        steps=4,
        seed=0,
    )
    scheduler = table("client_scheduler").build(Choice(name=algorithm, options=options))
    machinery = Machinery(
        scheduling=scheduler.start(info),
        rule=table("robust_rule").build("mean"),
        step=table("server_optimizer").build("sgd").start(SIZE),
    )
    notes = events if events is not None else []
    return Coordinator(
        info,
        machinery,
        np.zeros(SIZE, np.float32),
        lambda kind, **fields: notes.append((kind, fields)),
    )


def update(job: LocalJob, value: float) -> Update:
    return Update(number=job.number, client=job.client, delta=np.full(SIZE, value, np.float32))


def drive(coordinator: Coordinator, durations: list[float], steps: int) -> VirtualClock:
    """So many events, with clients that learn what their job and model say."""
    names = [client.name for client in coordinator.info.clients]
    nothing = dict.fromkeys(names, 0.0)

    def fit(job: LocalJob, base: np.ndarray) -> Any:
        return Lazily(lambda: (np.sin(base + job.number).astype(np.float32), 0.0))

    times = ClientTimes(
        step_s=dict(zip(names, durations, strict=True)), up_s=nothing, down_s=nothing
    )
    clock = VirtualClock(coordinator, times, fit)
    clock.begin()
    for _ in range(steps):
        assert clock.step()
    return clock


def test_a_round_is_the_mean_by_examples() -> None:
    one = coordinator()
    assert one.join("c0", 0.0) == one.join("c1", 0.0) == []
    jobs = one.join("c2", 0.0)
    assert [job.client for job in jobs] == ["c0", "c1", "c2"]
    begun = [
        one.update(update(job, value), 1.0)
        for job, value in zip(jobs, (1.0, 2.0, 3.0), strict=True)
    ]
    assert [len(some) for some in begun] == [0, 0, 3]
    # 10, 20 and 30 examples.
    assert one.model == pytest.approx(np.full(SIZE, -(1 * 10 + 2 * 20 + 3 * 30) / 60))
    assert (one.version, one.steps) == (1, 12)


def test_late_updates_are_dropped_and_their_clients_wait_for_the_next_round() -> None:
    events: list[Any] = []
    one = coordinator(deadline_s=2.0, events=events)
    jobs = [job for name in ("c0", "c1", "c2") for job in one.join(name, 0.0)]
    one.update(update(jobs[0], 1.0), 1.0)
    second = one.due(2.0)
    assert [job.client for job in second] == ["c0"]
    assert one.update(update(jobs[1], 9.0), 2.5) == []
    assert one.model == pytest.approx(np.full(SIZE, -1.0))
    third = one.update(update(second[0], 1.0), 3.0)
    assert [job.client for job in third] == ["c0", "c1"]


def test_a_client_that_leaves_is_not_waited_for() -> None:
    one = coordinator()
    jobs = [job for name in ("c0", "c1", "c2") for job in one.join(name, 0.0)]
    one.update(update(jobs[0], 1.0), 1.0)
    one.update(update(jobs[1], 1.0), 1.0)
    begun = one.leave("c2", 1.5)
    assert one.version == 1
    assert [job.client for job in begun] == ["c0", "c1"]
    with pytest.raises(UpdateRefusedError, match="answers no job"):
        one.update(update(jobs[2], 1.0), 2.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"delta": np.zeros(SIZE + 1, np.float32)}, r"float32 \[9\]"),
        ({"delta": np.zeros(SIZE, np.float64)}, "float64"),
        ({"delta": np.full(SIZE, np.nan, np.float32)}, "not finite"),
        ({"client": "c9"}, "not expected"),
        ({"number": 77}, "answers no job"),
    ],
)
def test_what_is_wrong_is_refused_and_the_round_goes_on(change: dict[str, Any], says: str) -> None:
    one = coordinator()
    jobs = [job for name in ("c0", "c1", "c2") for job in one.join(name, 0.0)]
    wrong = {"number": jobs[0].number, "client": "c0", "delta": np.zeros(SIZE, np.float32)}
    with pytest.raises(UpdateRefusedError, match=says):
        one.update(Update(**{**wrong, **change}), 1.0)
    for job in jobs:
        one.update(update(job, 1.0), 2.0)
    assert one.version == 1


def test_an_update_counts_once() -> None:
    one = coordinator()
    jobs = [job for name in ("c0", "c1", "c2") for job in one.join(name, 0.0)]
    one.update(update(jobs[0], 1.0), 1.0)
    with pytest.raises(UpdateRefusedError, match="sent twice"):
        one.update(update(jobs[0], 1.0), 1.1)


def test_a_stranger_does_not_join() -> None:
    with pytest.raises(FederationError, match=r"c9.*not expected"):
        coordinator().join("c9", 0.0)


def test_mixing_moves_towards_the_clients_model() -> None:
    one = coordinator("fedasync", clients=2, alpha=0.5, staleness={"form": "constant"})
    first, second = one.join("c0", 0.0) + one.join("c1", 0.0)
    one.update(update(first, -1.0), 1.0)  # the client is at 1
    assert one.model == pytest.approx(np.full(SIZE, 0.5))
    one.update(update(second, -1.0), 1.0)  # it started from 0 and is at 1 as well
    assert one.model == pytest.approx(np.full(SIZE, 0.75))
    assert one.staleness == [0, 1]


@given(
    algorithm=st.sampled_from(sorted(table("client_scheduler"))),
    durations=st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4),
    stop=st.integers(0, 40),
)
def test_a_run_that_stops_anywhere_goes_on_to_the_same_model(
    algorithm: str, durations: list[float], stop: int
) -> None:
    whole = coordinator(algorithm, clients=4)
    end = drive(whole, durations, 50)
    broken = coordinator(algorithm, clients=4)
    first = drive(broken, durations, stop)
    facts, arrays = broken.state()
    again = coordinator(algorithm, clients=4)
    again.load(facts, {name: one.copy() for name, one in arrays.items()})
    second = VirtualClock(again, first.times, first.fit)
    second.load(first.state())
    for _ in range(50 - stop):
        assert second.step()
    assert second.now == end.now
    assert again.model.tobytes() == whole.model.tobytes()
    assert again.staleness == whole.staleness


@given(
    algorithm=st.sampled_from(sorted(table("client_scheduler"))),
    durations=st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4),
)
def test_nobody_is_forgotten_and_no_update_counts_twice(
    algorithm: str, durations: list[float]
) -> None:
    events: list[Any] = []
    one = coordinator(algorithm, clients=4, events=events)
    drive(one, durations, 300)
    assigned = [fields["client"] for kind, fields in events if kind == "assign"]
    assert {client: assigned.count(client) > 2 for client in set(assigned)} == dict.fromkeys(
        ("c0", "c1", "c2", "c3"), True
    )
    arrived = [fields["number"] for kind, fields in events if kind == "arrive"]
    assert len(arrived) == len(set(arrived))
    # Old versions are let go.
    assert len(one.state()[1]) < 12


def test_the_mean_is_numpys() -> None:
    draw = np.random.default_rng(0)
    deltas = [draw.normal(size=200_001).astype(np.float32) for _ in range(5)]
    weights = draw.random(5)
    jobs = [LocalJob(number=1, client="c", version=0, steps=1, started=0.0)] * 5
    result = (
        table("robust_rule")
        .build("mean")
        .combine(Arrived(deltas=deltas, weights=weights, jobs=jobs))
    )
    wanted = np.tensordot(weights, np.stack(deltas).astype(np.float64), 1)
    assert result == pytest.approx(wanted, abs=1e-6)
