"""What a small device bears: the bytes that serving counts, and times of the cost model."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.core.errors import ConfigError
from shoal.cost.shapes import resolve
from shoal.machine.described import load
from shoal.plan.serving.small_device import SmallDevice, layers_share

RIGHT = ((0.6, 0.2, 0.1), (0.4, 0.1, 0.1), (0.3, 0.1, 0.1))
DEVICE = SmallDevice(
    machine=load("H100"), shape=resolve("Llama-2-7B"), precision="bf16", places=2048, depth=2,
    breadth=2,
)  # fmt: skip


def test_a_drafter_is_as_deep_and_broad_as_its_trees():
    one, two = (DEVICE.option(f"{layers}", layers, RIGHT) for layers in (1, 2))
    assert one.right == ((0.6, 0.2), (0.4, 0.1))
    assert (one.name, one.layers) == ("1", 1)
    # Two layers are a layer of the target more, with the places of trees in its cache.
    shape = DEVICE.shape
    trees = 2 * 3 * 4 * 2 * shape.num_kv_heads * shape.head_dim * 2
    assert two.nbytes - one.nbytes == DEVICE.layer_bytes + trees
    assert one.level_s < two.level_s


def test_all_layers_and_the_head_take_a_step():
    share = layers_share(DEVICE.shape)
    assert 0.9 < share < 1
    rows = [DEVICE.layer.seconds(count) for count in (1, 8, 64)]
    assert rows == sorted(rows)
    # A decode of 13 GB over 3.35 TB/s takes some 4 to 5 ms.
    assert 3e-3 < rows[0] * DEVICE.shape.num_layers / share < 8e-3


def test_another_precision_is_refused():
    with pytest.raises(ConfigError, match="fp32 or bf16"):
        dataclasses.replace(DEVICE, precision="fp8")
