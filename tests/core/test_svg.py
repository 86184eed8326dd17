import xml.etree.ElementTree as ElementTree

import pytest

from shoal.core.errors import ConfigError
from shoal.core.svg import Band, Chart, Series, stacked


def chart(**changes):
    base = {
        "title": "loss < 2",
        "x_label": "tokens",
        "y_label": "loss (nats)",
        "series": [
            Series("run", [1, 10, 100], [4.0, 2.0, 1.0], points=True),
            Series("plan", [1, 100], [4.1, 1.1], dashed=True),
        ],
    }
    return Chart(**{**base, **changes})


def test_a_chart_is_well_formed_and_described():
    text = chart(bands=[Band("plan", [1, 100], [4, 1], [4.2, 1.2])], log_x=True).render()
    root = ElementTree.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root[0].text == "loss < 2" and "loss (nats)" in (root[1].text or "")
    assert text.count("<polyline") == 2 and text.count("<circle") == 3 and "<polygon" in text
    assert "currentColor" in text and "run" in text and "plan" in text


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_inside_the_picture(log):
    root = ElementTree.fromstring(chart(log_x=log, log_y=log).render())
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cx"]) < 640 and 0 < float(circle.attrib["cy"]) < 360


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 1e-12], [1e9, 2e9], [-3.0, 5.0]])
def test_ticks_of_odd_ranges(values):
    text = chart(series=[Series("x", [0, 1], values)]).render()
    assert text.count("<line") >= 4


def test_values_that_cannot_be_drawn_are_left_out():
    text = chart(series=[Series("x", [1, 2, 3], [1.0, float("nan"), 2.0], points=True)]).render()
    assert text.count("<circle") == 2


def marks(text):
    """Place of every name of a legend, left to right and top to bottom."""
    root = ElementTree.fromstring(text)
    rects = root.findall("{http://www.w3.org/2000/svg}rect")
    return [(float(rect.attrib["x"]), float(rect.attrib["y"])) for rect in rects]


def many(count, **changes):
    return chart(series=[Series(f"series {i}", [0, 1], [i, 1]) for i in range(count)], **changes)


def test_a_legend_of_one_line_lies_above_the_chart():
    text = many(3).render()
    assert marks(text) == [(64, 34), (147, 34), (230, 34)]
    assert 'd="M64 52V314H624"' in text


def test_a_long_legend_takes_several_lines_and_stays_in_the_picture():
    text = many(17).render()
    places = marks(text)
    lines = sorted({y for _, y in places})
    assert len(places) == 17 and lines == [34, 52, 70]
    assert places == sorted(places, key=lambda place: (place[1], place[0]))
    assert all(x + 16 + 6.6 * len("series 16") <= 640 for x, _ in places)
    # The chart begins below it.
    assert 'd="M64 88V314H624"' in text
    long = chart(series=[Series("n" * 200, [0, 1], [0, 1]), Series("b", [0, 1], [1, 2])])
    assert marks(long.render()) == [(64, 34), (64, 52)]


def test_a_legend_can_be_left_out():
    text = many(17, legend=False).render()
    assert not marks(text) and 'd="M64 34V314H624"' in text


def test_charts_below_each_other():
    text = stacked([many(2), chart(height=200, width=700)])
    root = ElementTree.fromstring(text)
    assert root.attrib["viewBox"] == "0 0 700 560"
    assert [g.attrib["transform"] for g in root] == ["translate(0 0)", "translate(0 360)"]
    assert [ElementTree.tostring(g[0]).strip() for g in root] == [
        ElementTree.tostring(ElementTree.fromstring(one.render()))
        for one in (many(2), chart(height=200, width=700))
    ]


def test_bad_input():
    with pytest.raises(ConfigError, match="stacked charts = 0: expected at least one"):
        stacked([])
    with pytest.raises(ConfigError, match="equally many"):
        chart(series=[Series("x", [1, 2], [1.0])]).render()
    with pytest.raises(ConfigError, match="no point"):
        chart(series=[Series("x", [1, 2], [0.0, -1.0])], log_y=True).render()


def test_a_line_passes_over_a_gap():
    gap = {"x": [0, 1, 2, 3, 4], "y": [1.0, 2.0, float("nan"), 2.0, 1.0]}
    assert chart(series=[Series("x", **gap)]).render().count("<polyline") == 1
    ends = Series("x", [0, 1], [float("nan"), 1.0])
    assert chart(series=[ends]).render().count("<circle") == 1


def test_an_axis_covers_what_it_shall():
    text = chart(series=[Series("x", [0, 1], [0.0, 0.0])], cover_x=[-60], cover_y=[0, 1]).render()
    assert ">-60<" in text and ">1<" in text and ">-1<" not in text
