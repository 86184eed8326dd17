import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.cost import arithmetic
from shoal.cost.shapes import find
from shoal.cost.training.megatron import (
    boundary_bytes,
    bubble,
    checkpoints,
    parameters,
    training_days,
)

# Table 1 of the paper: billions of parameters, blocks, hidden, batch, devices, TFLOP/s of a
# device and PFLOP/s of all; vocabulary 51,200 and 2,048 tokens.
TABLE_1 = (
    (1.7, 24, 2304, 512, 32, 137, 4.4),
    (3.6, 30, 3072, 512, 64, 138, 8.8),
    (7.5, 36, 4096, 512, 128, 142, 18.2),
    (18.4, 40, 6144, 1024, 256, 135, 34.6),
    (39.1, 48, 8192, 1536, 512, 138, 70.8),
    (76.1, 60, 10240, 1792, 1024, 140, 143.8),
    (145.6, 80, 12288, 2304, 1536, 148, 227.1),
    (310.1, 96, 16384, 2160, 1920, 155, 297.4),
    (529.6, 105, 20480, 2520, 2520, 163, 410.2),
    (1008.0, 128, 25600, 3072, 3072, 163, 502.0),
)


@pytest.mark.parametrize("row", TABLE_1, ids=[f"{row[0]}B" for row in TABLE_1])
def test_table_1(row):
    billions, layers, hidden, _, devices, tera, peta = row
    result = parameters(layers, hidden, 51200, 2048)
    assert result / 1e9 == pytest.approx(billions, rel=0.01, abs=0.06)
    # The table's own columns agree.
    assert devices * tera / 1e3 == pytest.approx(peta, rel=0.01)


def test_days_of_the_paper():
    assert training_days(175e9, 300e9, 1024, 140e12) == pytest.approx(33.9, abs=0.05)
    assert training_days(1.008e12, 450e9, 3072, 163e12) == pytest.approx(84, abs=0.5)


def test_formulas_agree_with_the_count_by_operator():
    shape = find("GPT-3 175B")
    own = parameters(96, 12288, shape.vocab_size, 2048)
    assert own == pytest.approx(arithmetic.parameters(shape), rel=1e-3)


def test_bubble():
    assert bubble(4, 8) == 3 / 8 and bubble(4, 8, 3) == 1 / 8 and bubble(1, 1) == 0


def test_traffic():
    plain = boundary_bytes(2, 8, 16, tp=4)
    assert plain == 2 * 2 * 8 * 16
    assert boundary_bytes(2, 8, 16, tp=4, scatter_gather=True) == plain / 4
    assert boundary_bytes(2, 8, 16, vpp=3) == 3 * plain


@given(st.integers(1, 64), st.floats(1, 1e6), st.floats(0, 1e7))
def test_checkpoints_are_the_best_divisor_and_near_the_root(layers, entry, between):
    best, held = checkpoints(layers, entry, between)
    assert layers % best == 0
    root = (layers * between / entry) ** 0.5
    assert held >= 2 * (layers * entry * between) ** 0.5 * (1 - 1e-9)
    for c in range(1, layers + 1):
        if layers % c == 0:
            assert held <= c * entry + layers // c * between
            assert not (root <= c < best or best < c <= root)


def test_bad_input():
    with pytest.raises(PlanError, match="flops_per_device = 0"):
        training_days(1e9, 1e9, 8, 0)
    with pytest.raises(PlanError, match="devices = 0"):
        training_days(1e9, 1e9, 0, 1e12)
    with pytest.raises(PlanError, match="pp = 0"):
        bubble(0, 4)
    with pytest.raises(PlanError, match="bytes of a block"):
        checkpoints(4, 0.0, 1.0)
