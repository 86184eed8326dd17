"""Colours of a terminal, in one place; a reader without colours misses nothing.

What a style marks is said in words or by its place, too. In a pipe, and where the environment has
``NO_COLOR``, text is plain.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

Mark = Literal["", "title", "headline", "warning", "error", "minor"]
"""What a word, a line or a row is; empty for nothing special."""

STYLES: dict[Mark, str] = {
    "": "",
    "title": "bold",
    "headline": "bold",
    "warning": "yellow",
    "error": "red",
    "minor": "dim",
}
"""Mark -> how rich draws it."""

_BAR = {"bar.complete": "default", "bar.finished": "default", "bar.pulse": "dim"}
_BEGINNINGS: tuple[tuple[str, Mark], ...] = (
    ("note: ", "warning"),
    ("warning: ", "warning"),
    ("error: ", "error"),
    ("does not fit", "error"),
    ("it does not fit", "error"),
    ("no plan fits", "error"),
    ("differs ", "error"),
    ("equal: ", "headline"),
    ("taken: ", "minor"),
)


def console(*, stderr: bool = False) -> Console:
    """A rich console; plain text when the output is no terminal."""
    from rich.console import Console
    from rich.theme import Theme

    # A pipe has no width; 80 columns would cut tables that people grep.
    stream = sys.stderr if stderr else sys.stdout
    # What is printed is text: brackets as in shoal-ml[run] and [Errno 28] are no markup.
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else 160,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        theme=Theme(_BAR),
        highlight=False,
        markup=False,
        emoji=False,
    )


def mark_of(line: str) -> Mark:
    """What a sentence is, by the word that it begins with."""
    return next((mark for start, mark in _BEGINNINGS if line.startswith(start)), "")


def echo(line: str, mark: Mark | None = None, *, stderr: bool = False) -> None:
    """Print a line, which a terminal shows as what it is.

    Args:
        line: without markup.
        mark: what it is; by its first word if None.
        stderr: where notes and errors go.
    """
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty():
        print(line, file=stream, flush=True)
        return
    from rich.text import Text

    style = STYLES[mark_of(line) if mark is None else mark]
    console(stderr=stderr).print(Text(line, style=style), soft_wrap=True)
