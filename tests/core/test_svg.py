import xml.etree.ElementTree as ElementTree

import pytest

from shoal.core.errors import ConfigError
from shoal.core.svg import Band, Chart, Series


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


def test_bad_input():
    with pytest.raises(ConfigError, match="equally many"):
        chart(series=[Series("x", [1, 2], [1.0])]).render()
    with pytest.raises(ConfigError, match="no point"):
        chart(series=[Series("x", [1, 2], [0.0, -1.0])], log_y=True).render()
