"""The scoreboard of serving: every published row, predicted beside reported."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from shoal.core.errors import ShoalError
from shoal.cost.published.board import CLOSE, Scoreboard, ScoredRow, widths
from shoal.cost.published.serving import (
    ServeReplay,
    ServeRow,
    predict_serving,
    read_serving,
    replay_serving,
)


def score_serving(rows: tuple[ServeRow, ...] | None = None) -> Scoreboard:
    """Score all rows of the shipped table, or of another.

    Intervals of another table are those that the shipped one gives.
    """
    return _shipped() if rows is None else _score(rows, _replayed(read_serving())[0])


@functools.cache
def _shipped() -> Scoreboard:
    return _score(read_serving(), ())


_Replayed = Sequence[tuple[ServeReplay, float]]


def _replayed(rows: tuple[ServeRow, ...]) -> tuple[_Replayed, dict[str, str]]:
    """Rows that can be replayed, with their predictions, and why the others cannot."""
    skipped: dict[str, str] = {}
    results: list[tuple[ServeReplay, float]] = []
    for row in rows:
        try:
            item = replay_serving(row)
            results.append((item, predict_serving(item)))
        except ShoalError as cause:
            skipped[row.id] = str(cause)
    return results, skipped


def _kind(item: ServeReplay) -> str:
    if item.on_cpu:
        return "cpu"
    return "prompt" if item.row.metric.startswith(("prefill", "ttft")) else "answer"


def _reason(item: ServeReplay) -> str:
    row = item.row
    if item.on_cpu:
        if row.group == "sglang-xeon":
            return "matrix units and nodes of memory of a 128-core CPU are far from their sheet"
        return "kernels that unpack weights on few threads are bound by the cores"
    if row.metric == "prefill_tokens_per_s":
        return "kernels of quantised products do not use the newest matrix instructions"
    if row.group == "llmservingsim":
        return "lengths vary: only their means are stated"
    if item.shape.num_experts:
        return "small groups of experts, and their exchange, are slower than modelled"
    if row.group == "nanoflow":
        return "the host's seconds of a step on that machine are not stated, nor how lengths vary"
    if "0.5.0" in row.source:
        return "an early release: static batches, separate kernels"
    return "the engine's largest batch is not stated"


def _score(rows: tuple[ServeRow, ...], others: _Replayed) -> Scoreboard:
    results, skipped = _replayed(rows)
    spreads = widths(
        [(i.row.group, _kind(i), abs(math.log(p / i.row.value))) for i, p in (*results, *others)]
    )
    scored = []
    for item, value in results:
        row = item.row
        spread = math.exp(spreads[row.group, _kind(item)])
        far = abs(value / row.value - 1.0) > CLOSE
        scored.append(
            ScoredRow(
                id=row.id,
                group=row.group,
                device=row.raw["device"],
                devices=item.devices,
                metric=row.metric,
                reported=row.value,
                predicted=value,
                low=value / spread,
                high=value * spread,
                run=item.run,
                bound="",
                filled=item.filled,
                remembered=row.remembered,
                reason=_reason(item) if far else "",
            )
        )
    return Scoreboard(kind="serving", rows=tuple(scored), skipped=skipped)
