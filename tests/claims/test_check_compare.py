"""Distances, losses and shares of a batch, against numbers that can be seen."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.claims.check.batches import map_tensors, row_bounds, split_rows, to_dtype
from shoal.claims.check.compare import (
    BROKEN,
    combine_losses,
    distance,
    floor_of,
    groups_by,
    rounding_only,
)
from shoal.claims.check.protocols import CheckSettings, parse_mesh
from shoal.claims.check.side import clean
from shoal.claims.check.whole import guess_split
from shoal.core.errors import ConfigError

ONE = np.array([1.0, -4.0, 0.0])


def test_distance_is_relative_to_the_largest_entry() -> None:
    result = distance(ONE + np.array([0.0, 0.0, 0.02]), ONE, 0.0)
    assert result.error == pytest.approx(0.005) and result.absolute == pytest.approx(0.02)
    assert distance(ONE + np.array([0.0, 0.0, 0.02]), ONE, 8.0).error == pytest.approx(0.0025)
    assert distance(ONE, ONE, 0.0).error == 0.0
    assert distance(np.zeros(0), np.zeros(0), 0.0).error == 0.0
    assert floor_of([ONE, np.array([np.inf]), np.zeros(0)]) == pytest.approx(0.04)
    assert floor_of([]) == 0.0


def test_gradients_of_rounding() -> None:
    result = rounding_only({"a": ONE, "b": ONE * 1e-12, "c": ONE * 0}, floor_of([ONE]), 1e-9)
    assert result == {"b"}


def test_what_cannot_be_compared_is_said() -> None:
    assert distance(None, None, 0.0).error == 0.0
    assert distance(np.zeros(3), None, 0.0).error == 0.0  # an unused parameter
    assert distance(None, ONE, 0.0).note == "the split has no gradient"
    assert distance(ONE, None, 0.0).note == "only the split has a gradient"
    assert "shape [2], in one process [3]" in distance(ONE[:2], ONE, 0.0).note
    broken = distance(np.array([1.0, np.nan, 0.0]), ONE, 0.0)
    assert broken.error == BROKEN and broken.note == "not finite"
    same = np.array([np.inf, 2.0])
    assert distance(same, same, 0.0).error == 0.0


def test_losses_are_joined_by_part() -> None:
    groups = [[0, 1], [2, 3]]
    assert combine_losses([1.0, 1.0, 3.0, 3.0], groups, "mean") == (2.0, "")
    assert combine_losses([1.0, None, None, 3.0], groups, "sum") == (4.0, "")
    assert combine_losses([2.0, 2.0, 2.0, 2.0], groups, "same") == (2.0, "")
    assert "losses differ" in combine_losses([1.0, 1.0, 3.0, 3.0], groups, "same")[1]
    assert "no rank of [2, 3]" in combine_losses([1.0, 1.0, None, None], groups, "mean")[1]
    assert "have the same rows" in combine_losses([1.0, 2.0, 3.0, 3.0], groups, "mean")[1]
    places = [{"dp": d, "tp": t} for d in (0, 1) for t in (0, 1)]
    assert groups_by(places, ["dp"]) == [[0, 1], [2, 3]]
    assert groups_by(places, []) == [[0, 1, 2, 3]]


@given(st.integers(1, 9), st.integers(1, 40))
def test_rows_are_dealt_out_whole(parts: int, rows: int) -> None:
    for ragged in (False, True):
        if (rows <= parts) if ragged else rows % parts:
            with pytest.raises(ConfigError, match="rows cannot be distributed"):
                row_bounds(rows, parts, ragged=ragged)
            continue
        bounds = row_bounds(rows, parts, ragged=ragged)
        sizes = np.diff(bounds)
        assert bounds[0] == 0 and bounds[-1] == rows and len(sizes) == parts
        assert sizes.min() >= 1
        assert parts == 1 or (len(set(sizes)) > 1) == ragged


def test_batches_of_any_structure() -> None:
    batch = {"x": torch.arange(8).reshape(4, 2), "rest": (torch.tensor(3), [torch.arange(4)], "w")}
    part = split_rows(batch, 1, 2, ragged=False)
    assert part["x"].tolist() == [[4, 5], [6, 7]]
    assert part["rest"][0] == 3 and part["rest"][1][0].tolist() == [2, 3] and part["rest"][2] == "w"
    with pytest.raises(ConfigError, match="no tensors to distribute"):
        split_rows({"x": 3}, 0, 2, ragged=False)
    wide = map_tensors(
        [torch.ones(1), torch.ones(1, dtype=torch.complex64), torch.ones(1).int()],
        lambda x: to_dtype(x, torch.float64),
    )
    assert [x.dtype for x in wide] == [torch.float64, torch.complex128, torch.int32]


def test_names_and_splits_are_understood() -> None:
    assert clean("module._orig_mod.0.weight", ddp=True) == "0.weight"
    assert clean("module.0.weight") == "module.0.weight"
    assert clean("blocks.1._checkpoint_wrapped_module.up.bias") == "blocks.1.up.bias"
    axes = {"dp": 2, "tp": 2}
    assert guess_split((4, 8), (8, 8), axes) == (0, "tp")
    assert guess_split((4, 8), (8, 8), {"dp": 2}) == (0, "dp")
    assert guess_split((3, 8), (8, 8), axes) is None
    assert guess_split((4, 4), (8, 8), axes) is None
    assert guess_split((8,), (8, 8), axes) is None


def test_settings() -> None:
    assert parse_mesh("dp=2, tp=4") == {"dp": 2, "tp": 4}
    for text in ("dp", "dp=0", "dp=2,dp=2", "=2", ""):
        with pytest.raises(ConfigError, match="--mesh"):
            parse_mesh(text)
    assert CheckSettings(file="x.py").resolve_mesh(None) == {"dp": 2}
    assert CheckSettings(file="x.py", ranks=4).resolve_mesh({"tp": 4}) == {"tp": 4}
    with pytest.raises(ConfigError, match="expected 6, the product of the mesh dp=2,tp=3"):
        CheckSettings(file="x.py", ranks=4, mesh={"dp": 2, "tp": 3})
    with pytest.raises(ConfigError, match="2 to 64 ranks"):
        CheckSettings(file="x.py", mesh={"dp": 1})
    assert CheckSettings(file="x.py").limit == 1e-9
    assert CheckSettings(file="x.py", dtype="float32").limit == 2e-5
    assert CheckSettings(file="a.b").path is None
