"""Charts as the values that the browser draws."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.app.dash.plots import aligned, plots, window
from shoal.core.svg import Band, Chart, Series

Line = list[tuple[float, float | None]]


@given(st.lists(st.lists(st.tuples(st.integers(0, 9).map(float), st.floats(0, 1)), max_size=12)))
def test_every_point_keeps_its_place(lines: list[Line]) -> None:
    at, columns = aligned(lines)
    assert at == sorted(at) and all(len(column) == len(at) for column in columns)
    for line, column in zip(lines, columns, strict=True):
        kept = [(x, y) for x, y in zip(at, column, strict=True) if y is not None]
        assert kept == sorted(line, key=lambda point: point[0])


def test_lines_bands_and_gaps() -> None:
    chart = Chart(
        title="t",
        x_label="x",
        y_label="y",
        log_y=True,
        series=[
            Series("a", [1, 2, 3], [1.0, math.nan, 3.0]),
            Series("b", [2.5, 2.5], [0.0, 9.0], dashed=True),
            Series("c", [1], [-1.0], points=True, line=False),
        ],
        bands=[Band("b", [1, 3], [0.5, 0.5], [2.0, math.inf])],
    )
    (plot,) = json.loads(json.dumps(plots([chart]), allow_nan=False))["plots"]
    assert plot["at"] == [1.0, 2.0, 2.5, 2.5, 3.0]
    a, b, c = plot["series"]
    assert a["values"] == [1.0, None, None, None, 3.0] and a["broken"]
    # What a logarithmic axis has no place for is left out.
    assert b["values"] == [None, None, None, 9.0, None] and not b["broken"] and b["dashed"]
    assert c["values"] == [None] * 5 and (c["line"], c["points"]) == (False, True)
    (band,) = plot["bands"]
    assert band == {
        "colour": 1,
        "low": [0.5, None, None, None, 0.5],
        "high": [2.0, None, None, None, None],
    }


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"from": "1", "to": "2.5"}, (1.0, 2.5)),
        ({"from": "1"}, None),
        ({"from": "2", "to": "1"}, None),
        ({"from": "nan", "to": "1"}, None),
        ({"from": "<b>", "to": "1"}, None),
    ],
)
def test_the_window_of_an_address(
    query: dict[str, str], wanted: tuple[float, float] | None
) -> None:
    assert window(query) == wanted
