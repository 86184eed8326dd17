"""Tiles, and models that never exist whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import ConfigError, TierFullError  # noqa: E402
from shoal.memory.offload.zero_infinity import ZeroInfinity  # noqa: E402
from shoal.memory.streaming.initial import init_sharded, part_of  # noqa: E402
from shoal.memory.streaming.tiling import TiledLinear, tile  # noqa: E402
from shoal.memory.tiers.device import DeviceScope  # noqa: E402
from shoal.memory.tiers.offloaded_parameter import ParameterShard  # noqa: E402
from shoal.memory.tiers.tier import BudgetedTier  # noqa: E402
from shoal.train.optimizers.adamw import AdamW  # noqa: E402

MIB = 2**20


@pytest.mark.parametrize(("ins", "outs"), [(1, 4), (3, 1), (2, 5), (1, 1)])
def test_tiles_are_the_layer(ins, outs):
    torch.manual_seed(0)
    whole = nn.Linear(50, 33)
    tiled = TiledLinear.of(whole, in_splits=ins, out_splits=outs)
    assert len(tiled.tiles) == ins * outs
    x = torch.randn(7, 50, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    one, other = whole(x), tiled(y)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    one.square().sum().backward()
    other.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    assembled = torch.full_like(whole.weight, float("nan"))
    boxes = tiled.boxes("layer")
    for name, parameter in tiled.named_parameters():
        box = boxes[f"layer.{name}"]
        if box.whole == "layer.weight":
            (r, c), (rows, columns) = box.offset, box.size
            assembled[r : r + rows, c : c + columns] = parameter.grad
    torch.testing.assert_close(whole.weight.grad, assembled, rtol=1e-5, atol=1e-5)


def test_too_many_tiles():
    with pytest.raises(ConfigError, match=r"out_splits = 9: expected 1 to 8"):
        TiledLinear(8, 8, out_splits=9)


def test_only_plain_layers_that_are_too_large_are_cut():
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Bilinear(2, 2, 2))
    result = tile(model, 256, tiles=None)
    assert isinstance(model[0], TiledLinear)
    assert len(model[0].tiles) == 2
    assert {box.whole for box in result.values()} == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (1, 4, 2), (14, 2)])
def test_parts_are_the_whole(shape, world):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    array = torch.full(shape, -1.0)
    for rank in range(world):
        cut = ParameterShard(shape, rank, world)
        held = cut.held(cut.of(whole))
        assert cut.numel <= cut.padded
        if shape:
            array[held.offset[0] : held.offset[0] + len(held.tensor)] = held.tensor
        elif held.tensor.numel():
            array = held.tensor.clone()
    assert torch.equal(array, whole)


class Deep(nn.Module):
    """Sixteen layers of which two at once are too many."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_model_is_built_without_ever_existing_whole(tmp_path):
    torch.manual_seed(0)
    reference = Deep()
    torch.manual_seed(0)
    host = BudgetedTier("host", MIB)
    with DeviceScope(host, strict=False), init_sharded(tmp_path, 5 * MIB):
        model = Deep()
    assert host.stats.peak < 0.6 * MIB  # of 4 MiB
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
    for (name, whole), kept in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(part_of(kept).values, whole.detach().reshape(-1)), name
    part = ZeroInfinity(device_budget=MIB, host_budget=16 * MIB)

    def train(comm):
        offloaded = part.apply(model, comm, AdamW(), place=tmp_path)
        x = torch.ones(2, 256)
        with offloaded.passes("train", x):
            model(x).square().mean().backward()
        offloaded.step(1.0)
        result = {name: held.tensor.clone() for name, held in offloaded.held().items()}
        offloaded.close()
        return result, offloaded.tiers.peaks()

    result, peaks = run_ranks(1, train)[0]
    reference(torch.ones(2, 256)).square().mean().backward()
    updater = AdamW().build(dict(reference.named_parameters()))
    updater.step(1.0)
    for name, parameter in reference.named_parameters():
        assert torch.equal(result[name], parameter), name
    # Values, gradients and moments are sixteen times the device.
    assert sum(p.nbytes for p in reference.parameters()) * 4 > 16 * peaks["device"]


def test_a_model_that_was_built_for_other_ranks(tmp_path):
    with init_sharded(tmp_path, MIB, rank=1, world=2):
        model = nn.Sequential(nn.Linear(64, 64))
    part = ZeroInfinity(device_budget=MIB, host_budget=16 * MIB)
    with pytest.raises(ConfigError, match=r"0.weight was built for rank 1 of 2"):
        run_ranks(1, lambda comm: part.apply(model, comm, AdamW(), place=tmp_path))


def test_an_operator_that_the_device_has_no_room_for(tmp_path):
    def apply(model, **options):
        part = ZeroInfinity(device_budget=MIB, host_budget=64 * MIB, **options)
        run_ranks(1, lambda comm: part.apply(model, comm, AdamW(), place=tmp_path).close())

    model = nn.Sequential(nn.Linear(512, 512))
    with pytest.raises(TierFullError, match=r"0.weight \[512, 512\] needs 3.15 MB.*tiling: 6"):
        apply(model)
    apply(model, tiling=6)
    apply(nn.Sequential(nn.Linear(512, 512)), tiling="auto")
    with pytest.raises(TierFullError, match=r"give device_budget at least 3.15 MB"):
        apply(nn.Sequential(nn.Embedding(512, 512)))
