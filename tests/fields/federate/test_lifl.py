"""LIFL: store, tree and placement without processes, then the planes with all of theirs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.lifl.placement import BestFitPlacement, pack
from shoal.fields.federate.lifl.plane import Lifl
from shoal.fields.federate.lifl.store import NUDGE, ObjectStore, ObjectStoreError
from shoal.fields.federate.lifl.tree import Tree, TreeOptions
from shoal.fields.federate.planes.broker import Broker
from shoal.fields.federate.planes.direct import LocalSum
from shoal.fields.federate.planes.protocols import PlaneWork
from shoal.fields.federate.protocols import FederationError, LocalJob, Update
from shoal.fields.federate.wire.messages import pack as pack_message
from shoal.fields.federate.wire.receive import RequestRefusedError, parse_head

SIZE = 1000


# The store


def test_an_object_is_found_by_its_key_until_it_is_released():
    store = ObjectStore.create(2, 4 * SIZE)
    slot = store.reserve()
    store.numbers(slot, SIZE)[:] = 2.0
    key = store.publish(slot, offset=0, count=SIZE, coefficient=0.5, weight=0.5, updates=1)
    assert len(key) == 16
    other = ObjectStore(os.dup(store.file), store.slots, store.slot_bytes)
    numbers, coefficient = other.get(key)
    assert (float(numbers.sum()), coefficient) == (2.0 * SIZE, 0.5)
    store.release(key)
    with pytest.raises(ObjectStoreError, match="no object has the key"):
        other.get(key)
    again = store.reserve()
    assert again == slot
    store.publish(again, offset=0, count=SIZE, coefficient=1.0, weight=1.0, updates=1)
    with pytest.raises(ObjectStoreError):  # the same slot, another object
        other.get(key)
    for wrong in (NUDGE, b"", b"x" * 16, key[:8] + bytes(8)):
        with pytest.raises(ObjectStoreError):
            store.get(wrong)


def test_a_full_store_gives_no_slot():
    store = ObjectStore.create(1, 100)
    slot = store.reserve()
    assert store.reserve() is None
    store.give_back(slot)
    assert store.reserve() == slot


# The tree, with workers that are called


class Hands:
    """Workers that add at once or on demand, and die on demand."""

    def __init__(self, store):
        self.store, self.tree = store, None
        self.inbox, self.stopped, self.given_up = {}, [], False
        self.roles = set()

    def start(self, row):
        self.inbox[row] = []

    def send(self, row, key):
        if key != NUDGE:
            self.inbox[row].append(key)

    def stop(self, row):
        self.stopped.append(row)
        del self.inbox[row]

    def give_up(self):
        self.given_up = True

    def work(self, row):
        record = self.store.workers[row]
        keys = self.inbox[row]
        if not keys or len(keys) < record["lazy"]:
            return False
        self.roles.add(int(record["role"]))
        self.inbox[row] = []
        for key in keys:
            numbers, coefficient = self.store.get(key)
            out = self.store.numbers(int(record["out"]), SIZE)
            out[:] = (out if record["folded"] else 0) + np.float32(coefficient) * numbers
            record["folded"] += 1
        for key in keys:
            self.tree.done(row, key)
        return True


def summed(updates, options, draw, deaths=0):
    """What a tree makes of updates that workers add in any order; workers die now and then."""
    store = ObjectStore.create(len(updates) + options.most + 4, 4 * SIZE)
    hands = Hands(store)
    tree = hands.tree = Tree(store, SIZE, options, hands)
    result = []
    waiting = list(enumerate(updates))
    draw.shuffle(waiting)
    while not result:
        busy = [row for row, keys in hands.inbox.items() if keys]
        if waiting and (not busy or draw.random() < 0.5):
            at, update = waiting.pop()
            slot = store.reserve()
            store.numbers(slot, SIZE)[:] = update
            key = store.publish(slot, offset=0, count=SIZE, coefficient=0, weight=0, updates=1)
            store.weigh(key, at + 1.0)
            tree.add(key)
        elif not waiting and tree._flush is None:
            tree.flush(0, True, result.append)
        elif deaths and busy and draw.random() < 0.3:
            deaths -= 1
            row = draw.choice(busy)
            del hands.inbox[row]
            tree.died(row)
        else:
            moved = sum(hands.work(row) for row in busy)
            assert moved or waiting, "nothing goes on"
    (key,) = result
    numbers = store.get(key)[0].copy()
    facts = store.facts(key)
    store.release(key)
    return numbers, facts, store, hands, tree


@pytest.mark.parametrize("fan_in", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_the_sum_is_that_of_one_process_in_any_order(fan_in, most, eager, reuse):
    draw = random.Random(fan_in * 10 + most)
    options = TreeOptions(fan_in=fan_in, most=most, eager=eager, reuse=reuse, keep_s=1.0)
    for count, deaths in ((1, 0), (2, 0), (7, 0), (12, 3)):
        updates = np.random.default_rng(count).standard_normal((count, SIZE)).astype(np.float32)
        numbers, facts, store, hands, tree = summed(updates, options, draw, deaths)
        wanted = (np.arange(1.0, count + 1) @ updates.astype(np.float64)).astype(np.float32)
        assert np.abs(numbers - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert (facts.updates, facts.weight) == (count, sum(range(1, count + 1)))
        assert store.free == store.slots, "a slot was lost"
        assert tree.workers <= most + 1
        assert not hands.given_up
        if count > 2 * fan_in:
            assert hands.roles >= {0, 2}


def test_scaling_follows_the_estimate_of_the_queue():
    """Leaves are the queue over the updates of a leaf; the estimate forgets 0.3 of a round."""
    store = ObjectStore.create(40, 4 * SIZE)
    hands = Hands(store)
    options = TreeOptions(fan_in=2, most=16, eager=True, reuse=True, keep_s=5.0)
    tree = hands.tree = Tree(store, SIZE, options, hands)

    def turn(count):
        done = []
        for _ in range(count):
            slot = store.reserve()
            store.numbers(slot, SIZE)[:] = 1
            tree.add(store.publish(slot, offset=0, count=SIZE, coefficient=1, weight=1, updates=1))
        tree.flush(0, True, done.append)
        while not done:
            assert sum(hands.work(row) for row in list(hands.inbox))
        store.release(done[0])

    turn(10)
    assert tree.starts == 5
    assert tree.queue == pytest.approx(0.7 * 10)
    turn(2)
    assert tree.starts == 5
    assert tree.queue == pytest.approx(0.7 * 2 + 0.3 * 7)
    tree.stop_idle(time.monotonic() + 6)
    assert tree.workers == 0
    assert len(hands.stopped) == 5


def test_workers_that_die_of_every_object_end_the_tree():
    store = ObjectStore.create(8, 4 * SIZE)
    hands = Hands(store)
    options = TreeOptions(fan_in=2, most=1, eager=True, reuse=True, keep_s=5.0)
    tree = hands.tree = Tree(store, SIZE, options, hands)
    tree.add(
        store.publish(store.reserve(), offset=0, count=SIZE, coefficient=1, weight=1, updates=1)
    )
    for _ in range(20):
        if hands.given_up:
            break
        row = next(iter(hands.inbox))
        del hands.inbox[row]
        tree.died(row)
    assert hands.given_up


# Placement


def _fewest(demands, capacity):
    """Fewest hosts of a capacity that hold all demands, by trying everything."""
    for hosts in range(1, len(demands) + 1):
        for places in itertools.product(range(hosts), repeat=len(demands)):
            loads = [0.0] * hosts
            for place, demand in zip(places, demands, strict=True):
                loads[place] += demand
            if max(loads) <= capacity + 1e-9:
                return hosts
    raise AssertionError


def test_best_fit_uses_as_few_hosts_as_can_be():
    draw, more = np.random.default_rng(0), 0
    for _ in range(60):
        demands = draw.integers(1, 6, draw.integers(2, 7)).astype(float)
        places = pack(demands, [6.0] * len(demands))
        loads = np.bincount(places, weights=demands, minlength=len(demands))
        assert loads.max() <= 6
        more += len(set(places)) - _fewest(demands, 6.0)
    assert more == 0


def test_equal_updates_fill_one_host_after_the_other():
    hosts = BestFitPlacement([3, 2, 4])
    places = [hosts.place() for _ in range(10)]
    assert places[:9] == [1, 1, 0, 0, 0, 2, 2, 2, 2]
    assert sorted(hosts.loads) in ([2, 3, 5], [2, 4, 4], [3, 3, 4])  # one has more than it can


@pytest.mark.parametrize("capacities", [[], [0.0], [3, -1], [float("nan")]])
def test_hosts_without_capacity_are_an_error(capacities):
    with pytest.raises(FederationError, match=r"capacity|hosts"):
        BestFitPlacement(capacities)


def test_capacity_0_is_an_error_of_the_option():
    with pytest.raises(ConfigError, match="capacity"):
        Lifl(capacity=0)


# Heads of requests


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\nhost: a\ncontent-length: 1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    ],
)
def test_heads_that_are_refused(text, status):
    with pytest.raises(RequestRefusedError) as caught:
        parse_head(text)
    assert caught.value.status == status


# Planes with their processes


class Driver:
    """A plane with clients, and a server that takes every update and weighs it."""

    def __init__(self, plane, clients=6, size=SIZE, accept=lambda update: None, **job):
        self.names = tuple(f"c{at}" for at in range(clients))
        self.keys = {name: f"key of {name}" for name in self.names}
        self.size, self.accept, self.number = size, accept, 0
        self.lock = threading.Lock()
        self.seen = []
        self.weight = {name: at + 1.0 for at, name in enumerate(self.names)}
        described = FederateJob(clients=str(clients), **job).model_dump(mode="json")
        self.plane = plane.start(
            PlaneWork(
                size=size, keys=self.keys, job=described, names=self.names, folds=True,
                arrived=self.arrived,
            )
        )  # fmt: skip

    def arrived(self, update):
        said: Future = Future()
        try:
            self.plane.check(update, self.size)
            refused = self.accept(update)
        except FederationError as cause:
            refused = str(cause)
        if refused is None:
            with self.lock:
                self.seen.append(update)
                self.plane.fold(update, self.weight[update.client])
        said.set_result(refused)
        return said

    def post(self, name, body, key=None, number=None):
        with self.lock:
            self.number += 1
            number = number or self.number
            job = LocalJob(number=number, client=name, version=0, steps=1, started=0.0)
            address = self.plane.address(job)
        return httpx2.post(
            f"http://127.0.0.1{address}/v1/clients/{name}/updates/{number}",
            content=body,
            headers={"Authorization": f"Bearer {key or self.keys[name]}".encode("latin-1")},
            trust_env=False,
            timeout=60,
        )

    def send(self, name, delta):
        return self.post(name, pack_message({"delta": delta}, {"loss": 0.5}))


@contextlib.contextmanager
def driven(plane, **options):
    driver = Driver(plane, **options)
    try:
        yield driver
    finally:
        driver.plane.close()


def round_of(driver, seed, order=None):
    draw = np.random.default_rng(seed)
    deltas = {name: draw.standard_normal(driver.size, dtype=np.float32) for name in driver.names}
    with ThreadPoolExecutor(3) as senders:
        for answer in senders.map(
            lambda name: driver.send(name, deltas[name]), order or driver.names
        ):
            assert answer.status_code == 200, answer.text
    total = driver.plane.total()
    wanted = sum(driver.weight[name] * deltas[name].astype(np.float64) for name in driver.names)
    assert np.abs(total - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plane",
    [
        Lifl(),
        Lifl(hosts=2, capacity=3, workers=2),
        Lifl(hosts=2, capacity=2, eager=False, reuse=False, fan_in=3),
        Broker(relays=False),
        Broker(hosts=2, workers=2),
        Broker(tree=False),
    ],
    ids=str,
)
def test_every_plane_makes_the_sum_of_one_process(plane):
    with driven(plane) as driver:
        for turn in range(3):
            round_of(driver, turn, random.Random(turn).sample(driver.names, len(driver.names)))
        assert driver.plane.facts()["up_bytes"] > 3 * 6 * 4 * SIZE


@pytest.mark.slow
def test_what_is_wrong_is_refused_and_the_round_goes_on():
    with driven(Lifl(store_bytes=1e6)) as driver:
        good = np.ones(SIZE, np.float32)
        assert driver.send("c0", good).status_code == 200
        for wrong in (
            np.ones(SIZE + 1, np.float32),
            np.ones(SIZE),
            np.full(SIZE, np.nan, np.float32),
        ):
            answer = driver.send("c1", wrong)
            assert answer.status_code == 422, answer.text
        assert driver.post("c1", b"rubbish").status_code == 422
        assert driver.post("c1", bytes(4 * SIZE + (1 << 17))).status_code == 422
        assert driver.post("c1", b"", key="another").status_code == 401
        assert driver.post("c1", b"", key="\u00e9").status_code == 401
        assert driver.send("c1", good).status_code == 200
        assert driver.plane.total().tolist() == (3 * good).tolist()
        job = LocalJob(number=99, client="c0", version=0, steps=1, started=0.0)
        url = f"http://127.0.0.1{driver.plane.address(job)}"
        assert httpx2.get(url, trust_env=False).status_code == 404
        refused = httpx2.post(f"{url}/v1/sums/1.0/1", content=bytes(4 * SIZE), trust_env=False)
        assert refused.status_code == 401


@pytest.mark.slow
def test_a_full_store_answers_503_and_takes_updates_again():
    """Nothing is summed while the server says nothing: its verdicts come later."""
    hold = threading.Event()
    room = 4 * SIZE + (1 << 16)
    with driven(Lifl(store_bytes=5.5 * room, workers=1), accept=lambda update: None) as driver:
        weigh, held = driver.plane.fold, []
        driver.plane.fold = lambda update, weight: held.append((update, weight))
        one = np.ones(SIZE, np.float32)
        said = [driver.send(name, one).status_code for name in driver.names[:4]]
        assert said == [200, 200, 503, 503]
        assert driver.plane.facts()["full"] == 2
        driver.plane.fold = weigh
        for update, weight in held:
            weigh(update, weight)
        deadline = time.monotonic() + 30
        while (answer := driver.send("c2", one)).status_code == 503:
            assert time.monotonic() < deadline
            hold.wait(0.05)
        assert answer.status_code == 200
        assert driver.plane.total()[0] == 1 + 2 + 3


@pytest.mark.slow
def test_the_keys_of_an_aggregator_that_is_killed_go_to_another():
    with driven(Lifl(workers=1, fan_in=8), clients=4) as driver:
        one = np.ones(SIZE, np.float32)
        for name in driver.names[:3]:
            assert driver.send(name, one).status_code == 200
        while driver.plane.facts()["objects"] < 3:
            time.sleep(0.01)
        (pid,) = [int(pid) for pid in driver.plane._stores[0].workers["pid"] if pid]
        os.kill(pid, signal.SIGKILL)
        assert driver.send("c3", one).status_code == 200
        assert driver.plane.total().tolist() == [10.0] * SIZE
        assert driver.plane.facts()["starts"] == 2


@pytest.mark.slow
def test_a_gateway_that_is_killed_is_one_clear_error():
    with driven(Lifl(), clients=2) as driver:
        assert driver.send("c0", np.ones(SIZE, np.float32)).status_code == 200
        driver.plane._processes.members[0].process.kill()
        with pytest.raises(FederationError, match="has ended, and the updates"):
            driver.plane.total()


_KILLED = """
import json, os, sys, time
import numpy as np
from tests.fields.federate.test_lifl import Driver, Lifl
if __name__ == "__main__":
    driver = Driver(Lifl(hosts=2, capacity=3))
    for name in driver.names:
        assert driver.send(name, np.ones(1000, np.float32)).status_code == 200
    while driver.plane.facts()["objects"] < 6:
        time.sleep(0.02)
    pids = [one.process.pid for one in driver.plane._processes.members]
    pids += [int(pid) for store in driver.plane._stores for pid in store.workers["pid"] if pid]
    print(json.dumps(pids), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_nothing_is_left_after_kill_9(tmp_path):
    """No name in shared memory, and no process: nameless memory goes with the last of them."""
    before = set(Path("/dev/shm").iterdir())
    file = tmp_path / "killed.py"
    file.write_text(_KILLED)
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    child = subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        pids = json.loads(child.stdout.readline())
        assert len(pids) >= 4
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not [one for one in set(Path("/dev/shm").iterdir()) - before if "lifl" in one.name]


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_rules_that_need_each_update_and_stores_too_small_are_errors():
    job = FederateJob().model_dump(mode="json")
    work = PlaneWork(
        size=SIZE, keys={}, job=job, names=(), folds=False, arrived=lambda update: Future()
    )
    for plane in (Lifl(), Broker()):
        with pytest.raises(FederationError, match="choose robust: mean, or plane: direct"):
            plane.start(work)
    with pytest.raises(FederationError, match="store_bytes"):
        Lifl(store_bytes=1000.0).start(
            PlaneWork(size=SIZE, keys={}, job=job, names=(), folds=True, arrived=work.arrived)
        )


def test_a_sum_in_this_process_goes_on_from_a_part():
    one, two, rest = LocalSum(), LocalSum(), np.arange(3, dtype=np.float32)
    for plane in (one,):
        plane.fold(Update(number=1, client="a", delta=rest), 2.0)
    two.resume(one.partial())
    for plane in (one, two):
        plane.fold(Update(number=2, client="b", delta=rest), 3.0)
    assert np.array_equal(one.total(), two.total())
    assert one.partial() is None
