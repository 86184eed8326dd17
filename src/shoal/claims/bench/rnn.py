"""What the claim about recurrences runs: calls to time, shapes to check, parity to learn.

Parity is the state-tracking task: every position answers whether the ones so far are odd. Its
state is one bit, which a recurrence carries to any length and attention must count anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.claims.lab.rnn.autograd import rnn
from shoal.claims.lab.rnn.blocks import RecurrentModel
from shoal.core.random import generator, seed64
from shoal.kernel.rnn.functions import FUNCTIONS
from shoal.kernel.rnn.loop import loop
from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer


def inputs(
    function: str, B: int, T: int, N: int, D: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """wx, R, b and states, all wanting gradients."""
    what = FUNCTIONS[function]
    random = torch.Generator().manual_seed(seed64(seed, purpose="rnn inputs"))
    results = [
        torch.randn(B, T, len(what.inputs), N, D, generator=random),
        torch.randn(what.products, N, D, D, generator=random) / D**0.5,
        0.3 * torch.randn(len(what.gates), N, D, generator=random),
        torch.zeros(len(what.states), B, 1, N, D),
    ]
    return [one.to(dtype).requires_grad_() for one in results]


def train_step(given: list[Tensor], function: str, backend: str) -> Callable[[], None]:
    """Forward and backward of one call; the gradient of every output is given."""
    wx, R, b, states = given
    dh = torch.ones(*wx.shape[:2], *wx.shape[3:], device=wx.device)

    def run() -> None:
        out, _ = rnn(wx, R, b, states, function, backend, outputs="hidden")
        torch.autograd.grad(out, given, dh)
        if dh.is_cuda:
            torch.cuda.synchronize()

    return run


def compiled_loop(given: list[Tensor], function: str) -> Callable[[], None]:
    """The loop with its step compiled by ``torch.compile``."""
    what = FUNCTIONS[function]
    step: Any = torch.compile(what.step, dynamic=False)
    wx, R, b, states = given
    gates, heads, units, _ = R.shape

    def run() -> None:
        matrix = R.permute(1, 3, 0, 2).reshape(heads, units, gates * units)
        now, result = states[:, :, 0], []
        for inputs_t in wx.unbind(1):
            product = torch.bmm(now[0].transpose(0, 1), matrix).view(heads, -1, gates, units)
            now = step(inputs_t, product.permute(1, 2, 0, 3), b, now)
            result.append(now[0])
        out = torch.stack(result, 1)
        torch.autograd.grad(out, given, torch.ones_like(out))

    return run


def one_head(
    B: int, T: int, D: int, *, seed: int, backend: str = "fused"
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer of one head, ours and ``torch.nn.LSTM``: input products too, both directions."""
    torch.manual_seed(seed64(seed, purpose="one head") % 2**32)
    theirs: Any = nn.LSTM(D, D, batch_first=True)
    x = torch.randn(B, T, D, requires_grad=True)
    with torch.no_grad():
        weight = theirs.weight_ih_l0.clone().requires_grad_()
        R = theirs.weight_hh_l0.view(4, 1, D, D).clone().requires_grad_()
        b = (theirs.bias_ih_l0 + theirs.bias_hh_l0).view(4, 1, D).clone().requires_grad_()
    d_out = torch.ones(B, T, D)
    weights = list(theirs.parameters())

    def ours() -> None:
        wx = F.linear(x, weight).view(B, T, 4, 1, D)
        out, _ = rnn(wx, R, b, function="lstm", backend=backend, outputs="hidden")
        torch.autograd.grad(out.view(B, T, D), (x, weight, R, b), d_out)

    def peer() -> None:
        out, _ = theirs(x)
        torch.autograd.grad(out, (x, *weights), d_out)

    return ours, peer


