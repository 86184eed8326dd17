"""Collections beside a dictionary: what is found, who sees it, and what outlives a crash."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from shoal.core.errors import ConfigError, StoreError
from shoal.fields.retrieve.collections import Collection, Point
from shoal.fields.retrieve.collections import collection as module
from shoal.fields.retrieve.index.protocols import VectorIndexError

pytestmark = pytest.mark.filterwarnings("error")
DIM = 8


def vectors(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def nearest(stored, ids, query, k):
    rows = np.array([stored[one] for one in ids])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    scores = rows @ (query / np.linalg.norm(query))
    order = np.argsort(-scores, kind="stable")[:k]
    return [ids[at] for at in order], scores[order]


def same(points, wanted):
    ids, scores = wanted
    assert [one.id for one in points] == list(ids)
    np.testing.assert_allclose([one.score for one in points], scores, rtol=1e-4, atol=1e-6)


def test_random_operations_beside_a_dictionary(tmp_path, monkeypatch):
    """No tenant finds another's point, filters are exact, and reopening loses nothing."""
    monkeypatch.setattr(module, "_TREE", 200)
    monkeypatch.setattr(module, "_LOG_BYTES", 200_000)
    draw, rows = np.random.default_rng(0), vectors(5000, seed=1)
    stored, payloads, owners = {}, {}, {}
    collection = Collection.create(tmp_path / "c", DIM, tenants=6)
    for _ in range(10_000):
        what = draw.random()
        if what < 0.35 or len(stored) < 20:
            some = [int(one) for one in draw.choice(3000, 3, replace=False)]
            points = []
            for one in some:
                payload = {"price": int(draw.integers(100)), "kind": f"k{draw.integers(4)}"}
                names = tuple(
                    f"t{name}" for name in draw.choice(5, draw.integers(1, 4), replace=False)
                )
                stored[one] = draw.standard_normal(DIM).astype(np.float32)
                payloads[one], owners[one] = payload, names
                points.append(Point(one, stored[one], payload, names))
            collection.upsert(points)
        elif what < 0.5:
            some = [int(one) for one in draw.choice(3000, 4, replace=False)]
            assert collection.delete(some) == sum(one in stored for one in some)
            for one in some:
                for table in (stored, payloads, owners):
                    table.pop(one, None)
        elif what < 0.505:
            collection.close()
            collection = Collection(tmp_path / "c")
        else:
            tenant, query = f"t{draw.integers(6)}", rows[draw.integers(5000)]
            mine = sorted(one for one in stored if tenant in owners[one])
            low, kind = int(draw.integers(100)), f"k{draw.integers(4)}"
            if what < 0.75:
                where, fits = None, mine
            else:
                where = {"must": [{"key": "price", "range": {"gte": low}}],
                         "must_not": [{"key": "kind", "match": {"value": kind}}]}  # fmt: skip
                fits = [one for one in mine if payloads[one]["price"] >= low]
                fits = [one for one in fits if payloads[one]["kind"] != kind]
            found = collection.search(query, 5, tenant=tenant, where=where, effort=1e6)
            assert {one.id for one in found} <= set(mine)
            if fits:
                same(found, nearest(stored, fits, query, 5))
            else:
                assert found == []
            assert all(one.payload == payloads[one.id] for one in found)
    assert len(collection) == len(stored) and collection._manifest.generation > 3
    assert collection._index.broken() == 0
    collection.close()


