"""What eager operators read and write, counted as torch dispatches those of torchtitan's block."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from shoal.cost.gpu.engines import ENGINES  # noqa: E402
from shoal.cost.price.accelerated import EAGER, accelerated  # noqa: E402
from shoal.ir import ModelShape  # noqa: E402

TOKENS = 64
SHAPE = ModelShape(
    name="block",
    num_layers=1,
    hidden=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    ffn_hidden=896,
    vocab_size=64,
)


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write: no views, no products, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        ins, outs = (
            [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
            for tree in ((args, kwargs), result)
        )
        places = {one.untyped_storage().data_ptr() for one in ins}
        views = all(one.untyped_storage().data_ptr() in places for one in outs)
        if not views and not any(word in str(func) for word in (".mm", "attention", "empty")):
            self.moved += sum(map(_read, ins)) + sum(x.numel() * x.element_size() for x in outs)
        return result


def _read(tensor: Any) -> int:
    """Bytes of a tensor; what is expanded is read once."""
    size: int = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE.hidden, dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        own = x.float()
        return (own * torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * (
            self.weight
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        D, q, kv = SHAPE.hidden, 8 * 32, 2 * 32
        sizes = {"wq": (D, q), "wk": (D, kv), "wv": (D, kv), "wo": (q, D)}
        sizes |= {"w1": (D, 896), "w2": (896, D), "w3": (D, 896)}
        for name, (inner, outer) in sizes.items():
            setattr(self, name, nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16))
        self.before, self.between = Norm(), Norm()

    def forward(self, x: Any) -> Any:
        h = self.before(x)
        q, k, v = (layer(h).view(1, TOKENS, -1, 32) for layer in (self.wq, self.wk, self.wv))
        turns = torch.polar(torch.ones(TOKENS, 1, 16), torch.ones(TOKENS, 1, 16))

        def rotated(one: Any) -> Any:
            pairs = torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(3).type_as(one)

        def repeated(one: Any) -> Any:
            return one[:, :, :, None, :].expand(1, TOKENS, 2, 4, 32).reshape(1, TOKENS, 8, 32)

        heads = (rotated(q), repeated(rotated(k)), repeated(v))
        met = F.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in heads), is_causal=True
        )
        x = x + self.wo(met.transpose(1, 2).reshape(1, TOKENS, -1))
        h = self.between(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def test_the_model_moves_what_torch_moves() -> None:
    block = Block()
    x = torch.randn(1, TOKENS, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    with Traffic() as ahead:
        out = block(x)
    gradient = torch.ones_like(out)
    with Traffic() as behind:
        torch.autograd.grad(out, [x, *block.parameters()], gradient)
    ops = accelerated(
        SHAPE,
        seq_len=TOKENS,
        microbatch=1,
        precision="bf16",
        engine=ENGINES["torchtitan"],
    )
    own = [op for op in ops if op.kind == "memory" and op.name != "loss"]
    # Operators are counted whole, and priced as streams.
    forward = EAGER * sum(op.count * op.forward_bytes for op in own)
    backward = EAGER * sum(op.count * op.backward_bytes for op in own)
    assert forward == pytest.approx(ahead.moved, rel=0.06)
    assert backward == pytest.approx(behind.moved, rel=0.06)
