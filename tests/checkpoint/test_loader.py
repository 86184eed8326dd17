"""Loader state: any number of ranks goes on, no sample lost or repeated."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.loader import EpochSpan, LoaderState, ReaderState, merge, split
from shoal.core.errors import CheckpointError


def fresh(lengths: dict[str, int], ranks: int, each: int) -> list[LoaderState]:
    reader = ReaderState(spans=dict.fromkeys(lengths, ()), epochs=dict.fromkeys(lengths, 0))
    return [
        LoaderState(
            shared={"seed": 3},
            lengths=lengths,
            readers=ranks * each,
            first=rank * each,
            own=(reader,) * each,
        )
        for rank in range(ranks)
    ]


def draw(state: LoaderState, reader: int, source: str) -> tuple[LoaderState, tuple[int, int]]:
    """Take one place from a reader, as a loader does; (epoch, place)."""
    one = state.own[reader]
    spans, epochs = dict(one.spans), dict(one.epochs)
    while not sum(map(len, spans[source])):
        spans[source] = (state.share(source, epochs[source], state.first + reader),)
        epochs[source] += 1
    first, *rest = (span for span in spans[source] if len(span))
    taken, left = first.cut(1)
    spans[source] = (left, *rest)
    own = list(state.own)
    own[reader] = replace(one, spans=spans, epochs=epochs, drawn=one.drawn + 1)
    return replace(state, own=tuple(own)), (taken.epoch, taken.start)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_place_of_every_epoch_is_drawn_once(data: st.DataObject) -> None:
    lengths = {"a": data.draw(st.integers(12, 30)), "b": data.draw(st.integers(12, 14))}
    each = data.draw(st.integers(1, 2))
    states = fresh(lengths, data.draw(st.integers(1, 4)), each)
    seen: Counter[tuple[str, int, int]] = Counter()
    for ranks in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        for _ in range(data.draw(st.integers(0, 60))):
            rank = data.draw(st.integers(0, len(states) - 1))
            reader = data.draw(st.integers(0, len(states[rank].own) - 1))
            source = data.draw(st.sampled_from(["a", "b"]))
            states[rank], place = draw(states[rank], reader, source)
            seen[(source, *place)] += 1
        states = split(merge(data.draw(st.permutations(states))), ranks)
        states = [LoaderState.from_plain(json.loads(json.dumps(s.as_plain()))) for s in states]
    left: Counter[tuple[str, int, int]] = Counter()
    for state in states:
        for reader_state in state.own:
            for source, spans in reader_state.spans.items():
                left.update((source, span.epoch, at) for span in spans for at in span)
    both = seen + left
    begun = states[0].own[0].epochs
    assert both == Counter(
        (source, epoch, at)
        for source, length in lengths.items()
        for epoch in range(begun[source])
        for at in range(length)
    )
    # Shares are even.
    for source in lengths:
        for epoch in range(begun[source]):
            shares = [
                sum(len(s) for s in one.spans[source] if s.epoch == epoch)
                for state in states
                for one in state.own
            ]
            assert max(shares) - min(shares) <= 1


def test_what_was_begun_is_handed_on() -> None:
    states = fresh({"a": 8}, 3, 1)
    states = [
        replace(
            state,
            own=(replace(state.own[0], packing=((rank, rank),), ready=((rank,), (rank + 10,))),),
        )
        for rank, state in enumerate(states)
    ]
    (one,) = split(merge(states), 1, readers=2)
    assert sorted(p for r in one.own for p in r.packing) == [(0, 0), (1, 1), (2, 2)]
    assert sorted(p for r in one.own for p in r.ready) == [(0,), (1,), (2,), (10,), (11,), (12,)]
    assert one.generation == 1 and one.readers == 2
    assert split(merge(split(merge(states), 5)), 2)[0].generation == 2


def test_refusals() -> None:
    states = fresh({"a": 8}, 3, 1)
    with pytest.raises(CheckpointError, match="all 3 readers, each once"):
        merge(states[:2])
    with pytest.raises(CheckpointError, match="all 3 readers, each once"):
        merge([states[0], states[1], states[1]])
    with pytest.raises(CheckpointError, match=r"shared.*as another rank has it"):
        merge([states[0], replace(states[1], shared={"seed": 4}), states[2]])
    with pytest.raises(CheckpointError, match="no state"):
        merge([])
    with pytest.raises(CheckpointError, match="not as it is written"):
        LoaderState.from_plain({"offset": 3})
    with pytest.raises(CheckpointError, match="ranks"):
        split(merge(states), 0)


def test_spans() -> None:
    span = EpochSpan(0, 3, 20, 4)
    assert list(span) == [3, 7, 11, 15, 19] and len(span) == 5
    head, rest = span.cut(2)
    assert list(head) + list(rest) == list(span)
    assert len(span.cut(9)[1]) == 0
