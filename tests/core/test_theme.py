"""Colours are for terminals that want them, and say nothing that words do not."""

from __future__ import annotations

import io
import re
import sys

import pytest

import shoal
from shoal.core import theme
from shoal.core.tables import Table, rich_table, table_of

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LINES = ("note: a price is missing", "does not fit: a rank fills 9 of 8 GB", "time of a step: 3 s")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **environment: str) -> str:
    """Lines and a marked table, as they are printed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stream)
    for line in LINES:
        theme.echo(line)
    table = table_of("plans", ("#", "fits"), [(1, "yes"), (2, "no")])
    table = table.model_copy(update={"marks": ("headline", "minor")})
    theme.console().print(rich_table(table))
    return stream.getvalue()


def test_a_terminal_has_colours_and_everything_else_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coloured = shown(monkeypatch, Terminal())
    assert "\x1b[33mnote: a price is missing\x1b[0m" in coloured
    assert "\x1b[31mdoes not fit" in coloured and "\x1b[2m" in coloured and "\x1b[1m" in coloured
    plain = shown(monkeypatch, Terminal(), NO_COLOR="1")
    piped = shown(monkeypatch, io.StringIO())
    assert not ANSI.search(plain) and not ANSI.search(piped)
    # Every word is there without a colour.
    words = ANSI.sub("", coloured).split()
    assert words == plain.split() == piped.split()


def test_what_is_marked_is_said_in_words() -> None:
    for line in LINES[:2]:
        assert theme.mark_of(line) and theme.mark_of(line) in theme.STYLES
    assert theme.mark_of(LINES[2]) == ""
    fits = shoal.plan("Llama-3.1-8B", "8xH100", tokens="2B").tables()
    not_at_all = shoal.plan("Llama-3-70B", "RTX-4090", tokens="2B").tables()
    for blocks, marks, words in (
        (fits, "headline", "best first"),
        (not_at_all, "minor", "no plan fits"),
    ):
        first = next(block for block in blocks if isinstance(block, Table))
        assert first.marks[0] == marks and words in first.title
        assert len(first.marks) == len(first.rows)
