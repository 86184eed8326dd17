"""The saves of a run from its events: what they held up, and what each rank did when.

Source: Wan et al., ByteCheckpoint, 2024, section 5.3 (phases of every rank, the slowest flagged).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import CheckpointError
from shoal.core.svg_rows import Bar, BarChart, HeatMap

# What is kept of a save: ranks, phases, letters of a name, letters of a message.
_MOST_RANKS, _MOST_PHASES, _NAME, _MESSAGE = 1024, 16, 20, 500


@dataclass(frozen=True)
class Share:
    """What a rank did of a save.

    Args:
        phases_s: phase -> seconds.
        spans_s: phase -> when it began and ended, s after the save began.
        nbytes: of its file; None if no event states it.
    """

    phases_s: Mapping[str, float]
    spans_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    nbytes: int | None = None


@dataclass(frozen=True)
class LevelOutcome:
    """What became of a save at a farther level; see the event ``checkpoint_level``."""

    place: str
    state: str
    tries: int
    message: str


@dataclass(frozen=True)
class SaveRecord:
    """One save.

    Args:
        step: after which it was made.
        time: when it was reported, s since 1970.
        failed: it became no checkpoint.
        message: why.
        mode: how it was saved; empty if no event states it.
        seconds: until it was durable.
        blocked_s: cause -> seconds for which training stood still.
        ranks: every rank's share.
        levels: what became of it elsewhere, by place.
    """

    step: int
    time: float = math.nan
    failed: bool = False
    message: str = ""
    mode: str = ""
    seconds: float = math.nan
    blocked_s: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[Share, ...] = ()
    levels: tuple[LevelOutcome, ...] = ()

    @property
    def stall_s(self) -> float | None:
        """Seconds for which training stood still; None if the event does not state it."""
        # Events of old runs know no causes: there training waited for all of it.
        total = math.fsum(self.blocked_s.values()) if self.blocked_s else self.seconds
        return total if math.isfinite(total) else None

    @classmethod
    def of(cls, event: Mapping[str, Any], levels: Iterable[Mapping[str, Any]] = ()) -> SaveRecord:
        """What an event contains; what it has not, or has in another form, is left out."""
        shares = zip(
            _dicts(event.get("ranks_s")),
            itertools.chain(_dicts(event.get("ranks_spans_s")), itertools.repeat({})),
            itertools.chain(_list(event.get("ranks_bytes")), itertools.repeat(None)),
            strict=False,
        )
        stays = {
            str(one.get("place"))[:_MESSAGE]: LevelOutcome(
                str(one.get("place"))[:_MESSAGE],
                str(one.get("state"))[:_NAME],
                int(_number(one.get("tries"), 0.0)),
                str(one.get("message", ""))[:_MESSAGE],
            )
            for one in levels
        }
        return cls(
            step=int(event["step"]),
            time=_number(event.get("time")),
            failed=event.get("kind") == "checkpoint_failed",
            message=str(event.get("message", ""))[:_MESSAGE],
            mode=str(event.get("mode", ""))[: 2 * _NAME],
            seconds=_number(event.get("seconds")),
            blocked_s=_numbers(event.get("blocked_s")),
            ranks=tuple(
                Share(
                    _numbers(phases),
                    {name[:_NAME]: span for name, span in _spans(spans)},
                    None if nbytes is None else int(_number(nbytes, 0.0)),
                )
                for phases, spans, nbytes in itertools.islice(shares, _MOST_RANKS)
            ),
            levels=tuple(stays.values()),
        )


def history(events: Iterable[Mapping[str, Any]]) -> list[SaveRecord]:
    """All saves of a run, oldest first; of a step that was saved again the newest."""
    saves: dict[int, Mapping[str, Any]] = {}
    levels: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("kind") in ("checkpoint", "checkpoint_failed"):
            saves[int(event["step"])] = event
        elif event.get("kind") == "checkpoint_level" and event.get("step") is not None:
            levels.setdefault(int(event["step"]), []).append(event)
    return [SaveRecord.of(event, levels.get(step, ())) for step, event in sorted(saves.items())]


def pick(saves: Sequence[SaveRecord], step: int | None) -> SaveRecord:
    """The newest save of which every rank has reported what it did, or that of a step.

    Raises:
        CheckpointError: there is none.
    """
    known = [one for one in saves if one.ranks and step in (None, one.step)]
    if not known:
        there = ", ".join(str(one.step) for one in saves if one.ranks) or "none"
        what = "no save" if step is None else f"no save of step {step}"
        raise CheckpointError(
            f"{what} in the events has phases of its ranks; those that have: {there}"
        )
    return known[-1]


def slowest(save: SaveRecord) -> dict[str, int]:
    """Phase -> the rank that it took longest; nothing for a rank alone."""
    if len(save.ranks) < 2:
        return {}
    return {
        name: max(range(len(save.ranks)), key=lambda rank: save.ranks[rank].phases_s.get(name, 0.0))
        for name in save.ranks[0].phases_s
    }


def stalls(saves: Sequence[SaveRecord], last: int = 40) -> BarChart:
    """For how long each save held training up, by cause."""
    rows = []
    for save in saves[-last:]:
        at, bars = 0.0, []
        for cause, seconds in save.blocked_s.items():
            bars.append(Bar(cause, at, at + seconds))
            at += seconds
        rows.append((f"step {save.step}", bars))
    longest = max((save.stall_s or 0.0 for save in saves), default=0.0)
    return BarChart(
        title="Training blocked by saves",
        description=f"{len(saves)} saves; the longest stall is {longest:.4g} s.",
        rows=rows,
    )


def timeline(save: SaveRecord) -> BarChart:
    """What each rank did when."""
    rows = [
        (f"rank {rank}", [Bar(name, *span) for name, span in share.spans_s.items()])
        for rank, share in enumerate(save.ranks)
    ]
    return BarChart(
        title=f"Save of step {save.step}",
        description=f"Phases of {len(rows)} ranks over {save.seconds:.4g} s.",
        rows=rows,
    )


def heat_map(save: SaveRecord) -> HeatMap:
    """Ranks down, phases across, seconds."""
    names = list(dict.fromkeys(name for share in save.ranks for name in share.phases_s))
    text = ", ".join(f"rank {rank} in {name}" for name, rank in slowest(save).items())
    return HeatMap(
        title=f"Save of step {save.step}, by rank and phase",
        description=f"Seconds of {len(save.ranks)} ranks. Slowest: {text or 'one rank alone'}.",
        rows=[f"rank {rank}" for rank in range(len(save.ranks))],
        columns=names,
        values=[[share.phases_s.get(name, math.nan) for name in names] for share in save.ranks],
    )


def _number(value: Any, otherwise: float = math.nan) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        return otherwise
    return result if math.isfinite(result) else otherwise


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    few = itertools.islice(value.items(), _MOST_PHASES)
    result = {str(name)[:_NAME]: _number(one) for name, one in few}
    return {name: one for name, one in result.items() if math.isfinite(one)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    result = _list(value)
    return result if all(isinstance(one, Mapping) for one in result) else []


def _spans(value: Mapping[str, Any]) -> Iterable[tuple[str, tuple[float, float]]]:
    for name, span in value.items():
        if isinstance(span, list | tuple) and len(span) == 2:
            begin, end = (_number(edge) for edge in span)
            if begin <= end:
                yield str(name), (begin, end)
