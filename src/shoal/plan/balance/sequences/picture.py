"""Plans of one batch, one above the other: rows are ranks, boxes are micro-steps, in time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.core.svg import COLOURS
from shoal.plan.balance.sequences.assignment import Assignment
from shoal.plan.balance.sequences.predicted import PredictedStep

_WIDE, _LEFT, _TITLE, _TALL = 820, 56, 26, 320
# Ranks that are drawn; more look the same.
_RANKS = 32
_ALONE = "#9a9a9a"


def draw(plans: Sequence[tuple[str, Assignment, PredictedStep]]) -> str:
    """An SVG with one time axis: what each rank computes alone (grey), and shared (colours)."""
    longest = max(found.step_s for _, _, found in plans) or 1.0
    ranks = min(_RANKS, max(plan.ranks for _, plan, _ in plans))
    row = max(3, min(14, _TALL // ranks))
    panel = _TITLE + ranks * row + 14
    words = "; ".join(f"{name} {found.step_s:.3g} s" for name, _, found in plans)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 12} '
        f'{panel * len(plans) + 26}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>One step of {len(plans)} plans: {escape(words)}</title>",
        "<style>text{fill:#222}.f{fill:#eee}@media (prefers-color-scheme: dark)"
        "{svg{background:#0f1219}text{fill:#eee}.f{fill:#333}}</style>",
    ]
    for number, (name, plan, result) in enumerate(plans):
        out += _panel(number * panel, name, plan, result, _WIDE / longest, ranks, row)
    bottom = panel * len(plans) + 14
    out.append(
        f'<text x="{_LEFT}" y="{bottom}">grey: a rank alone; a colour: ranks that share a buffer; '
        f"the axis ends at {longest:.3g} s</text>"
    )
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(
    top: int,
    name: str,
    plan: Assignment,
    found: PredictedStep,
    scale: float,
    ranks: int,
    row: int,
) -> list[str]:
    out = [
        f'<text x="4" y="{top + 17}">{escape(name)}: {found.step_s:.3g} s, '
        f"{100 * found.idle_share:.0f} % idle</text>",
        f'<rect class="f" x="{_LEFT}" y="{top + _TITLE}" '
        f'width="{found.step_s * scale:.1f}" height="{min(ranks, plan.ranks) * row}"/>',
    ]
    shared = 0
    for span in found.spans:
        step = plan.steps[span.step]
        colour = _ALONE
        if len(step.ranks) > 1:
            colour = COLOURS[shared % len(COLOURS)]
            shared += 1
        tokens = sum(plan.lengths[one] for one in step.sequences)
        said = f"{len(step.sequences)} sequences, {tokens:,} tokens, {len(step.ranks)} ranks"
        x, wide = _LEFT + span.start * scale, max(0.5, (span.end - span.start) * scale - 0.6)
        for rank in step.ranks:
            if rank < ranks:
                out.append(
                    f'<rect x="{x:.1f}" y="{top + _TITLE + rank * row}" width="{wide:.1f}" '
                    f'height="{max(1, row - 1)}" fill="{colour}"><title>{said}</title></rect>'
                )
    return out
