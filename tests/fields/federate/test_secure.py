"""Secure aggregation: sums that are right, updates that nobody sees, clients that go."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from shoal.core.random import generator
from shoal.fields.federate.aggregate.mean import Mean
from shoal.fields.federate.aggregate.optimizers import ServerSgd
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.exchange import exchange_of
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.protocols import (
    ClientInfo,
    FederationError,
    FederationInfo,
    LocalJob,
    UpdateRefusedError,
)
from shoal.fields.federate.schedule.fedavg import FedAvg
from shoal.fields.federate.secure.masks import (
    LARGEST,
    agree,
    expand,
    from_fixed,
    new_key,
    seal,
    to_fixed,
    unseal,
)
from shoal.fields.federate.secure.party import TRAIN, UNMASK, Party
from shoal.fields.federate.secure.rounds import SecureServer
from shoal.fields.federate.secure.shamir import PRIME, recover, split
from shoal.fields.federate.virtual import ClientTimes, Lazily, VirtualClock
from shoal.machine import load

InvalidTag = pytest.importorskip("cryptography.exceptions").InvalidTag

SIZE = 300
NAMES = tuple(f"c{at}" for at in range(6))


# Parts of it


def test_any_enough_shares_give_a_secret_back() -> None:
    secret = bytes(range(32))
    shares = split(secret, 5, 3)
    for some in itertools.combinations(range(5), 3):
        assert recover({at: shares[at] for at in some}, 32) == secret
    assert recover(dict(enumerate(shares)), 32) == secret


def test_fewer_shares_say_nothing() -> None:
    # Of a polynomial of degree 1, any value at 0 goes through one share.
    (one, *_), other = split(bytes(32), 3, 2), (7).to_bytes(66, "big")
    total = (2 * int.from_bytes(one, "big") - int.from_bytes(other, "big")) % PRIME
    assert recover({0: one, 1: other}, 66) == total.to_bytes(66, "big")
    with pytest.raises(OverflowError):
        recover({0: one}, 32)


def test_two_owners_of_keys_agree_and_others_do_not() -> None:
    (a, A), (b, B), (c, _) = new_key(), new_key(), new_key()
    assert agree(a, B, "mask") == agree(b, A, "mask") != agree(a, B, "box")
    assert agree(c, B, "mask") != agree(a, B, "mask")


def test_the_stream_is_that_of_chacha20() -> None:
    # RFC 7539, appendix A.1, test vector 1: key, counter and nonce of zeros.
    assert expand(bytes(32), 2).tobytes().hex() == "76b8e0ada0f13d90"


def test_what_is_sealed_cannot_be_changed() -> None:
    sealed = seal(bytes(32), b"a share")
    assert unseal(bytes(32), sealed) == b"a share"
    with pytest.raises(InvalidTag):
        unseal(bytes(32), sealed[:-1] + bytes([sealed[-1] ^ 1]))


@pytest.mark.parametrize("clients", [3, 1000])
def test_fixed_point_has_its_precision_and_does_not_overflow(clients: int) -> None:
    x = generator(1).uniform(-LARGEST, LARGEST, 1000)
    unit = LARGEST * clients / 2**31
    assert np.abs(from_fixed(to_fixed(x, clients), clients) - x).max() <= 0.51 * unit * 1.01
    top = np.full(1, LARGEST)
    with np.errstate(over="ignore"):
        total = to_fixed(top, clients) * np.uint32(clients)
    assert from_fixed(total, clients) == pytest.approx(LARGEST * clients)
    assert from_fixed(to_fixed(10 * top, clients), clients) == pytest.approx(LARGEST)


# A federation


class Federation:
    """A coordinator, and clients whose updates are known, on a virtual clock."""

    def __init__(self, *, secure: bool = True, rounds: Any = None, **options: Any) -> None:
        job = FederateJob(clients=str(len(NAMES)), secure=secure)
        self.exchange = exchange_of(job, NAMES)
        clients = tuple(ClientInfo(name=name, samples=10 + at) for at, name in enumerate(NAMES))
        info = FederationInfo(clients=clients, steps=3, seed=0)
        scheduler = FedAvg(**options)
        scheduling = self.exchange.scheduling(scheduler.start(info), scheduler, info)
        machinery = Machinery(
            scheduling=scheduling, rule=self.exchange.rule(Mean()), step=ServerSgd().start(SIZE)
        )
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.coordinator = Coordinator(
            info,
            machinery,
            np.zeros(SIZE, np.float32),
            lambda kind, **f: self.events.append((kind, f)),
        )
        self.masked: list[np.ndarray] = []
        step = {name: 1.0 + 0.01 * at for at, name in enumerate(NAMES)}
        link = dict.fromkeys(NAMES, 0.1)
        self.clock = VirtualClock(
            self.coordinator, ClientTimes(step_s=step, up_s=link, down_s=link), self.fit
        )

    def delta(self, job: LocalJob) -> np.ndarray:
        """What a client learns from a version."""
        draw = generator(5, purpose=job.client, step=job.version)
        return draw.normal(0, 0.1, SIZE).astype(np.float32)

    def fit(self, job: LocalJob, model: np.ndarray) -> Lazily:
        def work() -> tuple[np.ndarray, float]:
            tensors, loss = self.exchange.answer(
                job, model, self.exchange.attach(job), lambda _: (model - self.delta(job), 0.5)
            )
            if "masked" in tensors:
                self.masked.append(tensors["masked"])
            return self.exchange.decode(job, tensors, SIZE), loss

        return Lazily(work)

    def until(self, version: int) -> np.ndarray:
        """The model of a version."""
        self.clock.begin()
        while self.coordinator.version < version:
            assert self.clock.step()
        return self.coordinator.model


@pytest.mark.parametrize("options", [{}, {"fraction": 0.6}])
def test_the_sum_is_the_plain_one(options: dict[str, float]) -> None:
    secure, plain = Federation(**options), Federation(secure=False, **options)
    assert secure.until(3) == pytest.approx(plain.until(3), abs=3 * LARGEST * len(NAMES) / 2**31)
    assert secure.coordinator.steps == plain.coordinator.steps


def test_the_server_sees_no_update() -> None:
    one = Federation()
    one.until(1)
    waiting = [fields for kind, fields in one.events if kind == "arrive" and fields["steps"]]
    assert len(waiting) == len(NAMES)
    # Values below 2^32 in 64 bins, of a stream that is new in every run: a p-value that is this
    # small is met once in a million runs.
    for masked in one.masked:
        assert masked.dtype == np.uint32
        counts = np.bincount(masked >> np.uint32(29), minlength=8)
        assert stats.chisquare(counts).pvalue > 1e-6


def party_round(gone: set[int], late: set[int] = frozenset(), n: int = 5) -> tuple[Any, ...]:  # type: ignore[assignment]
    """A round by hand; ``gone`` leave after their shares, ``late`` before they open."""
    names = [f"p{at}" for at in range(n)]
    server, parties = SecureServer(dict.fromkeys(names, 1)), [Party() for _ in names]
    from shoal.fields.federate.secure.party import KEYS, SHARES
    from shoal.fields.federate.secure.rounds import SecureRound

    x = generator(n).normal(0, 1, (n, SIZE)).astype(np.float32)

    def ask(phase: int, who: set[int], answer: Any) -> None:
        for at in who:
            server.asked[names[at]] = phase, server.round
        for at in who:
            given = server.attach(names[at])
            server.take(names[at], answer(at, given), SIZE)

    everyone = set(range(n))
    ask(KEYS, everyone, lambda at, given: parties[at].keys())
    server.round = SecureRound(names, server.keys)
    ask(SHARES, everyone, lambda at, given: parties[at].shares(given))
    ask(TRAIN, everyone - gone, lambda at, given: parties[at].masked(x[at], given))
    ask(UNMASK, everyone - gone - late, lambda at, given: parties[at].reveal(given))
    return server.round, x, parties, server, names


@pytest.mark.parametrize(
    ("gone", "late"), [(set(), set()), ({1}, set()), ({0, 4}, set()), ({2}, {4}), (set(), {0, 3})]
)
def test_clients_that_go_are_survived(gone: set[int], late: set[int]) -> None:
    at, x, *_ = party_round(gone, late)
    here = [one for one in range(5) if one not in gone]
    assert at.total() == pytest.approx(
        x[here].sum(0, dtype=np.float64), abs=5 * LARGEST * 5 / 2**31
    )


def test_too_few_cannot_open_the_sum() -> None:
    at, *_ = party_round({0}, {1, 2})
    with pytest.raises(FederationError, match="2 clients are left to open the sum; 3 are needed"):
        at.total()


def test_a_client_opens_a_round_once_and_not_for_few() -> None:
    _, _, parties, server, names = party_round(set())
    with pytest.raises(FederationError, match="open a round twice"):
        parties[0].reveal(server.attach(names[0]))
    with pytest.raises(FederationError, match="with 2 of 5 updates"):
        _, _, fresh, *_ = party_round({0, 1, 2}, {3, 4})
        fresh[3].reveal({"arrived": np.array([False, False, False, True, True])})


def test_clients_that_leave_a_federation_are_survived() -> None:
    one, plain = Federation(), Federation(secure=False)
    for each in (one, plain):
        each.clock.begin()
    # Keys and shares take 0.2 s each; then all train.
    while one.clock.now < 2.0 and one.clock.step():
        pass
    one.clock.leave("c2")
    plain.clock.leave("c2")
    for each in (one, plain):
        while each.coordinator.version < 1:
            assert each.clock.step()
    assert one.coordinator.model == pytest.approx(plain.coordinator.model, abs=1e-6)
    clients = next(fields["clients"] for kind, fields in one.events if kind == "aggregate")
    assert "c2" not in clients and len(clients) == 5


def test_a_deadline_is_kept_and_late_updates_are_left_out() -> None:
    # Training takes 3.0 to 3.15 s, every way 0.1 s; keys and shares come before.
    one, plain = Federation(deadline_s=3.73), Federation(secure=False, deadline_s=3.33)
    assert one.until(2) == pytest.approx(plain.until(2), abs=1e-6)
    for each in (one, plain):
        clients = [sorted(fields["clients"]) for kind, fields in each.events if kind == "aggregate"]
        assert clients[0] == sorted(NAMES[:-1])


def test_a_round_of_which_too_few_arrive_is_left_out() -> None:
    one = Federation(deadline_s=3.67)
    one.clock.begin()
    while one.coordinator.next_timer() is not None and one.clock.now < 3.7:
        one.clock.step()
    assert one.coordinator.version == 0
    assert not [kind for kind, _ in one.events if kind == "aggregate"]


def test_a_round_of_two_hides_nothing() -> None:
    one = Federation()
    one.clock.begin()
    with pytest.raises(FederationError, match="2 clients are left in the round"):
        for name in NAMES[:4]:
            one.clock.leave(name)
        while one.clock.step():
            pass


def test_answers_are_checked() -> None:
    server = SecureServer({"a": 1})
    server.asked["a"] = 0, None
    with pytest.raises(UpdateRefusedError, match="secure: tensors"):
        server.take("a", {"box": np.zeros(31, np.uint8), "mask": np.zeros(32, np.uint8)}, SIZE)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"clients": "2"}, "fewer than 3"),
        ({"robust": "median"}, "needs robust = mean"),
        ({"algorithm": "fedasync"}, "rounds have fixed clients"),
        ({"privacy": "dp"}, "let clients do it"),
    ],
)
def test_parts_that_must_see_updates_are_refused(wrong: dict[str, Any], words: str) -> None:
    settings = {
        "data": "wine", "learner": "logistic", "clients": "4", "algorithm": "fedavg",
        "secure": True,
    }  # fmt: skip
    with pytest.raises(FederationError, match=words):
        FederateKind().plan(FederateJob(**{**settings, **wrong}), load("laptop"))
