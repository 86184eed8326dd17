"""Units in which quantities are read."""

import pytest

from shoal.ir import Interval, Quantity


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000168, "16.8 us"),
        (0.00131, "1.31 ms"),
        (0.0991, "99.1 ms"),
        (0.1, "0.100 s"),
        (12.4, "12.4 s"),
        (0.0, "0 s"),
    ],
)
def test_a_short_time_is_shown_in_a_smaller_unit(seconds: float, text: str) -> None:
    quantity = Quantity(name="query_s", label="time of a query", unit="s")
    assert quantity.scaled_to(seconds).text(seconds) == text


def test_other_units_stay() -> None:
    for quantity in (
        Quantity.of_time("step_s", "step", "ms"),
        Quantity.of_share("recall", "recall", "higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
    ):
        assert quantity.scaled_to(1e-5) is quantity


def test_a_share_is_predicted_up_to_one() -> None:
    assert Interval.around(0.97, 0.05).capped(1.0).high == 1.0
    assert Interval.around(0.5, 0.05).capped(1.0) == Interval.around(0.5, 0.05)
