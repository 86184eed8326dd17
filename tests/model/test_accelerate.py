"""A model computed by chosen kernels is the same model."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import kernel_families  # noqa: E402
from kernel_families import FAMILIES  # noqa: E402

from shoal.core.errors import KernelError  # noqa: E402
from shoal.kernel.calls import LinearCall  # noqa: E402
from shoal.kernel.dispatch import kernels_of  # noqa: E402
from shoal.model.accelerate import accelerate  # noqa: E402
from shoal.model.feedforward import SwiGLU  # noqa: E402
from shoal.model.linear import DispatchedLinear, rows_like  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402


def model(family: str, dtype: torch.dtype = torch.float32) -> Transformer:
    return kernel_families.model(family).to(dtype).requires_grad_(False).eval()


class Sees:
    """Causal attention among the tokens of one pass."""

    def __call__(self, layer, q_NHd, k_NKd, v_NKd):
        group = q_NHd.shape[1] // k_NKd.shape[1]
        q, k, v = (
            x.transpose(0, 1).contiguous()
            for x in (q_NHd, k_NKd.repeat_interleave(group, 1), v_NKd.repeat_interleave(group, 1))
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1)


@torch.inference_mode()
def logits(of: Transformer, length: int = 23, rows=None) -> torch.Tensor:
    tokens = torch.arange(length) * 7 % 97
    hidden = of.flat(tokens, torch.arange(length), Sees(), rows)
    return of.logits(hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_same_model(family, dtype):
    plain = model(family, dtype)
    fast = accelerate(copy.deepcopy(plain))
    wanted, result = logits(plain), logits(fast)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    assert (result.double() - wanted.double()).abs().max() < tolerance * wanted.abs().max()
    some = torch.tensor([22, 3])
    assert torch.allclose(logits(fast, rows=some), result[some], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[22, 3], [0], []])
def test_no_more_is_computed_than_the_rows_that_are_wanted(family, rows):
    plain = model(family)
    seen = []
    plain.blocks[-1].mlp.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    result = logits(plain, rows=torch.tensor(rows, dtype=torch.int64))
    assert seen == [len(rows)] * bool(rows)
    assert torch.allclose(result, logits(plain)[rows], atol=1e-5)


def test_wanted_backends_are_taken_and_equal():
    plain = model("qwen3")
    slow = accelerate(
        copy.deepcopy(plain),
        dict.fromkeys(("linear", "rms_norm", "rope", "swiglu"), "reference"),
    )
    assert torch.allclose(logits(slow), logits(plain), atol=1e-4)


@torch.inference_mode()
def test_the_experts_products_are_those_that_are_wanted():
    plain = model("mixtral")
    fast = accelerate(copy.deepcopy(plain), {"grouped_linear": "reference"})
    assert fast.blocks[0].mlp.grouped == "reference"
    assert torch.allclose(logits(fast), logits(plain), atol=1e-4)
    with pytest.raises(
        KernelError,
        match=r"grouped_linear = 'loop': it gives results whose bits depend on the other rows",
    ):
        accelerate(copy.deepcopy(plain), {"grouped_linear": "loop"}, exact=True)


@pytest.mark.parametrize("backend", ["packed", "amx"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_gates_are_computed_with_their_products_where_one_kernel_does_both(family, backend):
    reason = kernels_of("linear")[backend].refuses(LinearCall(1, 8, 8))
    if reason:
        pytest.skip(reason)
    wanted = {"linear": backend}
    fused = accelerate(model(family, torch.bfloat16), wanted)
    apart = accelerate(model(family, torch.bfloat16), {**wanted, "swiglu": "cpp"})
    assert torch.equal(logits(fused), logits(apart))
    names = [name for name, module in fused.named_modules() if isinstance(module, SwiGLU)]
    for name in names:
        assert fused.get_submodule(name).gate_up_proj.call(1).gated
        assert not apart.get_submodule(name).gate_up_proj.call(1).gated
    assert bool(names) == (family == "llama")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"lienar": "cpp"}, "no such operator"),
        ({"linear": "fortran"}, "expected one of reference"),
        ({"rms_norm": "triton"}, "these can"),
    ],
)
def test_what_cannot_be_is_named(wanted, words, monkeypatch):
    # Tests of Triton's kernels may have let this process interpret them.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match=words):
        logits(accelerate(model("llama"), wanted))


@pytest.mark.parametrize("wanted", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_gives_a_row_the_same_bits_in_any_company(wanted, dtype):
    layer = DispatchedLinear(torch.randn(33, 70, dtype=dtype), wanted=wanted, exact=True)
    x = torch.randn(50, 70, dtype=dtype)
    whole = layer(x)
    for rows in (1, 2, 7, 17, 40):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_rows_are_asked_about_by_classes():
    assert [rows_like(rows) for rows in (1, 16, 17, 32, 33, 500)] == [1, 16, 32, 32, 64, 512]
