"""Weights on the device, state on the host: losses and parameters of the plain run, to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.core.errors import ConfigError, TierFullError
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.machine.described import load

torch = pytest.importorskip("torch")

from shoal.cost.arithmetic import activation_bytes, parameters  # noqa: E402
from shoal.cost.shapes import find  # noqa: E402
from shoal.ir import Work  # noqa: E402
from shoal.kernel.squares import sum_of_squares  # noqa: E402
from shoal.train.optimizers.adamw import AdamW  # noqa: E402
from shoal.train.optimizers.muon import Muon  # noqa: E402

ALONE = SimpleNamespace(world=1, rank=0)


def part(**options):
    return table("offload").build({"name": "deep_optimizer_states", **options})


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    )


def batches(steps, size=12):
    source = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=source) for _ in range(steps)]


def clip(norm):
    return (0.05 / (norm + 1e-6)).clamp(max=1.0).float()


def plain(steps):
    net, rule = model(), AdamW(fused=False)
    named = dict(net.named_parameters())
    updater = rule.build(named)
    losses = []
    for step, x in enumerate(batches(steps)):
        for parameter in named.values():
            parameter.grad = None
        for half in x.split(6):
            loss = net(half).square().sum() / len(x)
            loss.backward()
            losses.append(float(loss.detach()))
        total = torch.zeros((), dtype=torch.float64)
        for parameter in reversed(named.values()):
            total += sum_of_squares(parameter.grad)
        for parameter in named.values():
            parameter.grad.mul_(clip(total.sqrt()))
        updater.step(1 / (1 + step))
    return losses, named, updater


def offloaded(steps, tmp_path, **options):
    net = model()
    made = part(**options).apply(net, ALONE, AdamW(fused=False), place=tmp_path)
    losses = []
    for step, x in enumerate(batches(steps)):
        with made.passes("train", x):
            for number, half in enumerate(x.split(6)):
                with made.accumulate(last=number == 1):
                    loss = net(half).square().sum() / len(x)
                    loss.backward()
                losses.append(float(loss.detach()))
                del loss
        made.finish()
        lent = made.lend({"0.weight", "3.bias"})
        assert len(lent) == 2
        assert all(p.grad.shape == p.shape for p in lent.values())
        made.take_back(lent)
        norm = made.squared_norm(lambda name: True).sqrt()
        made.scale_gradients(clip(norm))
        made.step(1 / (1 + step))
        made.publish()
    return losses, made


@pytest.mark.parametrize("stride", ["auto", 0, 2, 3])
@pytest.mark.parametrize("residents", [0, 1])
def test_the_bits_of_the_plain_run(stride, residents, tmp_path):
    options = {"stride": stride, "static_residents": residents, "sub_group_numel": "500"}
    losses, made = offloaded(4, tmp_path, **options)
    expected, named, updater = plain(4)
    assert losses == expected
    state = updater.state()
    for name, held in made.held().items():
        assert torch.equal(held.tensor, named[name]), name
        for key, value in state[name].items():
            assert torch.equal(made.state()[name][key], value), (name, key)
    groups = made.update.pattern.groups
    assert groups == -(-sum(p.numel() for p in named.values()) // 500)
    assert made.update.updated == [4] * groups
    # Weights, gradients of sub-groups here, two slots and residents: the state is elsewhere.
    assert made.tiers.peaks()["host"] >= 12 * 500
    made.close()


def test_going_on_elsewhere(tmp_path):
    _, made = offloaded(2, tmp_path, stride=2, sub_group_numel=300)
    state = made.state()
    other = part(stride=3, sub_group_numel=700).apply(
        model(), ALONE, AdamW(fused=False), place=tmp_path
    )
    with torch.no_grad():
        for name, held in other.held().items():
            held.tensor.copy_(made.held()[name].tensor)
    other.load(state)
    for name, entries in other.state().items():
        assert all(torch.equal(entries[key], state[name][key]) for key in entries)
    made.close()
    other.close()


def test_estimate_counts_the_tiers():
    shape = find("shoal-4m")
    work = Work(shape=shape, job=TrainJob(model="shoal-4m", steps=1, precision="fp32"))
    count = parameters(shape)
    laptop = part(stride=0).estimate(work, load("laptop"))
    assert laptop.memory_bytes["host"] == 16.0 * count + 4 * 4096
    passes = laptop.memory_bytes["device"] - 8.0 * count
    assert passes > activation_bytes(shape, work.job.seq_len, 16, precision="fp32", layers=1)
    shared = part(stride=2, sub_group_numel=1000).estimate(work, load("laptop"))
    assert shared.memory_bytes["device"] == laptop.memory_bytes["device"] + 2 * 12 * 1000


def test_bad_input(tmp_path):
    with pytest.raises(ConfigError, match=r"stride = 1.*leave offload out"):
        part(stride=1)
    with pytest.raises(ConfigError, match="sub_group_numel"):
        part(sub_group_numel=0)
    with pytest.raises(ConfigError, match="Muon looks at several elements"):
        part().apply(model(), ALONE, Muon(), place=tmp_path)
    with pytest.raises(TierFullError, match="device: "):
        part(device_budget="1MiB").apply(
            torch.nn.Linear(600, 600), ALONE, AdamW(fused=False), place=tmp_path
        )
    with pytest.raises(ConfigError, match="shard is zero1"):
        part().check(TrainJob.model_validate({"shard": "zero1"}))
