"""What claim [66] PEFT trains: a mini-model on documentation, and copies of it on another domain.

Every copy is tuned with the same batches and as many steps, in bf16 where autocast has it. Of what
is held out of the domain one part chooses the learning rate and the step to stop at, and another
judges what was chosen.
"""

from __future__ import annotations

import copy
import json
import os
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.experiments.arch_training import windows
from shoal.claims.experiments.tiny import llama
from shoal.core.parts import table
from shoal.core.random import generator

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.model.transformer import Transformer

__all__ = [
    "FULL",
    "PeftSetting",
    "PeftTexts",
    "TuningLosses",
    "TuningRun",
    "make_base",
    "mini_model",
    "texts",
    "tune",
]

FULL = "full"
"""Name of tuning that trains all weights."""

_CHOOSE_ROWS, _TEST_ROWS = 64, 256
_WARM = 20
_BASE, _DATA = "base.safetensors", "{}.npy"


@dataclass(frozen=True, kw_only=True)
class PeftSetting:
    """Sizes.

    Args:
        hidden: width of the mini-model.
        layers: its blocks.
        pretrain: steps on documentation.
        steps: of each tuning.
        batch: sequences of a step.
        length: bytes of a sequence.
        every: steps from one look at the part that chooses to the next.
    """

    hidden: int
    layers: int
    pretrain: int
    steps: int
    batch: int
    length: int
    every: int = 40


@dataclass(frozen=True, kw_only=True)
class TuningRun:
    """One training of a copy.

    Args:
        method: its name, or ``full``.
        options: of the method.
        lr: peak learning rate.
        seed: of batches and of what the method draws.
    """

    method: str
    options: Mapping[str, Any]
    lr: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class TuningLosses:
    """What came of it, losses in nats a byte.

    Args:
        choose: of the best step, on the part that chooses.
        test: of that step, on the part that judges.
        step: it.
        trained: parameters.
    """

    choose: float
    test: float
    step: int
    trained: int


@dataclass(frozen=True)
class PeftTexts:
    """Bytes of each part, uint8.

    Args:
        domain: what the copies are tuned on, in words.
        parts: ``prose`` for the base; ``train``, ``choose`` and ``test`` of the domain.
    """

    domain: str
    parts: dict[str, np.ndarray]


def mini_model(setting: PeftSetting, seed: int) -> Transformer:
    """A model of bytes with fresh weights."""
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    config = llama(
        setting.hidden, setting.layers, setting.hidden // 64, ffn=4 * setting.hidden,
        length=2 * setting.length, tied=True, initializer_range=0.02,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, seed)
    return model.train()


# ---------------------------------------------------------------------- text