@pytest.fixture
def shop(tmp_path):
    rows = vectors(6)
    payloads = [
        {"city": "Rome", "price": 3, "tags": ["a", "b"]},
        {"city": "Rome", "price": 5.5, "new": True},
        {"city": "Oslo", "price": 7}, {"city": "Oslo", "tags": ["b"]}, {"price": "9"}, {"new": 1},
    ]  # fmt: skip
    with Collection.create(tmp_path / "shop", DIM) as made:
        made.upsert(
            [Point(at, row, one) for at, (row, one) in enumerate(zip(rows, payloads, strict=True))]
        )
        yield made


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"must": [{"key": "city", "match": {"value": "Rome"}}]}, {0, 1}),
        ({"must": [{"key": "city", "match": {"any": ["Rome", "Oslo"]}}]}, {0, 1, 2, 3}),
        ({"must": [{"key": "tags", "match": {"value": "b"}}]}, {0, 3}),
        ({"must": [{"key": "price", "range": {"gt": 3, "lte": 7}}]}, {1, 2}),
        ({"must": [{"key": "price", "range": {"gte": 3, "lt": 7}}]}, {0, 1}),
        ({"must": [{"key": "price", "range": {"gte": 8}}]}, set()),  # "9" is no number
        ({"must": [{"key": "new", "match": {"value": True}}]}, {1}),  # 1 is not true
        ({"must": [{"key": "new", "match": {"value": 1}}]}, {5}),
        ({"must": [{"key": "missing", "match": {"value": 1}}]}, set()),
        ({"must_not": [{"key": "city", "match": {"value": "Rome"}}]}, {2, 3, 4, 5}),
        ({"should": [{"key": "city", "match": {"value": "Rome"}},
                     {"key": "price", "range": {"gte": 7}}]}, {0, 1, 2}),
        ({"must": [{"should": [{"key": "new", "match": {"any": [1, True]}}]}],
          "must_not": [{"must": [{"key": "price", "range": {"lt": 100}}]}]}, {5}),
    ],
)  # fmt: skip
def test_filters(shop, where, ids):
    assert {one.id for one in shop.search(vectors(1)[0], 10, where=where)} == ids


@pytest.mark.parametrize(
    "where",
    [
        {"must": [{"key": "a"}]},
        {"must": [{"key": "a", "match": {}}]},
        {"must": [{"key": "a", "match": {"value": 1}, "range": {"gt": 1}}]},
        {"must": [{"key": "a", "range": {"over": 1}}]},
        {"all": []},
        {"must": {"key": "a"}},
        json.loads('{"must": [' * 12 + '{"key": "a", "match": {"value": 1}}' + "]}" * 12),
    ],
)
def test_filters_that_cannot_be_read(shop, where):
    with pytest.raises(ConfigError, match="filter"):
        shop.search(vectors(1)[0], where=where)


