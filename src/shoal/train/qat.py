"""Finetuning that knows it will be rounded: weights of few bits, and activations too.

In the forward pass every matrix of the blocks is what its codes mean, and its input is rounded
row by row; in the backward pass rounding counts as the identity. The grid of each group is
chosen anew every few steps, from the weights as they are then.

Source: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013 (the
straight-through estimator); Jacob et al., Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference, 2018.

Shapes: B sequences, T tokens, N outputs and K inputs of a matrix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import require
from shoal.core.random import generator
from shoal.corpora.tokens import TokenSplit
from shoal.kernel.formats import weight_format
from shoal.kernel.formats.base import BaseFormat
from shoal.kernel.planes.activations import bits_of
from shoal.kernel.protocols import PackedMatrix
from shoal.model.transformer import Transformer
from shoal.train.optimizers.eager import EagerAdamW

# Steps between two choices of the grids.
_REFRESH = 20
_WARMUP = 0.05


def matrices(model: Transformer) -> dict[str, nn.Linear]:
    """The matrices of the blocks by name; embedding and output stay as they are."""
    return {
        f"blocks.{name}": module
        for name, module in model.blocks.named_modules()
        if isinstance(module, nn.Linear)
    }


class _Rounded:
    """One matrix that computes as if rounded."""

    def __init__(self, linear: nn.Linear, fmt: BaseFormat, bits: int) -> None:
        self.linear, self.fmt, self.bits = linear, fmt, bits
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        self.grid = self.fmt.grid(self.fmt.groups(self.linear.weight))
        self._columns = {name: tensor[..., None] for name, tensor in self.grid.items()}

    @torch.no_grad()
    def codes(self) -> Tensor:
        """[N, G, g]."""
        weight = self.linear.weight.detach()
        group = self.fmt.group_of(weight.shape[1])
        return self.fmt.encode(weight.view(len(weight), -1, group), self._columns)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        with torch.no_grad():
            off = self.fmt.decode(self.codes(), self._columns).flatten(1) - weight
            x_off = _nearest(x, self.bits) - x if self.bits else None
        if x_off is not None:
            x = x + x_off
        return F.linear(x, weight + off, self.linear.bias)

    def packed(self) -> PackedMatrix:
        return self.fmt.pack(self.codes().flatten(1), self.grid)


def _nearest(x: Tensor, bits: int) -> Tensor:
    """What rows rounded to bipolar integers mean, as the kernels round them."""
    top = 2**bits - 1
    wide = x.float()
    if bits < 3:
        scale = (0.7978846, 0.498)[bits - 1] * wide.square().mean(-1, keepdim=True).sqrt()
    else:
        scale = wide.abs().amax(-1, keepdim=True) / top
    half = torch.where(scale > 0, 0.5 / scale, 0.0)
    codes = (wide * half).add_(0.5 * top).round_().clamp_(0, top)
    return codes.mul_(2).sub_(top).mul_(scale).to(x.dtype)


@contextmanager
def rounding(
    model: Transformer, weights: str, activations: str = ""
) -> Iterator[dict[str, _Rounded]]:
    """While open, the matrices of the blocks compute as if rounded.

    Args:
        model: a model.
        weights: text of the weight format.
        activations: ``bipolar1`` to ``bipolar8``; empty for inputs as they are.

    Raises:
        KernelError: no such format, or K of a matrix does not divide.
    """
    bits = bits_of(activations) if activations else 0
    result = {
        name: _Rounded(linear, weight_format(weights), bits)
        for name, linear in matrices(model).items()
    }
    for name, one in result.items():
        model.get_submodule(name).forward = one.forward
    try:
        yield result
    finally:
        for name in result:
            del model.get_submodule(name).forward


def finetune(
    model: Transformer,
    weights: str,
    activations: str,
    tokens: TokenSplit,
    *,
    seconds: float = 60.0,
    steps: int | None = None,
    seq_len: int = 256,
    batch: int = 8,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> dict[str, PackedMatrix]:
    """Train all weights, those of the blocks as if rounded; the model is changed.

    The learning rate rises for a twentieth of the time and falls to 0 as a cosine.

    Args:
        model: in fp32.
        weights: text of the weight format.
        activations: as of :func:`rounding`.
        tokens: what is trained on.
        seconds: how long.
        steps: how many steps instead; for what must be repeatable.
        seq_len: tokens of a sequence.
        batch: sequences of a step.
        lr: the highest learning rate of AdamW.
        seed: of the order of the text.
        progress: called with (text, share done).

    Returns:
        name of a matrix -> its codes.

    Raises:
        KernelError: no such format, or K of a matrix does not divide.
        ConfigError: a number that cannot be.
    """
    require(seconds > 0, "qat.seconds", seconds, expected="above 0")
    require(batch >= 1, "qat.batch", batch, expected="at least 1")
    require(seq_len >= 2, "qat.seq_len", seq_len, expected="at least 2")
    optimizer = EagerAdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
    )
    rows = max(1, len(tokens) // seq_len)
    begin, step = time.monotonic(), 0
    model.train()
    with rounding(model, weights, activations) as rounded:
        while True:
            done = (time.monotonic() - begin) / seconds if steps is None else step / steps
            if done >= 1:
                break
            rate = min(1.0, done / _WARMUP + 0.01) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            picks = generator(seed, purpose="qat", step=step).integers(0, rows, batch)
            data = torch.empty(batch, seq_len + 1, dtype=torch.int64)
            for row, pick in zip(data.numpy(), picks.tolist(), strict=True):
                tokens.read(pick * seq_len, row)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss_sum(data[:, :-1], data[:, 1:]) / (batch * seq_len)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % _REFRESH == _REFRESH - 1:
                for one in rounded.values():
                    one.refresh()
            step += 1
            progress(f"finetuning, loss {float(loss.detach()):.3f}", done)
        model.eval()
        return {f"{name}.weight": one.packed() for name, one in rounded.items()}
