"""A timeline of a pipeline as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cost.pipeline.simulator import Timeline


def lines(timeline: Timeline, columns: int = 110, ranks: Sequence[int] | None = None) -> list[str]:
    """One line a rank: ``F3`` and the like where a pass begins, dashes while it lasts, dots idle.

    A pass that is too narrow for its number shows its kind alone.

    Args:
        timeline: what to show.
        columns: width of the time axis; less where that is enough to name every pass.
        ranks: whom to show; all.
    """
    ranks = range(timeline.ranks) if ranks is None else ranks
    if not len(timeline) or timeline.makespan <= 0:
        return ["" for _ in ranks]
    spent = timeline.end - timeline.start
    shortest = float(spent[spent > 0].min())
    # Three columns for the shortest pass say it all; whole ones make equal passes look equal.
    each = min(3.0, columns * shortest / timeline.makespan)
    if each >= 1:
        columns = round(int(each) * timeline.makespan / shortest)
    scale = columns / timeline.makespan
    rows = {rank: ["."] * columns for rank in ranks}
    for rank, op, start, end in timeline.events(ranks):
        first, last = round(start * scale), round(end * scale)
        word = f"{op.kind}{op.mb}"
        word = word if len(word) <= last - first else op.kind
        for place in range(first, last):
            at = place - first
            rows[rank][place] = word[at] if at < len(word) else "-"
    return ["".join(rows[rank]) for rank in ranks]
