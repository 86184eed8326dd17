"""Functions that search an index: the tree, the answers, what is kept, what is billed."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from own_home import own_home
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.cost.functions import FunctionPrices
from shoal.fields.retrieve.collections.filters import col
from shoal.fields.retrieve.index.osq.files import save_index
from shoal.fields.retrieve.index.osq.index import OSQIndex
from shoal.fields.retrieve.index.protocols import Hits
from shoal.fields.retrieve.serverless import FunctionGateway, FunctionSearch
from shoal.fields.retrieve.serverless.functions import IndexFunctions
from shoal.fields.retrieve.serverless.http import FunctionServer, post
from shoal.fields.retrieve.serverless.job import SearchFunctionsJob
from shoal.fields.retrieve.serverless.kind import SearchFunctionsKind
from shoal.fields.retrieve.serverless.payloads import compressed, decompressed, packed, unpacked
from shoal.fields.retrieve.serverless.planning import expected_calls
from shoal.fields.retrieve.serverless.protocols import (
    ContainerSetup,
    FunctionCall,
    FunctionError,
    TreeShape,
    parse_tree,
)
from shoal.fields.retrieve.serverless.search import FunctionHits
from shoal.machine import load

DIM, ROWS = 12, 3000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def vectors(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = OSQIndex(4, 4)
    made.build(vectors(ROWS), attributes={"a": np.random.default_rng(1).random(ROWS)})
    return made, save_index(made, tmp_path_factory.mktemp("index") / "osq")


# The tree


@pytest.mark.parametrize(("fanout", "depth"), [(1, 1), (4, 3), (2, 5), (84, 1), (1, 6)])
def test_children_are_numbered_depth_first(fanout, depth):
    tree, numbers = TreeShape(fanout=fanout, depth=depth), []

    def visit(level):
        """As a walk that counts, with no arithmetic."""
        mine = []
        for _ in range(fanout if level < depth else 0):
            mine.append(len(numbers))
            numbers.append(None)
            numbers[mine[-1]] = visit(level + 1)
        return mine

    roots = visit(0)
    assert list(tree.children(-1, 0)) == roots and tree.nodes == len(numbers)

    def check(node, level):
        assert list(tree.children(node, level)) == numbers[node]
        for child in numbers[node]:
            check(child, level + 1)

    for root in roots:
        check(root, 1)
    assert TreeShape(fanout=4, depth=3).nodes == 84


@pytest.mark.parametrize(
    "text", ["", "4", "4x", "x3", "0x3", "4x0", "4x3x2", "-1x2", "32x2", "2x99"]
)
def test_other_trees_are_refused(text):
    with pytest.raises(ConfigError, match="tree = "):
        parse_tree(text)


def test_expected_calls_are_those_of_a_search(saved):
    index, place = saved
    for tree, count in (("2x2", 30), ("3x2", 4), ("1x1", 7), ("4x3", 200)):
        found = []
        queries = vectors(count, 2)
        with FunctionGateway("in_process", place) as runtime:
            found = FunctionSearch(runtime, tree).search(queries, 5).calls
        visited = float(index.search(queries, 5).stats["parts"].mean())
        nodes, calls = expected_calls(parse_tree(tree), count, 4, visited)
        assert sum(one.name == "allocator" for one in found) == nodes
        assert calls == pytest.approx(len(found), rel=0.25)


# Payloads


def test_arrays_and_bitmaps_survive_json():
    for array in (vectors(3), np.zeros((0, 4), np.int64)):
        again = unpacked(json.loads(json.dumps(packed(array))), array.dtype, 2)
        np.testing.assert_array_equal(again, array)
    for count in (1, 63, 64, 65, 1000):
        bits = np.random.default_rng(count).random(count) < 0.1
        words = np.zeros(-(-count // 64) * 8, np.uint8)
        words[: -(-count // 8)] = np.packbits(bits, bitorder="little")
        bitmap = words.view(np.uint64)
        np.testing.assert_array_equal(decompressed(compressed(bitmap), count), bitmap)
    sparse = np.zeros(10_000, np.uint64)
    assert len(compressed(sparse)) < 1000


def test_damaged_payloads_are_refused():
    good = packed(vectors(3))
    for wrong in ({}, None, {**good, "data": "?"}, {**good, "shape": [3]}, {**good, "type": "<f8"},
                  {**good, "shape": [3, DIM + 1]}):  # fmt: skip
        with pytest.raises(FunctionError, match="not an array"):
            unpacked(wrong, np.float32, 2)
    bitmap = compressed(np.full(2, 2**64 - 1, np.uint64))
    for wrong, count in (
        (bitmap, 64),
        (bitmap, 127),
        (bitmap, 300),
        ("?", 128),
        (None, 128),
        ("", 128),
    ):
        with pytest.raises(FunctionError, match="bitmap"):
            decompressed(wrong, count)
    with pytest.raises(FunctionError, match="bitmap"):  # a bomb is not inflated
        decompressed(compressed(np.zeros(1 << 20, np.uint64)), 64)


# Searches


@pytest.mark.parametrize("metric", ["l2", "cosine", "ip"])
def test_a_tree_of_functions_finds_what_the_index_finds(metric, tmp_path):
    index = OSQIndex(3, 5, metric=metric)
    index.build(vectors(ROWS), attributes={"a": np.random.default_rng(1).random(ROWS)})
    place = save_index(index, tmp_path / "osq")
    queries, where = vectors(17, 3), col("a").between(0.2, 0.5)
    with FunctionGateway("in_process", place) as runtime:
        search = FunctionSearch(runtime, "2x2")
        for chosen in (None, where):
            exact = search.search(queries, 10, where=chosen, mode="exact").hits
            wanted = index.search(queries, 10, where=chosen, mode="exact")
            np.testing.assert_array_equal(exact.ids, wanted.ids)
            np.testing.assert_allclose(exact.distances, wanted.distances, rtol=1e-5)
            fast = search.search(queries, 10, where=chosen).hits
            # A part alone knows no bound of others, so it compares at least as many.
            assert (
                fast.distances <= index.search(queries, 10, where=chosen).distances + 1e-5
            ).all()
        assert FunctionSearch(runtime, "4x3").search(queries[:3], 10).hits.ids.shape == (3, 10)
        few = search.search(queries[:2], 50, where=col("a") < 0.005)
        matches = int(index.filter(col("a") < 0.005).sum())
        assert 0 < matches < 50 and ((few.hits.ids >= 0).sum(1) == matches).all()


def test_a_warm_container_reads_nothing(saved):
    with FunctionGateway("in_process", saved[1]) as runtime:
        search = FunctionSearch(runtime, "1x1")
        first, second = (search.search(vectors(1, 4), 5, where=col("a") < 0.9) for _ in range(2))
    assert all(one.cold and one.read_bytes > 0 and not one.retained for one in first.calls)
    assert all(not one.cold and one.read_bytes == 0 and one.retained for one in second.calls)
    assert len(first.calls) == len(second.calls) > 1
    assert {one.container for one in first.calls} == {one.container for one in second.calls}


def test_launch_reaches_every_node_once(saved):
    with FunctionGateway("in_process", saved[1]) as runtime:
        search = FunctionSearch(runtime, "3x3")
        assert 0 < search.launch(0.5) < 0.5
        assert runtime.containers == search.tree.nodes == 39
        assert 0 < search.launch(0.5, flat=True) < 0.5
        assert runtime.containers == 39


def test_dispatches_of_a_caller_follow_each_other(saved):
    with FunctionGateway("in_process", saved[1], latency_s=0.02) as runtime:
        begin = time.perf_counter()
        for node in range(5):
            runtime.start("allocator", allocator(node))
        assert time.perf_counter() - begin >= 0.1


def allocator(node=0, **changes):
    tree = {"fanout": 84, "depth": 1}
    none = packed(np.empty((0, 1), np.float32))
    return {"node": node, "level": 1, "tree": tree, "total": 0, "first": 0, "queries": none, "k": 1,
            **changes}  # fmt: skip


def test_a_container_has_one_call_at_a_time(saved, monkeypatch):
    running, overlaps, honest = {}, [], IndexFunctions.call

    def call(self, name, payload):
        with lock:
            running[id(self)] = running.get(id(self), 0) + 1
            overlaps.append(running[id(self)])
        try:
            return honest(self, name, payload)
        finally:
            with lock:
                running[id(self)] -= 1

    lock = threading.Lock()
    monkeypatch.setattr(IndexFunctions, "call", call)
    with FunctionGateway("in_process", saved[1]) as runtime:
        FunctionSearch(runtime, "4x2").search(vectors(100), 5)
        # 20 allocators, and no more than 4 of each of 4 processors.
        assert runtime.containers <= 20 + 16
    assert max(overlaps) == 1 and len(running) > 20


# Costs


def test_a_bill_is_calls_and_gigabyte_seconds():
    calls = [
        FunctionCall(name="allocator", container=1, cold=True, cold_s=0.5, seconds=0.2501,
                     read_bytes=100, retained=False),
        FunctionCall(name="processor-0", container=2, cold=False, cold_s=0.0, seconds=0.0001,
                     read_bytes=0, retained=True),
    ]  # fmt: skip
    hits = Hits(np.zeros((4, 1), np.int64), np.zeros((4, 1), np.float32), {})
    bill = FunctionHits(hits, calls, 0.3).bill(FunctionPrices(), 2.0)
    gb_s = (0.751 + 0.001) * 2
    assert bill.gb_s == pytest.approx(gb_s) and bill.calls == 2 and bill.cold == 1
    assert bill.usd == pytest.approx(2 * 0.2e-6 + gb_s * 16.6667e-6)
    assert bill.usd_per_1000 == pytest.approx(bill.usd * 250)
    assert bill.read_bytes == 100 and bill.retained == 0.5


# Bad input


def test_what_functions_refuse(saved, tmp_path):
    with FunctionGateway("in_process", saved[1]) as runtime:
        search = FunctionSearch(runtime, "2x1")
        for queries, options, text in (
            (vectors(3)[:, :5], {}, r"allocator: .*expected \[N, 12\]"),
            (vectors(3) * np.nan, {}, "not finite"),
            ([["x"]], {}, "queries: expected numbers"),
            (vectors(3)[:0], {}, "at least one query"),
            (vectors(3), {"where": col("b") > 1}, "no attribute 'b'"),
            (vectors(3), {"where": col("a") == "x"}, "holds numbers"),
            (vectors(3), {"mode": "slow"}, "fast or exact"),
            (vectors(3), {"k": 0}, "k from 1"),
        ):
            with pytest.raises(FunctionError, match=text):
                search.search(queries, **{"k": 3, **options})
        for name, payload, text in (
            ("other", {}, "no function 'other'"),
            ("processor-99", {"queries": packed(vectors(1)), "k": 1}, "not an index"),
            ("processor-0", {"queries": packed(vectors(1)), "k": 1, "bitmap": "x"}, "bitmap"),
            ("processor-0", {"queries": packed(np.ones((1, 3), np.float32)), "k": 1}, "queries"),
            ("allocator", {}, "allocator"),
            ("allocator", allocator(tree={"fanout": 10**6, "depth": 99}), "tree"),
            ("allocator", allocator(node=99), "node"),
            ("allocator", allocator(first=5, total=3), "queries"),
        ):
            with pytest.raises(FunctionError, match=text):
                runtime.invoke(name, payload)
        assert search.search(vectors(3), 3).hits.ids.shape == (3, 3)
    with pytest.raises(FunctionError, match="closed"):
        runtime.invoke("allocator", allocator())
    for place, most, text in (
        (tmp_path / "none", 512, "not an index"),
        (saved[1], 2, "2 containers are running"),
    ):
        with (
            FunctionGateway("in_process", place, most=most) as runtime,
            pytest.raises(FunctionError, match=text),
        ):
            FunctionSearch(runtime, "2x2").search(vectors(50), 3)
    with FunctionGateway("in_process", saved[1], most=7) as runtime:
        runtime.provision("allocator", 6)
        assert runtime.containers == 6
        with pytest.raises(FunctionError, match="7 containers are running"):
            runtime.provision("allocator", 2)
    with pytest.raises(FunctionError, match="latency_s = -1"):
        FunctionGateway("in_process", saved[1], latency_s=-1)
    with pytest.raises(ConfigError, match="backend"):
        FunctionGateway("nowhere", saved[1])


def test_the_server_wants_its_token():
    server = FunctionServer(
        lambda name, payload: json.dumps([name, payload]), "secret", "127.0.0.1"
    )
    try:
        assert json.loads(post(server.address, "secret", "some", "{}")) == ["some", "{}"]
        with pytest.raises(FunctionError, match="no token"):
            post(server.address, "other", "some", "{}")
    finally:
        server.close()
    with pytest.raises(FunctionError, match="does not answer"):
        post(server.address, "secret", "some", "{}")


def test_a_function_that_breaks_does_not_end_its_server():
    setup = ContainerSetup("/none", "127.0.0.1:1", "secret", 0.0)
    server = FunctionServer(IndexFunctions(setup, None).call, "secret", "127.0.0.1")
    try:
        for payload in (
            "{",
            "[]",
            "[" * 100_000,
            "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
        ):
            with pytest.raises(FunctionError):
                post(server.address, "secret", "allocator", payload)
    finally:
        server.close()


# Back-ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [one for one in table("function_backend") if one != "in_process"]
)
def test_other_processes_answer_the_same(backend, saved):
    index, place = saved
    queries, where = vectors(3, 5), col("a") < 0.7
    with FunctionGateway(backend, place) as runtime:
        search = FunctionSearch(runtime, "1x2")
        first = search.search(queries[:1], 5, where=where, mode="exact")
        second = search.search(queries[:1], 5, where=where, mode="exact")
        wanted = index.search(queries[:1], 5, where=where, mode="exact")
        np.testing.assert_array_equal(first.hits.ids, wanted.ids)
        np.testing.assert_array_equal(second.hits.ids, wanted.ids)
        assert all(one.cold_s > 0.01 for one in first.calls if one.cold)
        assert sum(one.read_bytes for one in first.calls) > 0
        assert sum(one.read_bytes for one in second.calls) == 0
        with pytest.raises(FunctionError, match="no attribute 'b'"):
            search.search(queries[:1], 5, where=col("b") > 1)


# The job


def test_plan_then_run(tmp_path):
    np.save(tmp_path / "vectors.npy", vectors(2000))
    job = SearchFunctionsJob(data=str(tmp_path / "vectors.npy"), queries=40, parts=3, batches=2)
    plans = list(SearchFunctionsKind().plan(job, load("laptop")))
    assert {plan.job.backend.name for plan in plans} == set(table("function_backend"))
    seconds = [plan.predicted["batch_s"].value for plan in plans]
    assert seconds == sorted(seconds) and all(plan.n == 1960 for plan in plans)
    chosen = next(plan for plan in plans if plan.job.backend.name == "in_process")
    report = SearchFunctionsKind().run(chosen, tmp_path / "run")
    # The trial was of all vectors.
    assert report.measured["recall"] >= chosen.predicted["recall"].value - 1e-9
    assert report.measured["calls"] == pytest.approx(chosen.predicted["calls"].value, rel=0.3)
    assert report.measured["usd_per_1000"] > 0
    bills = json.loads((tmp_path / "run" / "bills.json").read_text())
    assert bills == report.details["batches"] and len(bills) == 3 and bills[0]["cold"] > 0
    table_, *lines = SearchFunctionsKind().results(report, tmp_path / "run")
    assert len(table_.rows) == 3 and all("run" in line for line in lines)


def test_a_fleet_of_machines_prefers_other_cores(tmp_path):
    np.save(tmp_path / "vectors.npy", vectors(2000))
    job = SearchFunctionsJob(data=str(tmp_path / "vectors.npy"), queries=40, parts=3)
    few, many = load("laptop"), load("laptop")
    device = many.device.model_copy(update={"num_cores": 64})
    many = many.model_copy(update={"device": device})
    device = few.device.model_copy(update={"num_cores": 1})
    few = few.model_copy(update={"device": device})
    first = [SearchFunctionsKind().plan(job, one)[0].job.backend.name for one in (few, many)]
    assert first == ["in_process", "processes"]


def test_a_tree_that_is_too_large_is_refused(tmp_path):
    np.save(tmp_path / "vectors.npy", vectors(500))
    job = SearchFunctionsJob(data=str(tmp_path / "vectors.npy"), queries=40, tree="40x3")
    with pytest.raises(ConfigError, match="more than 1024 nodes"):
        SearchFunctionsKind().plan(job, load("laptop"))
