"""Actor graphs: every item once and in order, never more registers than there are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from actor_link import Inlet, Outlet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import PlanError, RankError
from shoal.parallel.pipeline.actor import ActorGraph, prefetch

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("actors ")]
    assert left == []


@st.composite
def dags(draw: st.DrawFn) -> list[tuple[tuple[int, ...], int, int]]:
    """(inputs, registers, queue) of each actor."""
    dags: list[tuple[tuple[int, ...], int, int]] = []
    for i in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        dags.append((tuple(inputs), draw(st.integers(1, 3)), draw(st.integers(0, 2))))
    return dags


@quick
@given(dags(), st.integers(0, 6), st.booleans())
def test_random_graphs_make_every_item_once_and_in_order(
    dag: list[tuple[tuple[int, ...], int, int]], items: int, own_queues: bool
) -> None:
    seen: dict[int, list[Any]] = {i: [] for i in range(len(dag))}

    def act_of(number: int) -> Any:
        def act(*inputs: Any) -> Any:
            made = (number, *inputs)
            seen[number].append(made)
            return made

        return act

    graph = ActorGraph()
    for i, (inputs, regs, queue) in enumerate(dag):
        names = [str(name) for name in inputs]
        graph.actor(str(i), act_of(i), *names, regs=regs, queue=None if own_queues else f"q{queue}")
    counts = graph.run(items)

    def expected(number: int, item: int) -> Any:
        inputs = dag[number][0]
        return (number, *([expected(j, item) for j in inputs] if inputs else [item]))

    for i, (_, regs, _) in enumerate(dag):
        assert seen[i] == [expected(i, item) for item in range(items)]
        assert counts[str(i)].items == items
        assert counts[str(i)].peak <= regs


Edges = list[tuple[int, int, int]]


@st.composite
def cyclic(draw: st.DrawFn) -> tuple[list[int], Edges]:
    """Registers of each actor, and edges (source, target, initial tokens), also backwards."""
    regs = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    ends = st.integers(0, len(regs) - 1)
    return regs, draw(st.lists(st.tuples(ends, ends, st.integers(0, 3)), max_size=6))


def token_game(regs: list[int], edges: Edges, items: int) -> bool:
    """Whether every actor can act ``items`` times, by letting them in any order."""
    done = [0] * len(regs)
    moved = True
    while moved:
        moved = False
        for actor, registers in enumerate(regs):
            filled = all(done[a] + n > done[actor] for a, b, n in edges if b == actor)
            # Item i of an actor is free when each consumer has acted i + tokens + 1 times.
            free = all(
                done[b] - n > done[actor] - registers
                for a, b, n in edges
                if a == actor and done[actor] >= registers
            )
            if filled and free and done[actor] < 2 * items + 20:
                done[actor] += 1
                moved = True
    return all(count >= items for count in done)


@settings(max_examples=200, deadline=None)
@given(cyclic())
def test_a_graph_is_refused_exactly_if_it_would_get_stuck(
    drawn: tuple[list[int], Edges],
) -> None:
    regs, edges = drawn
    graph = ActorGraph()
    for i, registers in enumerate(regs):
        graph.actor(str(i), lambda *inputs: len(inputs), regs=registers)
    for source, target, tokens in edges:
        graph.feed_back(str(source), str(target), [0] * tokens)
    if token_game(regs, edges, 40):
        graph.check()
        assert all(count.items == 3 for count in graph.run(3).values())
    else:
        with pytest.raises(PlanError, match=r"without initial tokens|too few registers"):
            graph.run(3)


def test_feedback_carries_items_to_later_ones() -> None:
    graph = ActorGraph()
    total: list[int] = []
    graph.actor("number", lambda i: i)
    graph.actor("add", lambda x, before: total.append(x + before) or x + before, "number", regs=2)
    graph.feed_back("add", "add", [100])
    graph.run(5)
    assert total == [100, 101, 103, 106, 110]


def test_too_few_registers_are_found_before_anything_runs() -> None:
    graph = ActorGraph()
    graph.actor("number", lambda i: i)
    graph.actor("add", lambda x, before: x + before, "number", regs=1)
    graph.feed_back("add", "add", [0])
    with pytest.raises(PlanError, match="too few registers"):
        graph.run(1)
    late = ActorGraph()
    late.actor("a", lambda i: i, regs=1)
    late.actor("b", lambda x: x, "a", regs=1)
    late.actor("c", lambda x: x, "b", regs=1)
    late.feed_back("a", "c", [0, 0])
    with pytest.raises(PlanError, match="give 'a' more than 1"):
        late.check()


@pytest.mark.parametrize("regs", [1, 2, 3])
def test_a_slow_consumer_holds_its_producer_up(regs: int) -> None:
    gate = threading.Semaphore(0)
    made: list[int] = []
    blocked = threading.Event()

    def produce(i: int) -> int:
        made.append(i)
        return i

    def consume(_: int) -> None:
        blocked.set()
        assert gate.acquire(timeout=20)

    graph = ActorGraph()
    graph.actor("produce", produce, regs=regs)
    graph.actor("consume", consume, "produce")
    runner = threading.Thread(target=graph.run, args=(6,))
    runner.start()
    leads = []
    for done in range(6):
        assert blocked.wait(20)
        blocked.clear()
        leads.append(len(made) - done)
        gate.release()
    runner.join(20)
    assert made == list(range(6))
    assert max(leads) <= regs


class _Item:
    """Something whose life can be watched."""


@pytest.mark.parametrize("regs", [1, 2])
def test_memory_is_never_more_than_the_registers(regs: int) -> None:
    alive = 0
    most = 0
    lock = threading.Lock()

    def gone() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def make(*_: Any) -> _Item:
        nonlocal alive, most
        item = _Item()
        weakref.finalize(item, gone)
        with lock:
            alive += 1
            most = max(most, alive)
        return item

    graph = ActorGraph()
    graph.actor("load", make, regs=regs)
    graph.actor("transform", make, "load", regs=regs)
    graph.actor("compute", lambda _: None, "transform", regs=regs)
    graph.run(50)
    assert most <= 2 * regs
    assert alive == 0


def test_an_error_ends_the_graph_and_names_actor_and_item() -> None:
    def fail(x: int) -> int:
        if x == 3:
            raise PlanError("no such thing")
        return x

    graph = ActorGraph()
    graph.actor("load", lambda i: i)
    graph.actor("check", fail, "load")
    graph.actor("end", lambda x: x, "check")
    with pytest.raises(PlanError, match="actor 'check', item 3: no such thing"):
        graph.run(10)

    broken = ActorGraph()
    broken.actor("divide", lambda i: 1 // (2 - i))
    with pytest.raises(ZeroDivisionError) as caught:
        broken.run(5)
    assert caught.value.__notes__ == ["in actor 'divide', item 2"]


def test_a_stream_delivers_what_came_before_an_error() -> None:
    graph = ActorGraph()
    graph.actor("divide", lambda i: 6 // (3 - i))
    got = []
    with pytest.raises(ZeroDivisionError):
        for value in graph.stream("divide"):
            got.append(value)
    assert got == [2, 3, 6]


def test_bad_graphs_are_refused() -> None:
    graph = ActorGraph()
    with pytest.raises(PlanError, match="regs = 0"):
        graph.actor("a", lambda i: i, regs=0)
    graph.actor("a", lambda i: i)
    with pytest.raises(PlanError, match="a name of its own"):
        graph.actor("a", lambda i: i)
    graph.actor("load", lambda i: i)
    with pytest.raises(PlanError, match="did you mean 'load'"):
        graph.actor("b", lambda x: x, "laod")
    with pytest.raises(PlanError, match="stream = 'nobody'"):
        graph.stream("nobody")
    with pytest.raises(PlanError, match="at least one"):
        ActorGraph().check()


def test_prefetch_is_in_order_one_ahead_and_ends_cleanly() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 6:
            ahead.set()
        return step * 10

    with prefetch(make, 5) as items:
        assert made == []
        assert next(items) == 50
        assert ahead.wait(20)
        assert made == [5, 6]
        assert [next(items) for _ in range(3)] == [60, 70, 80]
        assert items.step == 9
    items.close()


def test_prefetch_starts_again_at_another_step() -> None:
    with prefetch(lambda step: step, 0) as items:
        assert [items.get(step) for step in (0, 1, 7, 8, 2)] == [0, 1, 7, 8, 2]


def test_prefetch_raises_at_the_step_of_the_error() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("step 2 has no data")
        return step

    items = prefetch(make, 0, depth=3)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 has no data"):
        next(items)
    with pytest.raises(ValueError, match="step 2 has no data"):
        items.get(2)
    assert items.get(3) == 3
    items.close()
    with pytest.raises(PlanError, match="depth = 0"):
        prefetch(make, 0, depth=0)


def test_links_carry_items_between_ranks() -> None:
    def rank(comm: ThreadComm) -> list[float]:
        like, got = torch.empty(2, dtype=torch.float64), list[float]()
        graph = ActorGraph()
        if comm.rank == 0:
            with Outlet(comm, 1, like, items=6) as out:
                graph.actor("make", lambda i: torch.full((2,), float(i), dtype=torch.float64))
                graph.actor("send", out, "make")
                graph.run(6)
        else:
            with Inlet(comm, 0, like, items=6) as inlet:
                graph.actor("receive", inlet)
                graph.actor("keep", lambda x: got.append(float(x.sum())), "receive")
                graph.run(6)
        return got

    assert run_ranks(2, rank)[1] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_failure_on_one_rank_ends_the_other(side: str) -> None:
    def stop(x: Any) -> Any:
        if int(x if isinstance(x, int) else x.sum()) == 2:
            raise ValueError("bad item")
        return x if side == "receiver" else torch.full((1,), float(x))

    def rank(comm: ThreadComm) -> str:
        like = torch.empty(1)
        graph = ActorGraph()
        try:
            if comm.rank == 0:
                with Outlet(comm, 1, like, items=6) as out:
                    source = stop if side == "sender" else lambda i: torch.full((1,), float(i))
                    graph.actor("make", source)
                    graph.actor("send", out, "make")
                    graph.run(6)
            else:
                with Inlet(comm, 0, like, items=6) as inlet:
                    graph.actor("receive", inlet)
                    graph.actor("use", stop if side == "receiver" else id, "receive")
                    graph.run(6)
        except (RankError, ValueError) as error:
            return str(error)
        return ""

    failed, result = run_ranks(2, rank)[:: 1 if side == "sender" else -1]
    assert failed == "bad item"
    assert "failed; see its own error" in result
