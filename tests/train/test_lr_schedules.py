import math

import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import table


def test_cosine_rises_peaks_and_falls_to_its_floor() -> None:
    cosine = table("lr_schedule").build({"name": "cosine", "warmup": 0.1, "floor": 0.2})
    values = [cosine.factor(step, 100) for step in range(101)]
    assert values[:10] == sorted(values[:10])
    assert values[10] == pytest.approx(1.0)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[100] == pytest.approx(0.2)
    assert values[55] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))


def test_wsd_is_flat_between_its_ends() -> None:
    wsd = table("lr_schedule").build({"name": "wsd", "warmup": 0.1, "decay": 0.4, "floor": 0.0})
    values = [wsd.factor(step, 100) for step in range(101)]
    assert values[10:61] == [1.0] * 51
    assert values[80] == pytest.approx(0.5)
    assert values[100] == 0.0


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "cosine", "warmup": 2}, "warmup = 2"),
        ({"name": "cosine", "warm_up": 0.1}, "did you mean 'warmup'"),
        ({"name": "wsd", "warmup": 0.5, "decay": 0.6}, "at most 1 - warmup = 0.5"),
        ("cosin", "did you mean 'cosine'"),
    ],
)
def test_bad_options(choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table("lr_schedule").build(choice)  # type: ignore[arg-type]
