"""Training the routers of a model with feed-forward layers of two sizes, with all else frozen.

A model that was trained on random routes knows every pattern; what is left is who goes where.
Routers learn from samples with a straight-through gradient, and are held to a budget: the expected
share of the all-big model's feed-forward operations. What has to be taken from the scores of dear
routes to spend another share is measured afterwards and kept with the model, so that a served
request can ask for one.

Shapes: B sequences, T tokens, N = B T, L layers.

Source: Alizadeh et al., Duo-LLM, 2024, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ModelError, require
from shoal.core.random import generator
from shoal.model.duo import DuoFFN, computing, router_loss
from shoal.train.optimizers.eager import EagerAdamW

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# Other routes change the states, and with them the scores: the shift is found again from those.
_AGAIN = 3
_WARM = 0.05

Progress = Callable[[str, float], None]


class TokenSequence(Protocol):
    """A long row of tokens."""

    def __len__(self) -> int:
        """How many."""

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill ``out_N`` with the tokens from ``start`` on."""


def samples(tokens: TokenSequence, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced sequences int64 [B, T], and their next tokens.

    Raises:
        ConfigError: the text is shorter than one sequence.
    """
    require(len(tokens) > length, "text", len(tokens), expected=f"more than {length} tokens")
    both = torch.empty(count, length + 1, dtype=torch.int64)
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
    for row, start in zip(both.numpy(), starts.tolist(), strict=True):
        tokens.read(start, row)
    return both[:, :-1], both[:, 1:]


def train_routers(
    model: Transformer,
    tokens: TokenSequence,
    *,
    budget: float,
    steps: int = 200,
    seq_len: int = 128,
    batch: int = 16,
    lr: float = 1e-2,
    weight: float = 4.0,
    seed: int = 0,
    progress: Progress = lambda text, done: None,
) -> None:
    """Train the routers of ``model``, and nothing else of it, bit for bit.

    Args:
        model: of ``ffn: duo``, in fp32.
        tokens: what is trained on.
        budget: share of the all-big model's feed-forward operations to spend, in (0, 1].
        steps: of the optimizer.
        seq_len: tokens of a sequence.
        batch: sequences of a step.
        lr: the highest learning rate of AdamW.
        weight: of the squared distance to the budget.
        seed: of the order of the text, and of the samples of routes.
        progress: called with (text, share done).

    Raises:
        ConfigError: a number that cannot be.
        ModelError: the model has no routes.
    """
    require(0 < budget <= 1, "routers.budget", budget, expected="a fraction in (0, 1]")
    require(steps >= 1, "routers.steps", steps, expected="at least 1")
    require(batch >= 1, "routers.batch", batch, expected="at least 1")
    require(weight >= 0, "routers.weight", weight, expected="0 or more")
    require(len(tokens) > seq_len, "text", len(tokens), expected=f"more than {seq_len} tokens")
    layers = _duo(model)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    routers = [p.requires_grad_(True) for layer in layers for p in layer.router.parameters()]
    optimizer = EagerAdamW(routers, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    source = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        done = step / steps
        rate = min(1.0, (done + 1 / steps) / _WARM) * (
            0.05 + 0.475 * (1 + math.cos(math.pi * done))
        )
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        starts = generator(seed, purpose="routers", step=step).integers(
            0, len(tokens) - seq_len, batch
        )
        data = torch.empty(batch, seq_len + 1, dtype=torch.int64)
        for row, start in zip(data.numpy(), starts.tolist(), strict=True):
            tokens.read(start, row)
        with torch.autocast("cpu", torch.bfloat16):
            loss = router_loss(
                model, data[:, :-1], data[:, 1:], budget=budget, weight=weight, source=source
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        progress(f"training routers, loss {float(loss.detach()):.3f}", done)
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name])


def _duo(model: Transformer) -> list[DuoFFN]:
    results = [module for module in model.modules() if isinstance(module, DuoFFN)]
    require(
        bool(results),
        "routers",
        model.config.name,
        expected="a model of ffn = duo",
        hint="train one with architecture: {ffn: duo}, or convert with --architecture ffn=duo",
        error=ModelError,
    )
    return results


@torch.no_grad()
def _scores(model: Transformer, tokens_BT: Tensor, shift: float) -> Tensor:
    """What routers say [L, N, 3] of these sequences, on the routes that follow with a shift."""
    seen: list[Tensor] = []
    hooks = [
        layer.router.register_forward_hook(
            lambda _m, _i, out: seen.append(out.float().reshape(-1, out.shape[-1]))
        )
        for layer in _duo(model)
    ]
    try:
        with computing(model, torch.tensor(shift)):
            model.hidden(tokens_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen)


def _spent(scores_LN3: Tensor, costs_3: Tensor, shift: float) -> float:
    return float(costs_3[(scores_LN3 - shift * costs_3).argmax(-1)].mean())


@torch.no_grad()
def calibrate(model: Transformer, tokens_BT: Tensor) -> tuple[tuple[float, float], ...]:
    """Shares of the all-big computation, and what is taken from the scores to spend each.

    Args:
        model: whose routers were trained; not in training.
        tokens_BT: text that they were not trained on.

    Returns:
        For ``ffn.shifts``: shares as they were measured, rising.

    Raises:
        ModelError: the model has no routes, or routes by chance.
    """
    layers = _duo(model)
    require(
        model.config.architecture.ffn.router != "random",
        "ffn.router",
        "random",
        expected="linear or fixed: chance has no scores",
        error=ModelError,
    )
    costs = torch.tensor(layers[0].costs)
    values: dict[float, float] = {}
    shift = 0.0
    for share in reversed(_SHARES):
        for _ in range(_AGAIN):
            scores = _scores(model, tokens_BT, shift)
            shift = _shift_for(scores, costs, share)
        spent = _spent(_scores(model, tokens_BT, shift), costs, shift)
        # Shifts rise as shares fall; a share not distinguishable from the last one is left out.
        if spent > 0 and all(spent < other and shift > values[other] for other in values):
            values[spent] = shift
    return tuple(sorted(values.items()))


def _shift_for(scores_LN3: Tensor, costs_3: Tensor, share: float) -> float:
    """The shift with which routes of these scores spend a share."""
    gap = costs_3[costs_3 > 0].min()
    low, high = (sign * float(2 * scores_LN3.abs().max() / gap + 1) for sign in (-1, 1))
    for _ in range(40):
        middle = (low + high) / 2
        if _spent(scores_LN3, costs_3, middle) >= share:
            low = middle
        else:
            high = middle
    return low


def take_routers(model: Transformer, directory: Path) -> None:
    """Put the routers of another model's directory into ``model``.

    Raises:
        ModelError: they are of another number of layers or another width, or there are none.
    """
    from shoal.model import huggingface

    config = huggingface.read_config(directory)
    own = model.config
    require(
        config.architecture.ffn.duo,
        "routers",
        str(directory),
        expected="a directory of a model of ffn = duo",
        error=ModelError,
    )
    for what, theirs, ours in (
        ("layers", config.num_layers, own.num_layers),
        ("width", config.hidden, own.hidden),
    ):
        require(
            theirs == ours,
            f"routers of {directory}: {what}",
            theirs,
            expected=f"{ours}, as {own.name} has: there is one router a layer",
            error=ModelError,
        )
    state = huggingface.read(directory, torch.float32).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".router." in name:
                parameter.copy_(state[name])


def routers_directory(
    directory: Path,
    out: Path,
    *,
    budget: float,
    data: Any = "stdlib",
    steps: int = 200,
    seq_len: int = 128,
    batch: int = 16,
    lr: float = 1e-2,
    weight: float = 4.0,
    seed: int = 0,
    progress: Progress = lambda text, done: None,
) -> tuple[tuple[float, float], ...]:
    """Train the routers of a model directory, and write a new one that can compute any share.

    Args:
        directory: of a model of ``ffn: duo``, with its tokenizer.
        out: the new one.
        budget: see :func:`train_routers`; so are the others.
        data: a corpus.
        steps: of the optimizer.
        seq_len: tokens of a sequence.
        batch: sequences of a step.
        lr: the highest learning rate.
        weight: of the squared distance to the budget.
        seed: of text and samples.
        progress: called with (text, share done).

    Returns:
        The shares that were measured on held-out text, and their shifts.

    Raises:
        ModelError: the directory cannot be read, or has no tokenizer or routes.
        ConfigError: a number that cannot be.
    """
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface
    from shoal.model.architecture import changed

    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer}: not found; copy the model's tokenizer there")
    if out.exists():
        raise ModelError(f"{out}: exists already; choose another name or remove it first")
    model = huggingface.read(directory, torch.float32)
    dtype = huggingface.read(directory).embed.weight.dtype
    _duo(model)
    text = prepare(data, str(tokenizer), model.config.vocab_size)
    length = min(seq_len, model.config.max_position - 1)
    architecture = model.config.architecture
    chosen = architecture.ffn.model_copy(update={"router": "linear", "shifts": ()})
    model.config = changed(model.config, architecture.model_copy(update={"ffn": chosen}))
    for layer in _duo(model):
        layer.fixed = False
    train_routers(
        model, text.train, budget=budget, steps=steps, seq_len=length, batch=batch, lr=lr,
        weight=weight, seed=seed, progress=progress,
    )  # fmt: skip
    progress("measuring shares", 1.0)
    shifts = calibrate(model, samples(text.heldout, 8, length)[0])
    known = chosen.model_copy(update={"shifts": shifts})
    model.config = changed(model.config, architecture.model_copy(update={"ffn": known}))
    huggingface.write(out, model.to(dtype), directory)
    return shifts