def texts(folder: Path | None) -> PeftTexts:
    """Documentation of installed packages, and a domain.

    The domain is the worded arithmetic of GSM8K where ``folder`` or ``$SHOAL_DATA`` has it, else
    the Python source of the standard library. Of its documents, every tenth chooses and every
    tenth judges.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    names = sorted([*site.rglob("*.md"), *site.rglob("*.rst"), *site.rglob("METADATA")])
    prose = [path.read_bytes()[:60_000] for path in names if path.stat().st_size > 400]
    places = [folder, Path(os.environ["SHOAL_DATA"]) if "SHOAL_DATA" in os.environ else None]
    files = [place / "gsm8k" / "train.jsonl" for place in places if place is not None]
    problems = next((file for file in files if file.is_file()), None)
    if problems is not None:
        domain = "worded arithmetic of GSM8K"
        rows = [json.loads(line) for line in problems.read_text().splitlines()]
        documents = [f"{row['question']}\n{row['answer']}\n".encode() for row in rows]
    else:
        domain = "Python source of the standard library"
        source = Path(sysconfig.get_paths()["stdlib"])
        modules = [path for path in sorted(source.glob("*.py")) if path.stat().st_size > 4000]
        documents = [path.read_bytes()[:60_000] for path in modules]
    assigned = {
        "prose": prose,
        "train": [text for n, text in enumerate(documents) if n % 10 < 8],
        "choose": documents[8::10],
        "test": documents[9::10],
    }
    joined = {name: np.frombuffer(b"\n".join(some), np.uint8) for name, some in assigned.items()}
    return PeftTexts(domain, joined)


def _loss(setting: PeftSetting, model: Transformer, data: np.ndarray, most: int) -> float:
    """Mean over pieces that lie evenly in a text, nats a byte."""
    import torch

    size = setting.length + 1
    pieces = data[: len(data) // size * size].reshape(-1, size)
    chosen = np.linspace(0, len(pieces) - 1, min(most, len(pieces))).astype(int)
    both = torch.from_numpy(pieces[chosen].astype(np.int64))
    was = model.training
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        results = [
            float(model.loss_sum(some[:, :-1], some[:, 1:])) for some in torch.split(both, 64)
        ]
    model.train(was)
    return sum(results) / (len(both) * setting.length)


# ---------------------------------------------------------------------- training


def _train(
    setting: PeftSetting,
    model: Transformer,
    trained: list[nn.Parameter],
    data: np.ndarray,
    *,
    steps: int,
    lr: float,
    seed: int,
    handle: Any = None,
    look: Callable[[int], None] | None = None,
) -> None:
    """Train by AdamW, warm at first, then a cosine to zero; or as a method does without it."""
    import torch

    from shoal.train.peft.run.mezo import ZerothOrder

    def loss(step: int) -> Tensor:
        random = generator(seed, purpose="peft batch", step=step)
        starts = random.integers(0, len(data) - setting.length - 1, setting.batch)
        x, y = windows(data, starts, setting.length)
        with torch.autocast("cpu", torch.bfloat16):
            total: Tensor = model.loss_sum(x, y)
        return total / y.numel()

    optimizer = None
    if not isinstance(handle, ZerothOrder):
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    for step in range(steps):
        now = lr * min(1.0, (step + 1) / _WARM) * 0.5 * (1 + np.cos(np.pi * step / steps))
        if optimizer is None:
            with torch.no_grad():
                handle.estimate(step, lambda step=step: loss(step).item(), now)
        else:
            for group in optimizer.param_groups:
                group["lr"] = now
            if handle is not None:
                handle.before_step(step, steps)
            value = loss(step)
            penalty = None if handle is None else handle.penalty()
            optimizer.zero_grad()
            torch.autograd.backward(value if penalty is None else value + penalty)
            if handle is not None:
                handle.before_update(step, steps)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            if handle is not None:
                handle.after_update(step, steps)
        if look is not None and ((step + 1) % setting.every == 0 or step + 1 == steps):
            look(step + 1)


def make_base(setting: PeftSetting, found: PeftTexts, place: Path, seed: int) -> float:
    """Train the base, and leave it and the texts in a directory for :func:`tune`.

    Returns:
        Its loss on the part that judges, nats a byte.
    """
    from safetensors.torch import save_file

    model = mini_model(setting, seed)
    prose = found.parts["prose"]
    every = list(model.parameters())
    _train(setting, model, every, prose, steps=setting.pretrain, lr=3e-3, seed=seed)
    save_file({name: value.detach() for name, value in model.named_parameters()}, place / _BASE)
    for name, text in found.parts.items():
        np.save(place / _DATA.format(name), text)
    return _loss(setting, model, found.parts["test"], _TEST_ROWS)


def tune(place: Path, setting: PeftSetting, tuning: TuningRun) -> TuningLosses:
    """Tune a copy of the base that lies in a directory, on one thread."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    data = {name: np.load(place / _DATA.format(name)) for name in ("train", "choose", "test")}
    model = mini_model(setting, 0)
    model.load_state_dict(load_file(place / _BASE), strict=False)
    handle: Any = None
    trained = list(model.parameters())
    if tuning.method != FULL:
        part = table("peft").build({"name": tuning.method, **tuning.options})
        handle = part.inject(model, seed=tuning.seed)
        trained = list(handle.trainable().values())
    best: dict[str, Any] = {"choose": float("inf")}

    def look(step: int) -> None:
        choose = _loss(setting, model, data["choose"], _CHOOSE_ROWS)
        if choose < best["choose"]:
            kept = copy.deepcopy(model.state_dict())
            best.update(choose=choose, step=step, kept=kept)

    _train(
        setting,
        model,
        trained,
        data["train"],
        steps=setting.steps,
        lr=tuning.lr,
        seed=tuning.seed,
        handle=handle,
        look=look,
    )
    if "kept" in best:
        model.load_state_dict(best["kept"])
    return TuningLosses(
        choose=best["choose"],
        test=_loss(setting, model, data["test"], _TEST_ROWS),
        step=best.get("step", 0),
        trained=sum(value.numel() for value in trained),
    )
