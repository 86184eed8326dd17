"""The scoreboard of published runs as a page of the gallery."""

from __future__ import annotations

import functools

from shoal.core.web import WebSite
from shoal.cost.published.board import CLOSE, Scoreboard, scatter, share_within
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving_scoreboard import score_serving

SCOREBOARD = "scoreboard.html"
# Rows that are shown before the others are unfolded.
_SHOWN = 12


@functools.cache
def _boards() -> tuple[Scoreboard, ...]:
    """Of the rows that travel with the package: the same in every process."""
    return score_training(), score_serving()


def render_scoreboard(pages: WebSite) -> str:
    """Predicted beside reported for every published run, the publication left out.

    Args:
        pages: site whose base page is used.
    """
    return pages.render(
        "gallery_scoreboard.html",
        boards=_boards(),
        close=CLOSE,
        shown=_SHOWN,
        scatter=scatter,
        within=share_within,
        worst=lambda board: sorted(board.rows, key=lambda row: -abs(row.error)),
        here=SCOREBOARD,
    )
