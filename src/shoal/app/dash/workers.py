"""The block inspector: what each concurrent worker of a server sees now, as a row of blocks.

The server reports owners, places and lengths (``GET /v1/workers``); no text leaves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shoal.core.errors import ServeError
from shoal.serve.watch.upstream import Upstream

# What a block is -> its words, and its class in the style sheet.
KINDS = {
    "prompt": ("prompt and finished steps", "hw-common"),
    "header": ("header", "hw-header"),
    "step": ("step just finished", "hw-common"),
    "work": ("work in progress", "hw-other"),
}
_OWN = ("own work", "hw-own")
# Sessions that are shown; a picture has at most so many blocks.
_SHOWN = 8
_WIDTH, _LEFT, _LANE = 1120, 150, 44


@dataclass(frozen=True)
class ViewBlock:
    """A block of a view.

    Args:
        what: one of :data:`KINDS`.
        owner: who writes to it; empty once closed.
        offset: place of its first token in the view.
        length: tokens.
        shared: others see it, too.
        own: the worker whose view it is writes to it.
    """

    what: str
    owner: str
    offset: int
    length: int
    shared: bool
    own: bool

    @property
    def words(self) -> str:
        """What it is."""
        return _OWN[0] if self.own else KINDS[self.what][0]

    @property
    def color(self) -> str:
        """Its class in the style sheet."""
        return _OWN[1] if self.own else KINDS[self.what][1]


@dataclass(frozen=True)
class WorkerRow:
    """The view of one worker."""

    name: str
    length: int
    blocks: tuple[ViewBlock, ...]


@dataclass(frozen=True)
class WorkerSession:
    """The workers of one request, drawn as rows over the places of their views."""

    id: str
    rows: tuple[WorkerRow, ...]

    def render(self) -> str:
        """The SVG element as text."""
        height = _LANE * len(self.rows) + 26
        longest = max((row.length for row in self.rows), default=0) or 1
        scale = (_WIDTH - _LEFT - 14) / longest
        text = "; ".join(
            f"{row.name}: " + ", ".join(f"{b.words} of {b.length}" for b in row.blocks)
            for row in self.rows
        )
        name = f"views-{escape(self.id)}"
        parts = [
            f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-labelledby="{name}-t {name}-d" xmlns="http://www.w3.org/2000/svg">'
            f'<title id="{name}-t">Views of {escape(self.id)}</title>'
            f'<desc id="{name}-d">{escape(text)}</desc>'
        ]
        for number, row in enumerate(self.rows):
            y = _LANE * number
            parts.append(f'<text class="tl-name" x="8" y="{y + 26}">{escape(row.name)}</text>')
            for block in row.blocks:
                parts.append(_box(block, _LEFT + scale * block.offset, scale * block.length, y))
        parts.append(
            f'<text class="tl-note" x="{_LEFT}" y="{height - 8}">0</text>'
            f'<text class="tl-note" x="{_WIDTH - 14}" y="{height - 8}" text-anchor="end">'
            f"{longest} tokens</text>"
        )
        return "".join(parts) + "</svg>"


def _box(block: ViewBlock, x: float, width: float, y: int) -> str:
    owner = f" of {block.owner}" if block.owner and not block.own else ""
    seen = "shared" if block.shared else "visible to no other worker"
    text = f"{block.words}{owner}: from {block.offset}, {block.length} tokens, {seen}"
    inside = ""
    if width > 7.5 * len(block.owner) + 8:
        inside = f'<text class="hw-word" x="{x + 5:.1f}" y="{y + 27}">{escape(block.owner)}</text>'
    return (
        f'<rect class="{block.color}" x="{x:.1f}" y="{y + 8}" rx="2" '
        f'width="{max(width - 1, 1):.1f}" height="28"><title>{escape(text)}</title></rect>{inside}'
    )


def read(text: str) -> tuple[WorkerSession, ...]:
    """The sessions of an answer of ``GET /v1/workers``.

    Raises:
        ServeError: it is something else.
    """
    try:
        return tuple(_sessions(json.loads(text)["data"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise ServeError("the server has no views of workers; is it shoal serve?") from cause


def _sessions(data: Sequence[Any]) -> Iterator[WorkerSession]:
    for session in data:
        rows = []
        for worker in session["workers"]:
            name = str(worker["name"])
            blocks = tuple(_block(raw, name) for raw in worker["blocks"])
            rows.append(WorkerRow(name, sum(block.length for block in blocks), blocks))
        yield WorkerSession(str(session["id"]), tuple(rows))


def _block(raw: Any, reader: str) -> ViewBlock:
    what, owner = str(raw["what"]), str(raw["owner"] or "")
    if what not in KINDS:
        raise ValueError(what)
    own = what == "work" and owner == reader
    return ViewBlock(what, owner, int(raw["offset"]), int(raw["length"]), bool(raw["shared"]), own)


def inspect(upstream: Upstream) -> dict[str, Any]:
    """What the page of workers shows: sessions, how many are left out, or what went wrong."""
    try:
        result = read(upstream.workers())
        error = ""
    except ServeError as cause:
        result, error = (), str(cause)
    return {
        "sessions": result[:_SHOWN],
        "more": len(result[_SHOWN:]),
        "error": error,
        "key": [*dict.fromkeys((KINDS["prompt"], KINDS["header"], KINDS["work"], _OWN))],
    }
