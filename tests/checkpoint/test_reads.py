"""Plans of reads: against plans that know all ranks' boxes, and what they cost with many ranks."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from old_format import planned_with_all

from shoal.checkpoint.index import CheckpointIndex
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.plan import PROPOSAL, assign, proposal
from shoal.checkpoint.reads import BoxRequest, ReadPlan, plan_reads
from shoal.checkpoint.runs import BoxRuns, OwnedBox
from shoal.core.boxes import Box, flat_boxes, uncovered

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import simulated_ranks as simulated

SMALL = {
    "model.w": (64, 6),
    "model.v": (64, 4, 2),
    "model.b": (64,),
    "optimizer.w.exp_avg": (64, 6),
    "optimizer.w.step": (),
}


def boxes_of(data: st.DataObject, shape: tuple[int, ...], world: int, *, copies: bool) -> Any:
    """A tensor as some ranks hold it: rows, columns, parts of a flat buffer, a grid, or copies."""
    ways = ["flat", "uneven", *(["copies"] if copies else []), *range(len(shape))]
    how = data.draw(st.sampled_from(ways)) if shape else "copies" if copies else "first"
    whole = Box.whole(shape)
    if how == "copies":
        return [[whole] for _ in range(world)]
    if how == "first":
        return [[whole] if rank == 0 else [] for rank in range(world)]
    if how == "flat":
        cuts = sorted(data.draw(st.integers(0, whole.volume)) for _ in range(world - 1))
        return [flat_boxes(shape, a, b) for a, b in itertools.pairwise([0, *cuts, whole.volume])]
    dim = 0 if how == "uneven" else how
    extent = shape[dim]
    if how == "uneven":
        cuts = sorted(data.draw(st.integers(0, extent)) for _ in range(world - 1))
        edges = [0, *cuts, extent]
    else:
        each = -(-extent // world)
        edges = [min(extent, rank * each) for rank in range(world + 1)]
    boxes = []
    for low, high in itertools.pairwise(edges):
        offset, size = [0] * len(shape), list(shape)
        offset[dim], size[dim] = low, high - low
        boxes.append([Box(tuple(offset), tuple(size))] if high > low else [])
    return boxes


def saved_as(
    boxes: dict[str, Any], shapes: dict[str, tuple[int, ...]], world: int
) -> CheckpointIndex:
    import torch

    one = torch.zeros(())
    return simulated.SimulatedFolder(
        [
            {
                name: [Piece(one.expand(b.shape), shapes[name], b.offset) for b in held[rank]]
                for name, held in boxes.items()
                if held[rank]
            }
            for rank in range(world)
        ]
    ).index()


def shapes_of(data: st.DataObject) -> dict[str, tuple[int, ...]]:
    shape = st.lists(st.integers(1, 7), max_size=3).map(tuple)
    return {name: data.draw(shape) for name in "abc"[: data.draw(st.integers(1, 3))]}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_local_plans_read_what_plans_for_all_did(data: st.DataObject) -> None:
    shapes = shapes_of(data)
    saving, loading = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    twice = data.draw(st.booleans())
    index = saved_as(
        {n: boxes_of(data, s, saving, copies=twice) for n, s in shapes.items()}, shapes, saving
    )
    requests: list[list[BoxRequest]] = [[] for _ in range(loading)]
    for name, shape in shapes.items():
        for rank, boxes in enumerate(boxes_of(data, shape, loading, copies=True)):
            requests[rank] += [BoxRequest(name, box.offset, box.shape) for box in boxes]
    options: dict[str, Any] = {
        "whole": data.draw(st.booleans()),
        "read_bytes": data.draw(st.sampled_from([4, 40, 10**6])),
        "gap_bytes": data.draw(st.sampled_from([0, 16, 10**6])),
    }
    expected = planned_with_all(index, requests, **options)
    wants = simulated.wants_of_all(requests)
    plans = [plan_reads(index, wants, own, rank, **options) for rank, own in enumerate(requests)]

    def spans(several: Any) -> list[tuple[str, int, int]]:
        return sorted((read.file, read.start, read.stop) for own in several for read in own)

    assert spans(plan.reads for plan in plans) == spans(expected)
    takers = {(r.file, r.start): r.ranks for own in expected for r in own}
    assert all(takers[r.file, r.start] == r.ranks for plan in plans for r in plan.reads)
    check_agreement(plans)
    for plan, own in zip(plans, requests, strict=True):
        reads = [*plan.reads, *(read for _, read in plan.takes)]
        cuts = [cut for read in reads for cut in plan.cuts(read)]
        for number, wish in enumerate(own):
            mine = [cut.common for cut in cuts if cut.wish == number]
            assert not uncovered(wish.box, mine)
            if not twice:
                assert sum(box.volume for box in mine) == wish.box.volume


def check_agreement(plans: list[ReadPlan]) -> None:
    """Whoever takes some of a read expects it of the rank that does it, in the same order."""
    done = {(read.file, read.start): plan for plan in plans for read in plan.reads}
    assert len(done) == sum(len(plan.reads) for plan in plans)  # none twice
    for plan in plans:
        for reader, read in plan.takes:
            other = done[read.file, read.start]
            assert other.rank == reader != plan.rank
            sent = [(c.at, c.common) for c in other.cuts_of_others(read)[plan.rank]]
            assert sent == [(c.at, c.common) for c in plan.cuts(read)]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_runs_hold_what_they_were_made_of(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    world = data.draw(st.integers(1, 40))
    owned = [
        OwnedBox(rank, box)
        for rank, boxes in enumerate(boxes_of(data, shape, world, copies=True))
        for box in boxes
    ]
    runs = BoxRuns.of_boxes(owned, len(shape))
    again = BoxRuns.from_plain(runs.plain(), len(shape))
    assert sorted(map(repr, again.owned())) == sorted(map(repr, owned))
    assert again.flaw(shape, world) == "" and again.missing(shape) is None
    low = [data.draw(st.integers(0, n)) for n in shape]
    high = [data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
    box = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    common = [one for one in owned if one.box.intersect(box)] if box.volume else []
    assert sorted(map(repr, again.overlapping(box))) == sorted(map(repr, common))
    assert again._spans_of_many(box) == again.spans(box) if box.volume else True
    lost = data.draw(st.integers(0, len(owned) - 1))
    rest = [one for at, one in enumerate(owned) if at != lost]
    left = BoxRuns.of_boxes(rest, len(shape))
    assert (left.missing(shape) is None) == (
        not uncovered(Box.whole(shape), (one.box for one in rest))
    )


def test_regular_boxes_are_one_run_whatever_the_number_of_ranks() -> None:
    for world in (8, 4096):
        rows = [OwnedBox(rank, Box((2 * rank, 0), (2, 5))) for rank in range(world)]
        assert len(BoxRuns.of_boxes(rows, 2).table) == 1
    grid = [
        OwnedBox(8 * row + column, Box((row, 3 * column), (1, 3)))
        for row, column in itertools.product(range(64), range(8))
    ]
    assert len(BoxRuns.of_boxes(grid, 2).table) == 8


def held(sizes: dict[str, int]) -> np.ndarray:
    return np.frombuffer(
        b"".join(proposal(name, (0,), (size,), size) for name, size in sizes.items()), PROPOSAL
    )


def test_every_box_is_written_once_by_a_holder_and_shares_are_equal() -> None:
    generator = np.random.default_rng(0)
    sizes = {f"t{n}": int(generator.integers(1000, 2000)) for n in range(60)}
    scalars = {f"s{n}": 4 for n in range(50)}
    every = held(sizes | scalars | {"t0": sizes["t0"]})
    ranks = [held({f"own{rank}": 9000 * (rank == 1), **sizes, **scalars}) for rank in range(5)]
    taken = assign(ranks)
    written = [bytes(ranks[rank][number]) for rank, own in enumerate(taken) for number in own]
    assert len(written) == len(set(written)) == 60 + 50 + 5
    loads = [int(ranks[rank]["bytes"][own].sum()) for rank, own in enumerate(taken)]
    assert max(loads) - min(loads) <= 2000 and sum(loads) == sum(sizes.values()) + 9200
    # Scalars lie in one file, so that who loads them opens one.
    assert sum(any(ranks[r]["bytes"][n] == 4 for n in own) for r, own in enumerate(taken)) == 1
    assert [len(own) for own in assign([every, every[:0]])] == [110, 0]
    assert [len(own) for own in assign([every[:0]])] == [0]


def counted(world: int, loading: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Files that one rank opens for a plan, boxes that it looks at, and what it reads."""
    folder = simulated.saved_by(world, SMALL)
    index = folder.index()
    requests = [simulated.wishes(rank, loading, SMALL) for rank in range(loading)]
    wants = simulated.wants_of_all(requests)
    folder.reads.clear()
    looked = [0]
    spans = BoxRuns.spans

    def counting(self: BoxRuns, box: Box) -> Any:
        looked[0] += 1
        return spans(self, box)

    with monkeypatch.context() as patch:
        patch.setattr(BoxRuns, "spans", counting)
        plan = plan_reads(index, wants, requests[loading - 1], loading - 1)
    total = sum(map(len, (one.plain() for one in wants.values())))
    return {
        "shards": sum(name.endswith(".json") for name in folder.reads),
        "headers": sum(name.endswith(".safetensors") for name in folder.reads),
        "looked": looked[0],
        "runs": total,
        "index": sum(len(one.runs.table) for one in index.tensors.values()),
        "reads": len(plan.reads) + len(plan.takes),
    }


