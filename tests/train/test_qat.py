"""Finetuning with rounding: what it trains is what the kernels compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.core.errors import ConfigError, KernelError
from shoal.kernel.formats import weight_format
from shoal.kernel.planes.activations import rounded
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.train import zoo
from shoal.train.qat import finetune, matrices, rounding

CONFIG = ModelConfig(
    hidden=32, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=16, ffn_hidden=64, vocab_size=50,
    max_position=64,
)  # fmt: skip


class Text:
    """Tokens that repeat after seven."""

    def __len__(self) -> int:
        return 4096

    def read(self, start: int, out_N: np.ndarray) -> None:
        out_N[:] = (np.arange(start, start + len(out_N)) % 7) * 3


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return zoo.random(CONFIG)


def test_forward_is_rounded_and_backward_is_not(model: Transformer) -> None:
    linear = matrices(model)["blocks.0.mlp.down_proj"]
    x = torch.randn(3, 64, requires_grad=True)
    fmt = weight_format("bipolar3-g32")
    meant = fmt.dequantize(fmt.quantize(linear.weight))
    with rounding(model, "bipolar3-g32", "bipolar4"):
        out = linear(x)
        out.sum().backward()
    assert torch.allclose(out, F.linear(rounded(x.detach(), 4), meant), atol=1e-5)
    assert x.grad is not None
    assert torch.allclose(x.grad, meant.sum(0).expand(3, 64), atol=1e-5)
    assert linear.weight.grad is not None
    assert torch.equal(linear(x), F.linear(x, linear.weight))


def test_finetuned_codes_are_those_it_was_trained_with(model: Transformer) -> None:
    torch.set_num_threads(1)
    tokens = torch.empty(2, 33, dtype=torch.int64)
    for row, start in zip(tokens.numpy(), (0, 3), strict=True):
        Text().read(start, row)

    def loss() -> float:
        with torch.no_grad():
            return float(model.loss_sum(tokens[:, :-1], tokens[:, 1:])) / 64

    before = loss()
    codes = finetune(
        model,
        "bipolar3-g32",
        "bipolar8",
        Text(),
        steps=30,
        seq_len=32,
        batch=2,
        lr=3e-3,  # type: ignore[arg-type]
    )
    assert set(codes) == {f"{name}.weight" for name in matrices(model)}
    with torch.no_grad():
        for name, linear in matrices(model).items():
            packed = codes[f"{name}.weight"]
            linear.weight.copy_(weight_format(packed.format).dequantize(packed))
    assert loss() < 0.7 * before


def test_bad_input_is_named(model: Transformer) -> None:
    with (
        pytest.raises(KernelError, match="bipolar1 to bipolar8"),
        rounding(model, "int4-g32", "int8"),
    ):
        pass
    with pytest.raises(KernelError, match="multiple of 128"), rounding(model, "int4-g128"):
        pass
    with pytest.raises(ConfigError, match=r"qat.seconds"):
        finetune(model, "int4-g32", "", Text(), seconds=0)  # type: ignore[arg-type]
