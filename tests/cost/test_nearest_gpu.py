"""The description that prices a GPU, by the name that its driver gives."""

from __future__ import annotations

import pytest

from shoal.cost.gpu import nearest as module
from shoal.cost.gpu.nearest import nearest
from shoal.cost.kernels.times import _NEAREST
from shoal.machine.described import load, names


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_a_described_one_is_itself(name: str, wanted: str) -> None:
    machine, why = nearest(name)
    assert machine.name == wanted and why == ""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("NVIDIA Z900", "H100"), ("NVIDIA B200 NVL", "B200"), ("NVIDIA A800-SXM4-80GB", "A100")],
)
def test_another_is_the_nearest_and_says_so(name: str, wanted: str) -> None:
    machine, why = nearest(name)
    assert machine.name == wanted
    assert why == f"there is no description of {name}: predictions are those of {wanted}"


def test_every_table_has_a_description() -> None:
    tables = {table for _, table in _NEAREST} | {"h100_sxm"}
    assert module._DESCRIBED.keys() == tables
    for machine in module._DESCRIBED.values():
        assert machine in names() and load(machine).device.kind == "gpu"
