"""How clients are described."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.fields.federate.clients import parse_clients, slow_factors
from shoal.fields.federate.job import FederateJob


def test_groups_have_devices_and_links() -> None:
    specs = parse_clients("4@100Mbit + 2xlaptop@1.5Gbit + 1")
    assert [spec.name for spec in specs] == [f"c{at}" for at in range(7)]
    assert [spec.device for spec in specs] == [""] * 4 + ["laptop"] * 2 + [""]
    assert [spec.bytes_per_s for spec in specs] == [12.5e6] * 4 + [1.875e8] * 2 + [0.0]


@pytest.mark.parametrize("text", ["", "0", "x5", "5@fast", "5@0Mbit", "3x", "99999+99999", "-1"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="clients"):
        parse_clients(text)


@given(count=st.integers(2, 40), slowest=st.floats(1, 20), seed=st.integers(0, 99))
def test_drawn_factors_run_from_one_to_the_slowest(count: int, slowest: float, seed: int) -> None:
    for law in ("normal", "exponential"):
        factors = slow_factors(law, count, slowest, seed)
        assert min(factors) == pytest.approx(1.0)
        assert max(factors) == pytest.approx(slowest)


def test_factors_may_be_given() -> None:
    job = FederateJob.model_validate({"clients": 3, "speeds": [1, 2, 6]})
    assert slow_factors(job.speeds, 3, job.slowest, 0) == (1.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"clients": 3, "speeds": [1, 2]}, "2 factors for 3 clients"),
        ({"clients": 3, "attackers": 1}, "give an attack"),
        ({"clients": 3, "attack": "sign_flip"}, "fewer attackers"),
        ({"clients": 3, "attack": "sign_flip", "attackers": 3}, "fewer attackers"),
        ({"data": "nothing"}, "nothing"),
        ({"lr": 0}, "lr"),
        ({"target": 1.5}, "target"),
    ],
)
def test_a_job_that_cannot_be_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        FederateJob.model_validate(values)
