"""The server over real sockets: its order of events, what it refuses, and who comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import httpx2
import numpy as np
import pytest

from driven_federations import Times, driven, info_of
from shoal.core.parts import table
from shoal.fields.federate.aggregate.mean import Mean
from shoal.fields.federate.aggregate.optimizers import ServerSgd
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.wire.client import ClientSetting, RemoteClient
from shoal.fields.federate.wire.messages import SESSION, pack, unpack
from shoal.fields.federate.wire.server import FederationServer, listening

SIZE = 7
OPEN = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while OPEN:
        OPEN.pop().close()


class Raw:
    """A client that sends what it likes."""

    def __init__(self, url, name, key):
        self.http = httpx2.Client(
            base_url=f"{url}/v1/clients/{name}",
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
        )
        OPEN.append(self.http)

    def join(self):
        answer = self.http.post("/join")
        assert answer.status_code == 200
        self.http.headers[SESSION] = answer.json()["session"]

    def job(self):
        answer = self.http.get("/job")
        assert answer.status_code == 200
        return unpack(answer.content)[1]

    def send(self, number, body):
        answer = self.http.post(f"/updates/{number}", content=body)
        return answer.status_code, answer.json().get("error", "")


def update(value=1.0, size=SIZE, loss=0.5):
    job = FederateJob(clients="2")
    exchange = Exchange(job, ("a", "b"))
    tensors = exchange.compressor.encode(np.full(size, value, np.float32), 0)
    return pack(tensors, {"loss": loss})


def coordinator_of(scheduler, info, events, size=SIZE):
    def note(kind, **fields):
        events.append((kind, fields))

    machinery = Machinery(
        scheduling=scheduler.start(info), rule=Mean(), step=ServerSgd().start(size)
    )
    return Coordinator(info, machinery, np.zeros(size, np.float32), note)


@contextlib.contextmanager
def serving(coordinator, keys, port=0, **options):
    exchange = Exchange(FederateJob(clients=str(len(keys))), tuple(keys))

    def make():
        return FederationServer(coordinator, exchange, keys, lambda: False, **options)

    with listening(make, port=port) as (server, url):
        yield server, url


@pytest.mark.parametrize("name", ["fedavg", "fedasync", "fedbuff", "fedcompass"])
def test_the_order_of_events_is_that_of_the_virtual_clock(name):
    """Same durations, same events, over HTTP; the hands of the wall clock are moved by the test."""
    info = info_of({"a": 2, "b": 1, "c": 1})
    times = Times({"a": 1.0, "b": 2.0, "c": 4.0}, {15: 18.0})
    scheduler = table("client_scheduler").build(name)
    clock, wanted = driven(scheduler, info, times, SIZE)
    clock.begin()
    for _ in range(40):
        clock.step()

    events, hands = [], [100.0]
    coordinator = coordinator_of(scheduler, info, events)
    keys = dict.fromkeys(("a", "b", "c"), "k")
    with serving(coordinator, keys, clock=lambda: hands[0]) as (server, url):
        clients = {one: Raw(url, one, "k") for one in keys}
        for one in clients.values():
            one.join()
        while len(events) < len(wanted):
            number = min(
                coordinator.jobs,
                key=lambda at: (
                    coordinator.jobs[at].started + times.seconds(coordinator.jobs[at]),
                    at,
                ),
            )
            job = coordinator.jobs[number]
            arrival = job.started + times.seconds(job)
            timer = coordinator.next_timer()
            if timer is not None and timer < arrival:
                hands[0] = 100.0 + timer
                tick = server._begin(coordinator.due(server.now))
                asyncio.run_coroutine_threadsafe(tick, server._loop).result()
                continue
            hands[0] = 100.0 + arrival
            assert clients[job.client].job()["number"] == number
            assert clients[job.client].send(number, update()) == (200, "")

    def plain(seen):
        keep = ("client", "number", "steps", "version", "clients", "numbers", "stale", "weights")
        return [(kind, {key: one[key] for key in keep if key in one}) for kind, one in seen]

    assert plain(events)[: len(wanted)] == plain(wanted)
    np.testing.assert_allclose(coordinator.model[:1], clock.coordinator.model[:1], rtol=1e-6)


def test_what_is_no_update_is_refused_by_name_and_the_round_goes_on():
    events = []
    coordinator = coordinator_of(
        table("client_scheduler").build("fedavg"), info_of({"good": 3, "bad": 1}), events
    )
    with serving(coordinator, {"good": "g", "bad": "b"}) as (server, url):
        good, bad = Raw(url, "good", "g"), Raw(url, "bad", "b")
        good.join()
        bad.join()
        wrong = {
            "malformed": b"not a tensor",
            "not finite": update(np.nan),
            "oversized": b"0" * (4 * SIZE + (1 << 16) + 1),
        }
        for reason, body in wrong.items():
            version, number = coordinator.version, good.job()["number"]
            assert bad.send(bad.job()["number"], body)[0] == 422
            assert server.refused[reason] == 1
            assert bad.http.get("/job").status_code == 412
            # The one that was refused is out of the round, which ends without it; when it has
            # joined again it is in the next one but one.
            assert good.send(number, update()) == (200, "")
            assert coordinator.version == version + 1
            bad.join()
            assert good.send(good.job()["number"], update()) == (200, "")
            assert coordinator.version == version + 2
        number = bad.job()["number"]
        before = coordinator.version
        assert bad.send(number, update(size=SIZE + 1))[0] == 422
        bad.join()
        taken = good.job()["number"]
        assert good.send(taken, update()) == (200, "")
        assert good.send(taken, update())[0] == 422  # again
        assert bad.send(taken, update())[0] == 422  # another's
        assert server.refused["replayed"] == 2
        assert coordinator.version == before + 1
        assert Raw(url, "bad", "g").http.post("/join").status_code == 401
        assert Raw(url, "nobody", "g").http.post("/join").status_code == 401
        assert server.refused["key"] == 2
    used = [number for kind, one in events if kind == "aggregate" for number in one["numbers"]]
    assert len(used) == len(set(used))
    assert np.all(np.isfinite(coordinator.model))


def test_clients_outlive_their_server_and_join_again():
    """The second server goes on from the state of the first, at the same address."""
    info, events = info_of({"a": 1, "b": 1}), []
    scheduler = table("client_scheduler").build("fedcompass")
    keys = {"a": "k", "b": "k"}
    coordinator = coordinator_of(scheduler, info, events)
    halt, sent = threading.Event(), []

    def work(url, name):
        setting = ClientSetting(name=name, key="k", rows=[], slow=1.0, bytes_per_s=0.0)
        client = RemoteClient(url, setting)
        OPEN.append(client)
        client.join()
        exchange = Exchange(FederateJob(clients="2"), ("a", "b"))
        while not halt.is_set() and (given := client.next_job()) is not None:
            job, model = given
            client.send(job, exchange.encode(job, np.ones_like(model)), 0.5)
            sent.append(job.number)
            halt.wait(0.002)

    def wait_for(one, version):
        deadline = threading.Event()
        for _ in range(3000):
            if one.version >= version:
                return
            deadline.wait(0.01)
        raise AssertionError(f"version {one.version} of {version}")

    with serving(coordinator, keys) as (server, url):
        threads = [threading.Thread(target=work, args=(url, name), daemon=True) for name in keys]
        for thread in threads:
            thread.start()
        wait_for(coordinator, 4)
        # As a crash would find it: in the server's thread, between two events.
        facts, arrays = asyncio.run_coroutine_threadsafe(_state(coordinator), server._loop).result()
        now = server.now
    later = []
    second = coordinator_of(scheduler, info, later)
    second.load(facts, arrays)
    version = second.version
    port = int(url.rsplit(":", 1)[1])
    with serving(second, keys, port=port, before_s=now):
        wait_for(second, version + 4)
        halt.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert {one["client"] for kind, one in later if kind == "leave"} == set(keys)
    numbers = [one["numbers"] for kind, one in later if kind == "aggregate"]
    flat = [number for some in numbers for number in some]
    assert len(flat) == len(set(flat))


async def _state(coordinator):
    return coordinator.state()


def test_one_that_fails_all_the_time_ends_the_run():
    events = []
    coordinator = coordinator_of(
        table("client_scheduler").build("fedasync"), info_of({"a": 1}), events
    )
    with serving(coordinator, {"a": "k"}) as (_, url):
        client = Raw(url, "a", "k")
        for _ in range(10):
            assert not coordinator.failed
            client.join()
            client.send(client.job()["number"], update(np.inf))
    assert "not finite" in coordinator.failed


def test_more_clients_than_a_few_are_served_at_once():
    """Each holds a request for work open until all have joined."""
    names = {f"c{at:02d}": 1 for at in range(12)}
    coordinator = coordinator_of(table("client_scheduler").build("fedavg"), info_of(names), [])
    done = []

    def work(url, name):
        client = Raw(url, name, "k")
        client.join()
        done.append(client.send(client.job()["number"], update()))

    with serving(coordinator, dict.fromkeys(names, "k")) as (_, url):
        threads = [threading.Thread(target=work, args=(url, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert done == [(200, "")] * len(names)
    assert coordinator.version == 1
