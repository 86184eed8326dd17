"""Mini-models of bytes that the claims of architectures train, all on the same tokens.

Python's standard library, every tenth module held out. Batches follow from seed and step alone.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.experiments.tiny import llama
from shoal.core.random import generator

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

_WARM = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Optimizer steps, sequences of a step, bytes of a sequence, and the peak learning rate."""

    steps: int
    batch: int = 16
    length: int = 128
    lr: float = 3e-3


@dataclass(frozen=True)
class ModuleText:
    """Bytes, uint8, of modules that are trained on, and of others."""

    train: np.ndarray
    heldout: np.ndarray


@functools.cache
def text(folder: Path | None = None) -> ModuleText:
    """The standard library's modules, or the Python files of a folder."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.glob("*.py")) if path.stat().st_size > 4000]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, path in enumerate(files):
        parts[number % 10 == 9].append(path.read_bytes()[:60_000])
    train, rest = (np.frombuffer(b"\n".join(some), np.uint8) for some in parts)
    return ModuleText(train, rest)


def mini(hidden: int, layers: int, *, ffn: int = 0, **changes: Any) -> ModelConfig:
    """The configuration of a mini-model of bytes."""
    wide: dict[str, Any] = {"name": "mini", "head_dim": 32, "tied": True, **changes}
    return llama(hidden, layers, max(1, hidden // 32), ffn=ffn, **{"length": 512, **wide})


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the sequences that begin there, int64 [B, T]."""
    import torch

    rows = np.stack([data[at : at + length + 1] for at in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1], both[:, 1:]


def batch(data: np.ndarray, recipe: Recipe, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, int64 [B, T]."""
    source = generator(seed, purpose="architecture batch", step=step)
    starts = source.integers(0, len(data) - recipe.length - 1, recipe.batch)
    return windows(data, starts, recipe.length)


def train(
    model: Transformer,
    data: np.ndarray,
    recipe: Recipe,
    seed: int,
    *,
    first: int = 0,
    parameters: Iterable[nn.Parameter] | None = None,
    loss: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    rate: Callable[[float], float] | None = None,
    faster: Mapping[str, float] | None = None,
) -> Transformer:
    """Train a model, in bf16 where autocast has it.

    Args:
        model: with its weights; is changed.
        data: what it is trained on.
        recipe: how.
        seed: of the batches.
        first: number of the first step, for text that follows that of another training.
        parameters: what is trained; all, if not given.
        loss: mean loss of inputs, targets and step; that of the next byte, if not given.
        rate: learning rate over its peak where a share of the steps is done, behind the first
            steps; half a cosine down to a twentieth, if not given.
        faster: part of a parameter's name -> how many times as fast it learns, without decay.
    """
    import torch

    some = list(model.parameters() if parameters is None else parameters)
    optimizer = torch.optim.AdamW(
        _groups(model, some, faster or {}), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in some:
        parameter.requires_grad_(True)
    model.train()
    for step in range(recipe.steps):
        scale = min(1.0, (step + 1) / _WARM) * (rate or _cosine)(step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * scale * group["faster"]
        inputs, targets = batch(data, recipe, seed, first + step)
        with torch.autocast("cpu", torch.bfloat16):
            if loss is None:
                value = model.loss_sum(inputs, targets) / targets.numel()
            else:
                value = loss(inputs, targets, step)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(some, 1.0)
        optimizer.step()
    return model.eval()


def _cosine(done: float) -> float:
    return 0.05 + 0.475 * (1 + math.cos(math.pi * done))


def _groups(
    model: Transformer, some: Sequence[nn.Parameter], faster: Mapping[str, float]
) -> list[dict[str, Any]]:
    """What learns at the recipe's rate, and what learns so many times as fast."""
    values: dict[int, float] = {
        id(parameter): times
        for name, parameter in model.named_parameters()
        for part, times in faster.items()
        if part in name
    }
    groups: list[dict[str, Any]] = [{"params": [p for p in some if id(p) not in values]}]
    groups[0]["faster"] = 1.0
    for times in sorted({*values.values()}):
        quick = [parameter for parameter in some if values.get(id(parameter)) == times]
        groups.append({"params": quick, "faster": times, "weight_decay": 0.0})
    return groups


def heldout(model: Transformer, data: np.ndarray, recipe: Recipe, rows: int = 256) -> float:
    """Mean loss in nats a byte, of evenly spaced sequences."""
    import torch

    starts = np.linspace(0, len(data) - recipe.length - 2, rows).astype(np.int64)
    total = 0.0
    with torch.no_grad():
        for some in np.array_split(starts, max(1, rows // 64)):
            total += float(model.loss_sum(*windows(data, some, recipe.length)))
    return total / (rows * recipe.length)
