"""Layers with weights of few bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import KernelError
from shoal.kernel.formats import weight_format
from shoal.model.lowbit import LowBitLinear


def layers(fmt: str = "int4-g128", **options: object) -> tuple[nn.Linear, LowBitLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(256, 96)
    return plain, LowBitLinear.from_linear(plain, fmt, **options)


@pytest.mark.parametrize("fmt", ["int4-g128", "int4-channel", "int4-2:4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_computes_what_its_weights_mean(fmt: str, dtype: torch.dtype) -> None:
    plain, layer = layers(fmt)
    assert plain.bias is not None
    weight = weight_format(fmt).dequantize(layer.packed)
    for rows in (1, 3, 17, 40):
        x = torch.randn(rows, 256).to(dtype)
        wanted = x.float() @ weight.T + plain.bias
        result = layer(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), wanted, rtol=2e-2, atol=3e-2)


@torch.inference_mode()
def test_is_saved_cast_and_loaded() -> None:
    _, layer = layers()
    x = torch.randn(2, 256)
    before = layer(x)
    _, other = layers()
    other.codes.zero_()
    other(x)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), before)
    scales = layer.scales.clone()
    layer.to(torch.bfloat16)
    assert layer.scales.dtype == torch.float16
    assert torch.equal(layer.scales, scales)
    assert layer.bias.dtype == torch.bfloat16
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@torch.inference_mode()
def test_the_large_copy_is_made_only_if_wanted() -> None:
    _, layer = layers()
    assert "dequantised" not in {layer.backend(rows) for rows in (1, 16, 512, 4096)}
    _, forced = layers(wanted="dequantised")
    assert forced.backend(1) == "dequantised"
    assert torch.isfinite(forced(torch.randn(2, 256))).all()


def test_rounded_activations_are_asked_for() -> None:
    _, layer = layers(activations="int8")
    assert layer.backend(1) in ("cpp_w4a8", "integer")
    plain, _ = layers()
    x = torch.randn(4, 256)
    with torch.inference_mode():
        assert (layer(x) - plain(x)).abs().mean() < 0.1 * plain(x).abs().mean()


def test_bad_rows() -> None:
    _, layer = layers()
    with pytest.raises(KernelError, match=r"rows \[2, 255\]: expected \[\.\.\., 256\]"):
        layer(torch.zeros(2, 255))
    with pytest.raises(KernelError, match="no_grad"):
        layer(torch.zeros(2, 256, requires_grad=True))
    with pytest.raises(KernelError, match="nearest"):
        LowBitLinear.from_linear(nn.Linear(200, 8), "int4-g128")


def test_experts_take_the_backend_that_is_wanted():
    from shoal.model.accelerate import accelerate
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import init_weights
    from shoal.model.quantize.layers import pack
    from shoal.model.transformer import Transformer

    config = ModelConfig(
        vocab_size=31, hidden=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
        ffn_hidden=64, max_position=16, family="mixtral", num_experts=2, top_k=1,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, 0)
    model = pack(model.requires_grad_(False).eval(), "int4-g32")
    accelerate(model, {"linear_lowbit": "reference"})
    layers = [one for one in model.blocks[0].mlp.modules() if isinstance(one, LowBitLinear)]
    assert len(layers) == 4
    assert {layer.backend(3, torch.float32) for layer in layers} == {"reference"}