def wrong(
    backend: str, shapes: list[tuple[str, int, int, int, int]], *, seed: int, tolerance: float
) -> int:
    """Shapes whose outputs or gradients are not those of the loop in fp64.

    Args:
        backend: what is checked.
        shapes: (function, B, T, N, D).
        seed: of the numbers.
        tolerance: largest error, as a share of 1 + the largest number.
    """
    total = 0
    for index, (function, *sizes) in enumerate(shapes):
        B, T, N, D = sizes
        given = inputs(function, B, T, N, D, seed=seed + index)
        exact = [one.detach().double().requires_grad_() for one in given]
        wx, R, b, states = given
        every, _ = rnn(wx, R, b, states, function, backend)
        wanted = loop(function, *exact)
        weight = torch.linspace(-1, 1, every.numel()).view(every.shape)
        pairs = [(every, wanted)]
        pairs += zip(
            torch.autograd.grad(every, given, weight),
            torch.autograd.grad(wanted, exact, weight.double()),
            strict=True,
        )
        total += any(
            float(((a.double() - b).abs().max() / (1 + b.abs().max())).detach()) > tolerance
            for a, b in pairs
        )
    return total


@dataclass(frozen=True)
class Parity:
    """What a model learnt.

    Args:
        right: for every tested sequence, 1 if the answer at its last position is right.
        parameters: of the model.
        loss: of the last steps of training.
    """

    right: tuple[float, ...]
    parameters: int
    loss: float


def _bits(seed: int, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    source = generator(seed, purpose="parity", step=step)
    bits = torch.from_numpy(source.integers(0, 2, (batch, length)))
    return bits, bits.cumsum(1) % 2


def _model(name: str, hidden: int, heads: int, seed: int, length: int) -> nn.Module:
    torch.manual_seed(seed64(seed, purpose=f"parity {name}") % 2**32)
    if name != "transformer":
        return RecurrentModel(2, hidden, 1, heads, name)
    # As many weights, in two layers: one cannot even look at what another position has seen.
    width = hidden * 5 // 8
    config = ModelConfig(
        vocab_size=2,
        hidden=width,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=width // 4,
        ffn_hidden=width * 13 // 5,
        max_position=length,
    )
    model = Transformer(config)
    init_weights(model, seed)
    return model


def learn_parity(
    name: str,
    *,
    steps: int,
    seed: int,
    hidden: int = 64,
    heads: int = 1,
    batch: int = 64,
    longest: int = 40,
    length: int = 256,
    tested: int = 512,
    rate: float = 3e-3,
    progress: Callable[[float], None] | None = None,
) -> Parity:
    """Train on sequences of up to ``longest`` bits, test on ``length``.

    Args:
        name: a recurrent function, or transformer.
        steps: of training.
        seed: of weights and bits.
        hidden: width of the recurrent model.
        heads: of it.
        batch: sequences of a step, of one length.
        longest: bits of a training sequence at most.
        length: bits of a tested sequence.
        tested: sequences.
        rate: peak learning rate.
        progress: called with the share done.
    """
    model = _model(name, hidden, heads, seed, length)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    losses = []

    def logits(bits: Tensor) -> Tensor:
        out = model(bits)
        logits: Tensor = out[0] if isinstance(out, tuple) else out
        return logits

    for step in range(steps):
        size = int(generator(seed, purpose="length", step=step).integers(2, longest + 1))
        bits, odd = _bits(seed, step, batch, size)
        loss = F.cross_entropy(logits(bits).flatten(0, 1), odd.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if progress is not None and step % 50 == 0:
            progress(step / steps)
    bits, odd = _bits(seed + 1, 0, tested, length)
    with torch.no_grad():
        joined = torch.cat([logits(part)[:, -1].argmax(-1) for part in torch.split(bits, 64)])
    right = (joined == odd[:, -1]).double()
    return Parity(
        tuple(right.tolist()),
        sum(one.numel() for one in model.parameters()),
        float(torch.stack(losses[-20:]).mean()),
    )