@pytest.mark.parametrize(("more", "fewer"), [(1, 1), (1, 2), (2, 1)])
def test_what_a_rank_does_for_a_plan_does_not_grow_with_the_world(
    more: int, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = counted(4 * more, 4 * fewer, monkeypatch)
    many = counted(16 * more, 16 * fewer, monkeypatch)
    assert all(many[key] <= few[key] for key in few), (few, many)


def test_a_layout_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.checkpoint import index
    from shoal.checkpoint.index import Merger

    folder, merger = simulated.saved_by(8, SMALL), Merger()
    decoded = [0]
    together = index._together

    def counting(votes: Any) -> Any:
        decoded[0] += len(votes)
        return together(votes)

    monkeypatch.setattr(index, "_together", counting)
    first, _ = merger.merge(1, {"a": 1}, folder.votes)
    again, heads = merger.merge(2, {"a": 2}, folder.votes)
    assert (decoded[0], merger.fresh, len(heads)) == (8, 1, 8)
    assert (first.layout, again.step, again.meta) == (again.layout, 2, {"a": 2})
    other = simulated.saved_by(4, SMALL)
    assert merger.merge(3, {}, other.votes)[0].layout != first.layout and merger.fresh == 2


@pytest.mark.slow
def test_a_thousand_ranks_plan_in_seconds() -> None:
    import time

    from shoal.checkpoint.index import Merger

    # Each fifth tensor of a model of 8B; benchmarks/scale.py has all of them, and 8,192 ranks.
    tensors = dict(list(simulated.llama().items())[::5])
    folder = simulated.saved_by(1024, tensors)
    begin = time.process_time()
    Merger().merge(1, {}, folder.votes)
    # Processor seconds with room for a slow machine: the old plan took a thousand of them.
    assert time.process_time() - begin < 4
    assert len(folder.index().encode()) < 4e5
    for loading in (512, 1024):
        requests = [simulated.wishes(rank, loading, tensors) for rank in range(loading)]
        wants = simulated.wants_of_all(requests)
        index = folder.index()
        begin = time.process_time()
        plan = plan_reads(index, wants, requests[300], 300)
        assert time.process_time() - begin < 4
        assert plan.reads and len(index.shards) <= 8
