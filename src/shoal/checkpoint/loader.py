"""The state of a data loader that any number of ranks can go on from, no sample lost or repeated.

Every rank has some readers, and every reader its share of each source. What all have in common
(sources, ratios, seed) is kept once; what a reader has to itself is which samples are left to it,
what it has begun to pack, and what it has read and not handed out. To go on with another number of
ranks, the readers' shares are merged and divided again.

Source: Wan et al., ByteCheckpoint, 2024, section 3.3 (dataloader resharding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import CheckpointError, require


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """Places of an epoch that are left to a reader: ``start``, ``start + step``, and so on.

    Args:
        stop: all are below.
        step: from one to the next, at least 1.
    """

    epoch: int
    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return max(0, -(-(self.stop - self.start) // self.step))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop, self.step))

    def cut(self, count: int) -> tuple[EpochSpan, EpochSpan]:
        """The first ``count`` places, and the others."""
        at = self.start + count * self.step
        return replace(self, stop=min(at, self.stop)), replace(self, start=at)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderState:
    """What one reader has to itself.

    Args:
        spans: source -> places that are left to it of the epochs that it has begun.
        epochs: source -> epochs that it has begun.
        drawn: samples that it has drawn; its choice between sources goes on from there.
        packing: tokens of sequences that are not full yet.
        ready: samples that were read and not returned yet.
    """

    spans: Mapping[str, tuple[EpochSpan, ...]]
    epochs: Mapping[str, int]
    drawn: int = 0
    packing: tuple[tuple[int, ...], ...] = ()
    ready: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The state of one rank's loader.

    Args:
        shared: what all ranks have in common: plain data.
        lengths: source -> samples of an epoch.
        readers: readers of all ranks together; reader r of R begins an epoch with every R-th
            place from r on.
        first: number of this rank's first reader.
        generation: how often readers were divided again; random choices depend on it.
    """

    shared: Mapping[str, Any]
    lengths: Mapping[str, int]
    readers: int
    first: int
    generation: int = 0
    own: tuple[ReaderState, ...] = field(default=())

    def share(self, source: str, epoch: int, reader: int) -> EpochSpan:
        """What a reader begins an epoch with."""
        return EpochSpan(epoch, reader, self.lengths[source], self.readers)

    def as_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "shared": dict(self.shared),
            "lengths": dict(self.lengths),
            "readers": self.readers,
            "first": self.first,
            "generation": self.generation,
            "own": [
                {
                    "spans": {
                        source: [[s.epoch, s.start, s.stop, s.step] for s in spans]
                        for source, spans in one.spans.items()
                    },
                    "epochs": dict(one.epochs),
                    "drawn": one.drawn,
                    "packing": [list(tokens) for tokens in one.packing],
                    "ready": [list(tokens) for tokens in one.ready],
                }
                for one in self.own
            ],
        }

    @classmethod
    def from_plain(cls, raw: Mapping[str, Any]) -> LoaderState:
        """What :meth:`as_plain` gave.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            own = tuple(
                ReaderState(
                    spans={
                        source: tuple(EpochSpan(*span) for span in spans)
                        for source, spans in one["spans"].items()
                    },
                    epochs=dict(one["epochs"]),
                    drawn=one["drawn"],
                    packing=tuple(tuple(tokens) for tokens in one["packing"]),
                    ready=tuple(tuple(tokens) for tokens in one["ready"]),
                )
                for one in raw["own"]
            )
            return cls(
                shared=dict(raw["shared"]),
                lengths=dict(raw["lengths"]),
                readers=raw["readers"],
                first=raw["first"],
                generation=raw["generation"],
                own=own,
            )
        except (KeyError, TypeError, AttributeError) as cause:
            raise CheckpointError(
                f"state of a data loader: not as it is written ({cause}); it was saved by "
                "something else"
            ) from cause


def merge(states: Sequence[LoaderState]) -> LoaderState:
    """The state of one loader that has all ranks' readers.

    Raises:
        CheckpointError: the ranks have not the same in common, or a rank's state is missing.
    """
    require(
        bool(states),
        "state of a data loader",
        "no state",
        expected="that of every rank",
        error=CheckpointError,
    )
    ordered = sorted(states, key=lambda state: state.first)
    for state in ordered:
        for name in ("shared", "lengths", "readers", "generation"):
            require(
                getattr(state, name) == getattr(ordered[0], name),
                f"state of a data loader: {name}",
                getattr(state, name),
                expected=f"{getattr(ordered[0], name)}, as another rank has it",
                error=CheckpointError,
            )
    at = 0
    for state in ordered:
        if state.first != at or not state.own:
            break
        at += len(state.own)
    require(
        at == ordered[0].readers and at == sum(len(state.own) for state in ordered),
        "state of a data loader: readers",
        at,
        expected=f"all {ordered[0].readers} readers, each once",
        hint="load what all ranks have saved",
        error=CheckpointError,
    )
    own = tuple(reader for state in ordered for reader in state.own)
    return replace(ordered[0], first=0, own=own)


def split(state: LoaderState, ranks: int, readers: int | None = None) -> list[LoaderState]:
    """Divide what all readers have left among those of another number of ranks.

    What readers had begun is handed on as it is; places of sources are divided evenly. All
    readers have then begun as many epochs as the foremost had, so none begins one twice.

    Args:
        state: of all readers, as :func:`merge` makes it.
        ranks: how many there will be.
        readers: of each; about as many in all as there were, if not given.
    """
    require(ranks >= 1, "ranks", ranks, expected="at least 1", error=CheckpointError)
    each = readers or max(1, round(len(state.own) / ranks))
    total = ranks * each
    spans: list[dict[str, tuple[EpochSpan, ...]]] = [{} for _ in range(total)]
    begun: dict[str, int] = {}
    for source in state.lengths:
        foremost = begun[source] = max(reader.epochs[source] for reader in state.own)
        left = [
            span
            for number, reader in enumerate(state.own)
            for span in (
                *reader.spans[source],
                # What slower readers would have begun yet.
                *(state.share(source, e, number) for e in range(reader.epochs[source], foremost)),
            )
            if len(span)
        ]
        for new, share in zip(spans, _assigned(left, total), strict=True):
            new[source] = share
    packing = [tokens for reader in state.own for tokens in reader.packing if tokens]
    ready = [tokens for reader in state.own for tokens in reader.ready]
    assigned = tuple(
        ReaderState(
            spans=spans[number],
            epochs=dict(begun),
            packing=tuple(packing[number::total]),
            ready=tuple(ready[number::total]),
        )
        for number in range(total)
    )
    return [
        replace(
            state,
            readers=total,
            first=rank * each,
            generation=state.generation + 1,
            own=assigned[rank * each : (rank + 1) * each],
        )
        for rank in range(ranks)
    ]


def _assigned(spans: Sequence[EpochSpan], parts: int) -> list[tuple[EpochSpan, ...]]:
    """The spans in equal parts, epoch by epoch; none is cut more often than it must be."""
    results: list[list[EpochSpan]] = [[] for _ in range(parts)]
    for epoch in sorted({span.epoch for span in spans}):
        waiting = [span for span in spans if span.epoch == epoch]
        total, done, part = sum(map(len, waiting)), 0, 0
        while waiting:
            span = waiting.pop(0)
            room = (part + 1) * total // parts - done
            head, rest = span.cut(min(room, len(span)))
            if len(head):
                results[part].append(head)
                done += len(head)
            if len(rest):
                waiting.insert(0, rest)
                part += 1
    return [tuple(part) for part in results]
