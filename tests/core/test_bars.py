"""Bars show every value at its scale, and say it."""

import math
import re
from xml.etree import ElementTree

import pytest

from shoal.core.bars import StackedBars
from shoal.core.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def show(value: float) -> str:
    return f"{value:g} GB"


def test_pieces_are_as_wide_as_their_values() -> None:
    rows = {"a <b>": {"weights": 10.0, "rest": 30.0}, "c": {"rest": 20.0, "none": 0.0}}
    text = StackedBars("memory", rows, show, limit=80.0, limit_name="room").render()
    root = ElementTree.fromstring(text)
    pieces = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    notes = [piece.findtext(f"{SVG}title") for piece in pieces]
    assert notes == ["weights: 10 GB", "rest: 30 GB", "rest: 20 GB"]
    wide = [float(piece.get("width", 0)) for piece in pieces]
    assert wide[1] / wide[0] == pytest.approx(3, rel=0.01)
    assert wide[2] / wide[0] == pytest.approx(2, rel=0.01)
    # The second piece begins where the first ends, and has the colour of its name everywhere.
    assert float(pieces[1].get("x", 0)) == pytest.approx(
        float(pieces[0].get("x", 0)) + wide[0], abs=0.2
    )
    assert pieces[1].get("fill") == pieces[2].get("fill") != pieces[0].get("fill")
    line = next(root.iter(f"{SVG}line"))
    start = float(pieces[0].get("x", 0))
    assert (float(line.get("x1", 0)) - start) / wide[0] == pytest.approx(8, rel=0.01)
    words = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert "a <b>" in words
    assert "40 GB" in words
    assert "room: 80 GB" in words
    assert root.findtext(f"{SVG}desc") == "a <b>: 40 GB; c: 20 GB"


def test_more_names_than_colours_stay_inside() -> None:
    many = {f"a cause with a long name {i}": 1.0 for i in range(12)}
    bars = StackedBars("many", {"one": many}, show)
    right = [
        float(x) + 7.2 * len(name)
        for x, name in re.findall(r'<text x="([0-9.]+)" y="\d+">(a cause[^<]*)<', bars.render())
    ]
    assert len(right) == 12
    assert max(right) <= bars.width


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_cannot_be_drawn_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"one\.part"):
        StackedBars("bad", {"one": {"part": value}}, show).render()


def test_no_bars() -> None:
    with pytest.raises(ConfigError, match="at least one bar"):
        StackedBars("empty", {}, show).render()
