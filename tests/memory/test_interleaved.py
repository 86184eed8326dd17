"""Sub-groups that host and device share: the numbers of one AdamW, each once a step."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError, TierFullError

torch = pytest.importorskip("torch")

from shoal.memory.offload.interleaved import InterleavedUpdater, Workers  # noqa: E402
from shoal.memory.tiers.mover import EmulatedLink  # noqa: E402
from shoal.memory.tiers.tier import BudgetedTier  # noqa: E402
from shoal.plan.memory.stride import HOST_ONLY, UpdatePattern  # noqa: E402
from shoal.train.optimizers.adamw import AdamW  # noqa: E402

MIB = 2**20


def parameters(seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = {"a": (37, 11), "b": (11,), "c": (64, 9), "d": (5,), "e": (3, 3, 3)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=source))
        for name, shape in shapes.items()
    }


def gradients(step):
    source = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=source) for name, p in parameters().items()}


def reference(steps, *, fused=False):
    params = parameters()
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False, fused=fused)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 / (1 + step))
        optimizer.step()
    return params, optimizer


def interleaved(pattern, *, sub_group=100, fused=False, workers=None, device=MIB):
    params = parameters()
    tiers = BudgetedTier("device", device), BudgetedTier("host", MIB)
    made = InterleavedUpdater(
        params,
        AdamW(lr=1e-3, fused=fused),
        sub_group=sub_group,
        pattern=lambda sizes: UpdatePattern(groups=len(sizes), **pattern),
        device=tiers[0],
        host=tiers[1],
        workers=workers or Workers(),
    )
    return params, made, tiers


def run(params, made, steps, first=0):
    for step in range(first, first + steps):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient
        made.take_gradients()
        made.step(1 / (1 + step))
    made.settle()


PATTERNS = [
    {"stride": HOST_ONLY},
    {"stride": 2},
    {"stride": 3},
    {"stride": 2, "mirrored": True},
    {"stride": 5, "mirrored": True, "residents": 2},
    {"residents": 11},
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_numbers_of_one_adamw(pattern):
    params, made, (device, _) = interleaved(pattern)
    run(params, made, 10)
    expected, optimizer = reference(10)
    for name, parameter in params.items():
        assert torch.equal(parameter, expected[name]), name
        state = optimizer.state[expected[name]]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(made.state()[name][key], state[key]), (name, key)
        assert made.state()[name]["step"] == state["step"]
    assert made.updated == [10] * made.pattern.groups
    moving = [on for on in made.pattern.on_device()[: 11 - made.pattern.residents] if on]
    slots = min(2, len(moving)) * 3 * 512
    gradients_there = sum(made.pattern.on_device())
    assert device.stats.peak <= slots + 512 * (gradients_there + 3 * made.pattern.residents)
    made.close()


def test_the_fused_kernel_differs_in_last_bits_alone():
    """Its vectors end elsewhere when a parameter is cut."""
    params, made, _ = interleaved({"stride": 2}, fused=True)
    run(params, made, 10)
    expected, _ = reference(10, fused=True)
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, expected[name], rtol=10 * 2**-23, atol=1e-7)
    made.close()


def test_slow_ways_change_nothing():
    """The link takes far longer than the update, so everything waits for it."""
    link = EmulatedLink(2e6)
    params, made, _ = interleaved({"stride": 2}, workers=Workers(link=link, host_rate=1e6))
    run(params, made, 2)
    expected, _ = reference(2)
    assert all(torch.equal(params[name], expected[name]) for name in params)
    made.close()


def test_going_on_from_a_state():
    params, made, _ = interleaved({"stride": 2})
    run(params, made, 3)
    other, goes_on, _ = interleaved({"stride": 3, "mirrored": True}, sub_group=70)
    with torch.no_grad():
        for name, parameter in other.items():
            parameter.copy_(params[name])
    goes_on.load(made.state())
    run(other, goes_on, 2, first=3)
    expected, _ = reference(5)
    assert all(torch.equal(other[name], expected[name]) for name in other)
    made.close()
    goes_on.close()


def test_low_precision_parameters_follow_fp32_ones():
    params = {name: p.detach().bfloat16().requires_grad_() for name, p in parameters().items()}
    start = {name: p.detach().float().clone().requires_grad_() for name, p in params.items()}
    made = InterleavedUpdater(
        params,
        AdamW(lr=1e-3, fused=False),
        sub_group=100,
        pattern=lambda sizes: UpdatePattern(groups=len(sizes), stride=2),
        device=BudgetedTier("device", MIB),
        host=BudgetedTier("host", MIB),
    )
    groups = [
        {"params": [p for p in start.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in start.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False)
    for step in range(3):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient.bfloat16()
            start[name].grad = gradient.bfloat16().float()
        made.take_gradients()
        made.step()
        optimizer.step()
        assert all(torch.equal(params[name], start[name].bfloat16()) for name in params)
    made.close()


def test_bad_input():
    with pytest.raises(TierFullError, match=r"sub_group_numel = 100: two sub-groups need 2.40 kB"):
        interleaved({"stride": 2}, device=2048)
    with pytest.raises(ConfigError, match="sub_group_numel"):
        interleaved({}, sub_group=0)
    tier = BudgetedTier("host", MIB)
    with pytest.raises(ConfigError, match="no parameter"):
        InterleavedUpdater(
            {},
            AdamW(lr=1e-3, fused=False),
            sub_group=1,
            pattern=lambda sizes: UpdatePattern(groups=len(sizes)),
            device=tier,
            host=tier,
        )
