"""Products with a base in NF4: the kernel's and the tiles' are those of the weights they mean."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from shoal.core.parts import table  # noqa: E402
from shoal.memory.tiers.device import DeviceScope  # noqa: E402
from shoal.memory.tiers.tier import BudgetedTier  # noqa: E402
from shoal.train.peft.run import nf4  # noqa: E402
from shoal.train.peft.run.nf4 import NF4Linear  # noqa: E402
from shoal.train.peft.run.sites import AdaptedLinear, dense  # noqa: E402

# Of the norm: fp32 sums; bf16 inputs, numbers of NF4 and outputs, each rounded once.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"), [(96, 128, 64), (33, 256, 32), (64, 40, 16), (24, 36, 16)]
)
def test_products_and_gradients_are_the_weights(
    dtype: torch.dtype, outputs: int, inputs: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "_TILE", 1024)  # several tiles of so small a matrix
    torch.manual_seed(outputs)
    layer = NF4Linear(torch.nn.Linear(inputs, outputs), block)
    before = layer.dense()
    x = torch.randn(3, 7, inputs).to(dtype).requires_grad_()
    grad = torch.randn(3, 7, outputs).to(dtype)
    out = layer(x)
    torch.autograd.backward(out, grad)
    wanted = F.linear(x.double(), before.double(), layer.bias.double())
    assert far(out, wanted) < TOLERANCE[dtype]
    assert x.grad is not None
    assert far(x.grad, grad.double() @ before.double()) < TOLERANCE[dtype]
    assert torch.equal(layer.dense(), before), "the same weights in whatever order"
    again = layer(x)
    assert torch.equal(again, out)


def test_the_kernel_has_the_codes_alone() -> None:
    layer = NF4Linear(torch.nn.Linear(256, 128), 64)
    assert 8 * layer.nbytes / (256 * 128) < 4.3
    layer(torch.randn(5, 256).bfloat16())
    if layer._ready is None:
        pytest.skip("this CPU has no 4-bit kernel")
    assert layer.codes is None
    assert 8 * layer.nbytes / (256 * 128) < 4.6
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.dense(), layer.dense())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_pass_makes_the_whole_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "_TILE", 2**15)
    size = 512
    linear = torch.nn.Linear(size, size, bias=False)
    layer = NF4Linear(linear, 64)
    x = torch.randn(4, size).to(dtype).requires_grad_()
    torch.autograd.backward(layer(x).sum())  # lays out the codes
    tier = BudgetedTier("passes", 2**40)
    with DeviceScope(tier, strict=False) as scope:
        for tensor in (x, *layer.buffers()):
            scope.adopt(tensor)
        before = tier.stats.used
        tier.stats.peak = before
        torch.autograd.backward(layer(x).sum())
    whole = size * size * dtype.itemsize
    assert tier.stats.peak - before < 0.5 * whole


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_adapter_learns_what_it_does_on_the_weights_that_were_rounded(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 192), torch.nn.Linear(192, 64))
    few = table("peft").build({"name": "qlora", "r": 4, "targets": "*"})
    handle = few.inject(model)
    plain = torch.nn.Sequential(torch.nn.Linear(128, 192), torch.nn.Linear(192, 64))
    for made, stored in zip(plain, model, strict=True):
        assert isinstance(stored, AdaptedLinear)
        made.weight.data.copy_(dense(stored.base))
        made.bias.data.copy_(stored.bias)
    other = table("peft").build({"name": "lora", "r": 4, "targets": "*"}).inject(plain.double())
    with torch.no_grad():
        for name, value in handle.trainable().items():
            value.add_(0.05 * torch.randn(value.shape))
            other.trainable()[name].copy_(value)
    for part in plain.modules():
        part.double()
    x, target = torch.randn(9, 128), torch.randn(9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = (model(x).float() - target).square().mean()
    torch.autograd.backward(loss)
    torch.autograd.backward((plain(x.double()) - target).square().mean())
    wanted = {name: value.grad for name, value in other.trainable().items()}
    for name, value in handle.trainable().items():
        # In bf16 both layers, both products of a pair, and the gradients between are rounded.
        assert far(value.grad, wanted[name]) < 3 * TOLERANCE[dtype], name