def test_bad_input(shop, tmp_path):
    row = vectors(1)[0]
    for point, text in (
        (Point(1, row[:3]), "expected"),
        (Point(1, row * np.nan), "not finite"),
        (Point(1, row * 0), "is zero"),
        (Point(-1, row), "from 0"),
        (Point(1, row, {"a": float("nan")}), "payload"),
        (Point(1, row, {"a": object()}), "payload"),
        (Point(1, row, {"a": "x" * 70_000}), "at most 65536"),
        (Point(1, row, {}, ()), "at least one"),
        (Point(1, "no"), "vectors"),
    ):
        with pytest.raises(VectorIndexError, match=text):
            shop.upsert([Point(77, row), point])
    with pytest.raises(VectorIndexError, match="comes twice"):
        shop.upsert([Point(77, row), Point(77, row)])
    assert len(shop) == 6 and shop.get([77]) == {}
    for k in (0, 10_001):
        with pytest.raises(VectorIndexError, match="k = "):
            shop.search(row, k)
    with pytest.raises(VectorIndexError, match="expected"):
        shop.search(row[:2])
    assert shop.search(row, tenant="nobody") == [] and shop.get([1], tenant="nobody") == {}
    assert len(shop.search(row, 100)) == 6
    with pytest.raises(StoreError, match="another process has"):
        Collection(shop.directory)
    with pytest.raises(StoreError, match="is not empty"):
        Collection.create(shop.directory, DIM)
    with pytest.raises(StoreError, match="no collection"):
        Collection(tmp_path / "none")
    with pytest.raises(ConfigError, match="dim"):
        Collection.create(tmp_path / "other", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        Collection.create(tmp_path / "file", DIM)


def test_damage_is_an_error_and_a_torn_end_is_none(tmp_path):
    place = tmp_path / "c"
    with Collection.create(place, DIM) as made:
        for at in range(5):
            made.upsert([Point(at, vectors(1, at)[0])])
    log = place / "log-0"
    text = log.read_bytes()
    size = len(text) // 5
    for torn in (text[:-3], text[: -size + 4], text + bytes(100)):
        log.write_bytes(torn)
        with Collection(place) as made:
            assert len(made) == (5 if torn.startswith(text) else 4)
        assert len(log.read_bytes()) % size == 0
    # In a record, and in its length, which would hide all that follow.
    for at in (30, 2):
        log.write_bytes(text[:at] + b"x" + text[at + 1 :])
        with pytest.raises(StoreError, match="byte 0 is damaged"):
            Collection(place)
    log.write_bytes(text)
    with Collection(place) as made:
        made.snapshot()
    assert sorted(one.name for one in place.iterdir()) == [
        "collection.json", "index-1.safetensors", "lock", "log-1", "points-1.json",
    ]  # fmt: skip
    with Collection(place) as made:
        assert len(made) == 5
    (place / "points-1.json").write_text("{}")
    with pytest.raises(StoreError, match="snapshot is damaged"):
        Collection(place)


def test_a_full_disk_takes_nothing(shop, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(StoreError, match="No space left"):
        shop.upsert([Point(50, vectors(1)[0])])
    with pytest.raises(StoreError, match="No space left"):
        shop.delete([1])
    monkeypatch.undo()
    shop.upsert([Point(51, vectors(1)[0])])
    place = shop.directory
    shop.close()
    with Collection(place) as again:
        assert len(again) == 7 and set(again.get(range(60))) == {0, 1, 2, 3, 4, 5, 51}
    shop._log = module.WriteAheadLog(place / "log-0", (place / "log-0").stat().st_size)
    shop._held = os.open(place / "lock", os.O_RDONLY)


_WRITER = """
import sys
import numpy as np
from shoal.fields.retrieve.collections import Collection, Point
from shoal.fields.retrieve.collections import collection as module
module._TREE, module._LOG_BYTES = 64, 20_000
made, draw, number = Collection(sys.argv[1]), np.random.default_rng(0), int(sys.argv[2])
while True:
    print("+", number, flush=True)
    made.upsert([Point(number, draw.standard_normal(8), {"n": number})])
    print("done", number, flush=True)
    if number % 5 == 4:
        print("-", number - 3, flush=True)
        made.delete([number - 3])
        print("done", number - 3, flush=True)
    number += 1
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_lose_nothing_that_was_acknowledged(tmp_path):
    """``kill -9`` at any time, also within snapshots: every acknowledged change is there."""
    place, draw = tmp_path / "c", np.random.default_rng(0)
    Collection.create(place, DIM).close()
    there: set[int] = set()
    for _ in range(50):
        begun = None  # a change that may have come, or not
        lines = []
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(place), str(max(there, default=-1) + 1)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:  # fmt: skip
            lines += [process.stdout.readline() for _ in range(int(draw.integers(5, 200)))]
            process.kill()
            lines += process.stdout.read().splitlines(keepends=True)
        for line in lines:
            assert line.endswith("\n") or line is lines[-1]
            sign, _, number = line.partition(" ")
            if not line.endswith("\n"):
                continue
            if sign == "done":
                change, one = begun
                there = there | {one} if change == "+" else there - {one}
                begun = None
            else:
                begun = sign, int(number)
        with Collection(place) as made:
            ids = set(made._payloads)
            assert ids ^ there <= ({begun[1]} if begun else set())
            assert all(made.get([one])[one] == {"n": one} for one in ids)
            assert made._index.broken() == 0 and len(made._index) == len(ids)
            there = ids
    assert made._manifest.generation > 1 and len(there) > 500
