"""Ranking by clicks: counts are those from scratch, order is nothing, wrong clicks are refused."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.core.parts import table
from shoal.fields.retrieve.grank import GRank, Peer
from shoal.fields.retrieve.grank.documents import DocumentSet, read_documents
from shoal.fields.retrieve.grank.entries import (
    ClickEntry,
    EntryRefusedError,
    PeerKey,
    read_entry,
)
from shoal.fields.retrieve.grank.job import RankPeersJob
from shoal.fields.retrieve.grank.kind import RankPeersKind
from shoal.fields.retrieve.grank.log import ClickLog
from shoal.fields.retrieve.grank.metrics import ndcg, reciprocal_rank
from shoal.fields.retrieve.grank.protocols import GossipSettings, RetrieveError
from shoal.fields.retrieve.grank.ranking import agreement
from shoal.fields.retrieve.grank.sybil import sybils_needed
from shoal.fields.retrieve.grank.text import BM25, terms
from shoal.fields.retrieve.grank.workload import Users
from shoal.machine import load

WORDS = ["parse", "dates", "read", "tables", "draw", "plots", "solve", "systems", "send", "mail"]
WORDS += ["train", "models", "test", "code"]


def some_documents(count: int = 40, seed: int = 0) -> dict[str, str]:
    draw = random.Random(seed)
    return {f"d{at:02}": " ".join(draw.choices(WORDS, k=12)) for at in range(count)}


def some_clicks(count: int, peers: int = 5, seed: int = 0) -> list[ClickEntry]:
    """Unsigned, for rankings alone."""
    draw, numbers = random.Random(seed), Counter[str]()
    entries = []
    for at in range(count):
        peer = f"p{draw.randrange(peers)}"
        numbers[peer] += 1
        item = f"d{draw.randrange(40):02}"
        query = " ".join(draw.sample(WORDS, draw.randint(1, 3)))
        entries.append(
            ClickEntry(
                peer=peer,
                number=numbers[peer],
                query=query,
                item=item,
                shown=(item,),
                time=float(at),
            )
        )
    return entries


def by_the_formula(
    documents: dict[str, str], entries: list[ClickEntry], me: str, query: str, item: str
) -> float:
    """The score of a document, from the definitions and nothing that is kept."""
    peers = {entry.peer for entry in entries} | {me}
    items = {p: {e.item for e in entries if e.peer == p} for p in peers}

    def top(peer: str) -> set[str]:
        counts = Counter(word for e in entries if e.peer == peer for word in set(terms(e.query)))
        return set(sorted(counts, key=lambda word: (-counts[word], word))[:5])

    def similarity(v: str) -> float:
        union = items[me] | items[v]
        if not union:
            return 0.0
        return (len(top(me) & top(v)) + len(items[me] & items[v]) ** 2) / len(union)

    def share(v: str, d: str) -> float:
        q = set(terms(query))
        found = [
            len(q & set(terms(e.query))) / len(q | set(terms(e.query)))
            for e in entries
            if e.peer == v and e.item == d
        ]
        return min(1.0, sum(found))

    candidates = list(documents)
    text = BM25(documents).scores(query)
    popular = {d: math.log1p(sum(d in items[p] for p in peers)) for d in candidates}
    prior = text.get(item, 0.0) / max(text.values()) + 0.1 * popular[item] / max(popular.values())
    own = similarity(me)
    return sum((similarity(v) / own + 0.05) * share(v, item) for v in peers) + prior


def test_scores_are_those_of_the_formula() -> None:
    documents, entries = some_documents(), some_clicks(150)
    ranking = GRank(documents, "p1")
    for entry in entries:
        ranking.add(entry)
    found = dict(ranking.rank("read tables", list(documents), limit=100))
    for item in documents:
        expected = by_the_formula(documents, entries, "p1", "read tables", item)
        assert found[item] == pytest.approx(expected, abs=1e-12)


def test_incremental_is_from_scratch_in_any_order() -> None:
    """Clicks come and go; what is left ranks as if nothing else had been."""
    documents, entries = some_documents(), some_clicks(300, seed=1)
    draw = random.Random(2)
    changing = GRank(documents, "p2")
    left: list[ClickEntry] = []
    for entry in entries:
        changing.add(entry)
        left.append(entry)
        if draw.random() < 0.4:
            changing.remove(left.pop(draw.randrange(len(left))))
    for seed in range(3):
        random.Random(seed).shuffle(left)
        fresh = GRank(documents, "p2")
        for entry in left:
            fresh.add(entry)
        for query in ("parse", "draw plots", "solve systems code"):
            assert changing.rank(query, limit=40) == fresh.rank(query, limit=40)  # bit for bit


def test_similarity_does_not_grow_with_disagreement() -> None:
    none: frozenset[str] = frozenset()
    assert agreement(none, none, 0, 0, 0) == 0
    assert agreement(frozenset("ab"), frozenset("cd"), 0, 4, 4) == 0
    close, far = agreement(none, none, 3, 4, 4), agreement(none, none, 3, 4, 40)
    assert close == pytest.approx(9 / 5)
    assert far < close
    assert agreement(frozenset("ab"), frozenset("bc"), 3, 4, 4) == pytest.approx(10 / 5)


def test_similar_people_count_more_and_repetition_does_not() -> None:
    documents = {"x": "read files", "y": "read files", "z": "read files"}

    def click(peer: str, number: int, query: str, item: str) -> ClickEntry:
        return ClickEntry(peer=peer, number=number, query=query, item=item, shown=(item,), time=0.0)

    ranking = GRank(documents, "me")
    ranking.add(click("me", 1, "write code", "z"))
    ranking.add(click("friend", 1, "write code", "z"))
    ranking.add(click("friend", 2, "read files", "y"))
    for number in range(1, 30):
        ranking.add(click("stranger", number, "read files", "x"))
    assert [one.item for one in ranking.rank("read files")] == ["y", "x", "z"]
    assert ranking.rank("read files")[1].score < 0.05 + 1.1 + 1e-9
    nobody = GRank(documents, "me", trust=lambda peer: 0.0)
    for number in range(1, 30):
        nobody.add(click("stranger", number, "read files", "x"))
    assert nobody.rank("read files")[0].score <= 1.1 + 1e-9


def test_without_clicks_the_prior_ranks() -> None:
    documents = some_documents()
    text = BM25(documents).scores("train models")
    expected = sorted(text, key=lambda item: (-text[item], item))[:10]
    assert [one.item for one in GRank(documents).rank("train models")] == expected


def test_bm25_is_that_of_the_package() -> None:
    package = pytest.importorskip("rank_bm25")
    documents = {name: f"{text} rare{name}" for name, text in some_documents().items()}
    peer = package.BM25Okapi([terms(text) for text in documents.values()])
    ours = BM25(documents)
    for query in ("train models", "parse parse dates", "nothing at all", "code"):
        expected = peer.get_scores(terms(query))
        found = ours.scores(query)
        np.testing.assert_allclose([found.get(one, 0.0) for one in documents], expected)


def test_metrics_are_those_of_other_packages() -> None:
    from sklearn.metrics import ndcg_score

    draw = np.random.default_rng(0)
    for _ in range(50):
        gains = draw.integers(0, 4, 20).astype(float)
        scores = draw.permutation(20).astype(float)
        names = [f"d{at}" for at in range(20)]
        ranked = [names[at] for at in np.argsort(-scores)]
        known = {name: gain for name, gain in zip(names, gains, strict=True) if gain}
        assert ndcg(ranked, known) == pytest.approx(ndcg_score([gains], [scores], k=10))
    assert reciprocal_rank(["a", "b", "c"], {"c": 2.0}) == pytest.approx(1 / 3)
    assert reciprocal_rank(["a"], {"c": 2.0}) == ndcg(["a"], {}) == 0


def test_metrics_are_those_of_ranx() -> None:
    ranx = pytest.importorskip("ranx")
    draw = np.random.default_rng(1)
    names = [f"d{at:02}" for at in range(20)]
    for _ in range(5):
        gains = {name: int(gain) for name, gain in zip(names, draw.integers(0, 3, 20), strict=True)}
        known = {name: gain for name, gain in gains.items() if gain}
        scores = {name: float(one) for name, one in zip(names, draw.permutation(20), strict=True)}
        ranked = sorted(names, key=lambda name: -scores[name])
        qrels, run = ranx.Qrels({"q": known}), ranx.Run({"q": scores})
        measured = ranx.evaluate(qrels, run, ["ndcg@10", "mrr@10"])
        plain = {name: float(gain) for name, gain in known.items()}
        assert ndcg(ranked, plain) == pytest.approx(measured["ndcg@10"])
        assert reciprocal_rank(ranked, plain) == pytest.approx(measured["mrr@10"])


# Entries and the log


@pytest.fixture(scope="module")
def keys() -> list[PeerKey]:
    return [PeerKey(bytes([at]) * 32) for at in range(1, 4)]


def signed(key: PeerKey, number: int, at: float, query: str = "read", item: str = "d01") -> Any:
    return key.sign(number=number, query=query, item=item, shown=[item, "d02"], time=at)


def test_an_entry_is_what_was_signed(keys: list[PeerKey]) -> None:
    entry = signed(keys[0], 1, 100.0)
    entry.verify()
    assert read_entry(json.loads(json.dumps(entry.plain()))) == entry
    for name, value in (("query", "write"), ("number", 2), ("time", 99.0), ("peer", keys[1].peer)):
        with pytest.raises(EntryRefusedError, match="the signature is not that of its key"):
            read_entry({**entry.plain(), name: value}).verify()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"query": "  "}, "query: expected text"),
        ({"query": 5}, "query: expected text"),
        ({"number": 0}, "number: expected an integer"),
        ({"number": True}, "number: expected an integer"),
        ({"peer": "ab"}, "peer: expected 64 hex"),
        ({"item": "d77"}, "is not in the list"),
        ({"time": float("nan")}, "time: expected seconds"),
        ({"time": "now"}, "time: expected seconds"),
        ({"shown": ["d01"] * 200}, "shown: expected at most"),
        ({"signature": "00"}, "signature: expected 128"),
        ({"more": 1}, "expected an object with peer"),
    ],
)
def test_malformed_entries(keys: list[PeerKey], changes: dict[str, Any], match: str) -> None:
    with pytest.raises(EntryRefusedError, match=match):
        read_entry({**signed(keys[0], 1, 1.0).plain(), **changes})


def test_the_log_depends_on_the_set_alone(keys: list[PeerKey]) -> None:
    """Duplicates, order, the quota, and a peer that signs one number twice."""
    entries = [signed(key, number, 100.0 + number) for key in keys for number in range(1, 15)]
    entries.append(signed(keys[0], 14, 114.0, query="other"))
    left = set()
    for seed in range(4):
        log = ClickLog(GossipSettings(quota=5))
        order = entries * 2
        random.Random(seed).shuffle(order)
        for entry in order:
            log.add(entry, 200.0)
        assert len(log) == 15
        left.add(frozenset(entry.digest for entry in log))
        assert log.have() == {key.peer: [[1, 14]] for key in keys}
    assert len(left) == 1


def test_the_log_refuses_and_forgets(keys: list[PeerKey]) -> None:
    removed: list[int] = []
    log = ClickLog(
        GossipSettings(max_age_s=100.0, skew_s=10.0),
        removed=lambda entry: removed.append(entry.number),
    )
    assert log.add(signed(keys[0], 1, 205.0), 200.0)
    assert not log.add(signed(keys[0], 1, 205.0), 200.0)
    with pytest.raises(EntryRefusedError, match="made 50 s from now; clocks may be 10 s apart"):
        log.add(signed(keys[0], 2, 250.0), 200.0)
    forged = {**signed(keys[0], 2, 200.0).plain(), "query": "changed"}
    with pytest.raises(EntryRefusedError, match="signature"):
        log.add(read_entry(forged), 200.0)
    assert not log.add(signed(keys[0], 3, 50.0), 200.0)  # too old
    log.expire(306.0)
    assert removed == [1]
    assert len(log) == 0


def test_the_log_is_read_back(keys: list[PeerKey], tmp_path: Path) -> None:
    path = tmp_path / "clicks.jsonl"
    log = ClickLog(GossipSettings(), path)
    for number in range(1, 6):
        log.add(signed(keys[0], number, 100.0), 100.0)
    with path.open("ab") as file:
        file.write(b'{"peer": "cut o')
    again = ClickLog(GossipSettings(), path)
    again.read(50.0)  # the clock was set back
    assert {one.digest for one in again} == {one.digest for one in log}
    again.add(signed(keys[0], 6, 100.0), 100.0)
    third = ClickLog(GossipSettings(), path)
    third.read(100.0)
    assert len(third) == 6
    path.write_bytes(b"no click\n" + path.read_bytes())
    with pytest.raises(RetrieveError, match="line 1: no click"):
        ClickLog(GossipSettings(), path).read(100.0)


def test_what_another_lacks(keys: list[PeerKey]) -> None:
    log = ClickLog(GossipSettings(newest=2, sample=3))
    for key in keys:
        for number in range(1, 8):
            log.add(signed(key, number, 100.0), 100.0)
    have = {keys[0].peer: [[1, 3], [5, 5]], keys[1].peer: [[1, 7]]}
    lacking = [(one.peer, one.number) for one in log.lacking(have)]
    assert {n for p, n in lacking if p == keys[0].peer} == {4, 6, 7}
    assert {n for p, n in lacking if p == keys[2].peer} == set(range(1, 8))
    news = log.news_for(have, keys[0].peer, np.random.default_rng(0))
    assert [one.number for one in news if one.peer == keys[0].peer] == [7, 6]
    assert len(news) == 5


# Peers


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """Peers that exchange only when asked to."""
    settings = GossipSettings(period_s=1000.0)
    documents = some_documents()
    with (
        Peer(documents, tmp_path / "a", settings=settings) as a,
        Peer(documents, tmp_path / "b", settings=settings, join=[a.address]) as b,
    ):
        yield a, b


def test_peers_exchange_clicks_over_http(two: tuple[Peer, Peer]) -> None:
    a, b = two
    for at in range(40):
        a.click("read tables", f"d{at % 7:02}", ["d00", f"d{at % 7:02}"])
        b.click("draw plots", f"d{at % 5:02}", [f"d{at % 5:02}"])
    for _ in range(2):  # at most 32 of one's own at a time
        assert b.exchange(a.address)
    assert a.log.have() == b.log.have()
    assert {one.digest for one in a.log} == {one.digest for one in b.log}
    assert a.neighbours() == [b.address]
    before = b.stats.sent_bytes
    assert b.exchange(a.address)  # nothing is new, so no click travels
    assert b.stats.sent_bytes - before < 1000
    assert a.stats.refused == b.stats.refused == 0
    assert (b.rank("read tables"), a.rank("read tables")) != (None, None)


def test_a_peer_works_offline(two: tuple[Peer, Peer]) -> None:
    a, b = two
    a.click("read tables", "d05", ["d05"])
    assert b.exchange(a.address)
    a.online = False
    assert not b.exchange(a.address)
    b.click("read tables", "d05", ["d05"])
    assert b.rank("read tables")[0].item == "d05"
    assert not b.exchange("127.0.0.1:9")
    a.online = True
    assert b.exchange(a.address)
    assert len(a.log) == 2


def test_a_peer_refuses_by_name(two: tuple[Peer, Peer]) -> None:
    a, _ = two
    key = PeerKey(b"\7" * 32)
    now = time.time()
    good = signed(key, 1, now).plain()
    forged = {**signed(key, 2, now).plain(), "item": "d02"}
    future = signed(key, 3, now + 3600).plain()
    unknown = signed(key, 4, now, item="elsewhere").plain()

    def post(body: object) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(f"http://{a.address}/v1/gossip", content=content, trust_env=False)

    message = {"address": "x", "known": ["not an address", "10.0.0.1:7"], "have": {}}
    answer = post({**message, "entries": [forged, future, "nonsense", good, unknown]})
    assert answer.status_code == 200
    # The good one is there, and so is that of a document that only others have.
    assert {one.number for one in a.log} == {1, 4}
    assert a.stats.refused == 3
    assert a.neighbours()[-1] == "10.0.0.1:7"
    a.rank("read")
    for body, status in (
        (b"\xff", 400),
        ([1], 422),
        ({**message, "entries": [], "have": {"p": [[1]]}}, 422),
        ({**message, "entries": [good] * 501}, 422),
        (b"0" * (4 * 2**20 + 1), 413),
    ):
        assert post(body).status_code == status


def test_wrong_requests_of_a_user(two: tuple[Peer, Peer], tmp_path: Path) -> None:
    a, _ = two
    with pytest.raises(RetrieveError, match="no terms; give at least one word"):
        a.rank(" ?! ")
    with pytest.raises(RetrieveError, match="candidates: 'nowhere' is no document"):
        a.rank("read", ["d01", "nowhere"])
    with pytest.raises(RetrieveError, match="click: 'nowhere' is no document"):
        a.click("read", "nowhere", ["nowhere"])
    with pytest.raises(EntryRefusedError, match="is not in the list"):
        a.click("read", "d01", ["d02"])
    with pytest.raises(EntryRefusedError, match="query: expected text"):
        a.click("", "d01", ["d01"])
    with pytest.raises(RetrieveError, match="no documents"):
        Peer({}, tmp_path / "c")
    with pytest.raises(RetrieveError, match="expected host:port"):
        Peer({"a": "b"}, tmp_path / "c", join=["here"])
    port = int(a.address.partition(":")[2])
    with (
        pytest.raises(RetrieveError, match="cannot listen on"),
        Peer({"a": "b"}, tmp_path / "c", port=port),
    ):
        pass
    (tmp_path / "d").mkdir()
    (tmp_path / "d/key").write_text("no key")
    with pytest.raises(EntryRefusedError, match="no key of 64 hex digits"):
        Peer({"a": "b"}, tmp_path / "d")


def test_a_key_is_kept_for_its_owner(tmp_path: Path) -> None:
    first, second = (PeerKey.kept(tmp_path / "own/key").peer for _ in range(2))
    assert first == second
    assert (tmp_path / "own/key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


# The simulated network


def test_users_want_what_their_group_wants() -> None:
    documents = read_documents("packages")
    users = Users(documents, 8, 4, seed=0)
    wishes = [users.wish(1, at) for at in range(200)]
    at = {name: row for row, name in enumerate(documents.texts)}
    own = [users.group_of[at[one.item]] == 1 for one in wishes]
    assert np.mean(own) > 0.8
    assert wishes == [users.wish(1, at) for at in range(200)]
    assert wishes != [users.wish(1, at, "held out") for at in range(200)]
    for one in wishes[:20]:
        assert set(terms(one.query)) <= set(terms(documents.titles[one.item]))
    wish = wishes[0]
    others = [name for name in documents.texts if name != wish.item][:9]
    first = [users.clicks(1, n, wish, [wish.item, *others]) for n in range(300)]
    last = [users.clicks(1, n, wish, [*others, wish.item]) for n in range(300)]
    assert np.mean([wish.item in one for one in first]) > 0.8
    assert np.mean([wish.item in one for one in last]) < 0.4  # fewer look so far


def test_invented_peers_that_copy_need_to_be_few() -> None:
    documents, entries = some_documents(), some_clicks(200)
    query = "read tables"
    item = GRank(documents, "p1").rank(query, limit=100)[-1].item
    strangers = sybils_needed(documents, entries, "p1", query, item, copying=False)
    copying = sybils_needed(documents, entries, "p1", query, item, copying=True)
    assert 0 < copying < strangers


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": "/nowhere"}, "no file or directory; or take packages"),
        ({"method": "best"}, "'best': expected one of grank"),
        ({"method": {"name": "grank", "floor": -1}}, "floor"),
    ],
)
def test_wrong_jobs(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ShoalError, match=match):
        RankPeersKind().plan(RankPeersJob.model_validate(changes), load("laptop"))


def test_documents_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# First\n\nmore")
    (tmp_path / "b.txt").write_text("Second")
    (tmp_path / "c.bin").write_text("no document")
    found = read_documents(str(tmp_path))
    assert found.titles == {"a.md": "First", "b.txt": "Second"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "x", "text": "some words", "title": "t"}\n')
    assert read_documents(str(rows)) == DocumentSet({"x": "t\nsome words"}, {"x": "t"})
    rows.write_text('{"id": "x", "text": "some"}\n{"id": 3}\n')
    with pytest.raises(ShoalError, match="line 2: expected an object with id and text"):
        read_documents(str(rows))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ShoalError, match="no documents"):
        read_documents(str(empty))


def test_a_plan_grows_with_peers_and_clicks() -> None:
    def sent(**changes: Any) -> float:
        (one,) = RankPeersKind().plan(RankPeersJob.model_validate(changes), load("laptop"))
        return one.predicted["network_bytes"].value

    assert sent(peers=4) < sent(peers=8) < sent(peers=8, clicks=4000)
    assert set(table("ranker")) == {"grank", "bm25", "popularity"}


@pytest.mark.slow
def test_a_run_of_processes(tmp_path: Path) -> None:
    """Peers end with the same log, and rank better than text alone."""
    data = tmp_path / "documents.jsonl"
    rows = [{"id": name, "text": text} for name, text in some_documents(60).items()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = RankPeersJob(
        data=str(data),
        peers=3,
        groups=3,
        clicks=300,
        checkpoints=(0,),
        heldout=20,
        pause_s=0.01,
        period_s=0.2,
    )
    kind = RankPeersKind()
    (plan,) = kind.plan(job, load("laptop"))
    report = kind.run(plan, tmp_path / "run")
    details, measured = report.details, report.measured
    assert details["settled"]
    assert details["refused"] == 0
    assert len(set(details["entries"])) == 1
    assert details["entries"][0] == details["clicks"] >= 300
    assert measured["ndcg"] == pytest.approx(measured["ndcg_pooled"])
    first, last = details["curve"][0], details["curve"][-1]
    assert first["ndcg"] == pytest.approx(measured["ndcg_bm25"], abs=0.02)
    assert last["ndcg"] > first["ndcg"]
    assert last["ndcg"] > measured["ndcg_popularity"]
    assert measured["network_bytes"] > 100 * 300
    assert (tmp_path / "run/curve.svg").exists()
