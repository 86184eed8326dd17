"""A model that is trained with fused kernels is the same model: losses, gradients, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_families import FAMILIES, model  # noqa: E402

from shoal.core.errors import KernelError  # noqa: E402
from shoal.kernel.fused.choice import OPERATORS, choose  # noqa: E402
from shoal.model.trained import train_with  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402


def gradients(of: Transformer, precision: str, *, recompute: bool = False) -> dict[str, Any]:
    tokens = torch.arange(3 * 24).view(3, 24) * 7 % 97
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = of.loss_sum(tokens[:, :-1], tokens[:, 1:], recompute=recompute)
    loss.backward()
    result = {name: p.grad for name, p in of.named_parameters()}
    return {"loss": loss.detach(), **result}


def backends(of: Transformer, precision: str) -> list[str]:
    fast = set(choose({}, of.config.shape(), precision).values())
    return ["reference", *sorted(fast - {"torch"})]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_is_the_same_model(family, precision):
    plain = model(family)
    exact = gradients(copy.deepcopy(plain), "fp32")
    unfused = gradients(copy.deepcopy(plain), precision)
    least = 1e-5 if precision == "fp32" else 2**-8
    for backend in backends(plain, precision):
        fused = copy.deepcopy(plain)
        train_with(fused, plain.config, dict.fromkeys(OPERATORS, backend), precision)
        result = gradients(fused, precision)
        # Rounding sends some tokens to other experts, and then all gradients are others.
        names = ["loss"] if family == "mixtral" and precision == "bf16" else list(exact)
        for name in names:
            right = exact[name]
            # As near as PyTorch's operators in that precision, which round more often.
            size = right.norm().clamp(min=1e-6)
            error, before = ((each[name] - right).norm() / size for each in (result, unfused))
            assert error < 1.5 * before + least, f"{backend} {name}: {error}, unfused {before}"


def test_computing_blocks_again_changes_no_bit():
    plain = model("qwen3")
    wanted = choose({}, plain.config.shape(), "fp32")
    results = []
    for recompute in (False, True):
        fused = copy.deepcopy(plain)
        train_with(fused, plain.config, wanted, "fp32")
        results.append(gradients(fused, "fp32", recompute=recompute))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_what_is_not_named_stays():
    made = model("qwen3")
    train_with(made, made.config, {"swiglu": "reference"}, "fp32")
    block = made.blocks[0]
    assert block.mlp.kernel is not None
    assert block.attention.trained is None and block.attention_norm.trained is None
    train_with(made, made.config, {"swiglu": "torch"}, "fp32")
    assert block.mlp.kernel is None


def test_every_operator_gets_a_backend():
    shape = model("llama").config.shape()
    assert set(choose({}, shape, "fp32")) == set(OPERATORS)
    assert choose({"rope": "reference"}, shape, "bf16")["rope"] == "reference"
    assert choose({}, shape, "bf16", compiled=True) == dict.fromkeys(OPERATORS, "torch")


@pytest.mark.parametrize(
    ("wanted", "options", "message"),
    [
        ({"rmsnorm": "cpp"}, {}, r"kernel\.rmsnorm.*rms_norm, rope, swiglu.*rms_norm"),
        ({"rope": "cpq"}, {}, r"kernel\.rope = 'cpq'.*reference.*cpp"),
        ({"rope": "cpp"}, {"compiled": True}, r"kernel\.rope = 'cpp'.*compile: false"),
        ({"swiglu": "cpp"}, {"device": "cuda"}, r"kernel\.swiglu = 'cpp'.*cpu only"),
    ],
)
def test_what_cannot_be_is_named(wanted, options, message):
    with pytest.raises(KernelError, match=message):
        choose(wanted, model("llama").config.shape(), "fp32", **options)


def test_the_experts_products_are_those_that_are_wanted():
    plain = model("mixtral")
    result = gradients(copy.deepcopy(plain), "fp32")
    slow = copy.deepcopy(plain)
    train_with(slow, plain.config, {"grouped_linear": "reference"}, "fp32")
    assert slow.blocks[0].mlp.grouped == "reference"
    for name, right in gradients(slow, "fp32").items():
        assert (result[name] - right).norm() < 1e-5 * right.norm().clamp(min=1e-3), name
    taken = choose({"grouped_linear": "loop"}, plain.config.shape(), "fp32")
    assert taken["grouped_linear"] == "loop"
    with pytest.raises(KernelError, match=r"training takes kernels of rms_norm, rope, swiglu$"):
        choose({"grouped_linear": "loop"}, model("llama").config.shape(), "fp32")
