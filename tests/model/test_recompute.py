"""What a backward pass computes again, and that it changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernel.fused.causal import takes
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.train.zoo import random


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def model(way: str) -> Transformer:
    result = random("shoal-1m").train()
    for block in result.modules():
        if isinstance(block, TransformerBlock):
            block.keeps_products = way == "selective"
    return result


def backward(way: str, bf16: bool) -> tuple[float, list[torch.Tensor], Counter[str]]:
    """Loss, gradients, and the operators of the backward pass."""
    own = model(way)
    tokens = torch.arange(128).remainder(97).view(2, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = own.loss_sum(tokens, tokens.roll(-1, 1), recompute=way != "none")
    with Operators() as operators:
        loss.backward()
    gradients = [p.grad for p in own.parameters() if p.grad is not None]
    return loss.item(), gradients, operators.calls


@pytest.mark.parametrize("bf16", [False, True])
def test_selective_keeps_products_and_attention_and_computes_the_rest_again(bf16: bool) -> None:
    runs = {way: backward(way, bf16) for way in ("none", "selective", "full")}
    for way in ("selective", "full"):
        assert runs[way][0] == runs["none"][0]
        for own, plain in zip(runs[way][1], runs["none"][1], strict=True):
            assert torch.equal(own, plain)
    none, selective, full = (runs[way][2] for way in ("none", "selective", "full"))
    q, k = torch.empty(2, 2, 64, 64).bfloat16(), torch.empty(2, 1, 64, 64).bfloat16()
    own = bf16 and takes(q, k)
    attention = "causal_attention" if own else "_scaled_dot_product_flash_attention_for_cpu"
    layers = 4
    assert selective["mm"] == none["mm"]
    # What the last product of a block gives is needed by nothing in it.
    assert full["mm"] == none["mm"] + 3 * layers
    assert selective[attention] == none[attention] == 0
    assert full[attention] == layers
    # Norms and activation functions run again in both.
    assert selective["silu"] == full["silu"] == layers > none["silu"]


def test_a_block_without_the_mark_is_computed_again_as_a_whole() -> None:
    own = model("full")
    assert not any(getattr(block, "keeps_products", False) for block in own.modules())
