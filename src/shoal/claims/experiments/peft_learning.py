"""What claim [66] PEFT trains: a mini-model on documentation, and copies of it on another domain.

One held-out part chooses the learning rate and the step to stop at, another judges.
"""

from __future__ import annotations

import copy
import json
import os
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.experiments.arch_training import windows
from shoal.claims.experiments.tiny import llama
from shoal.core.parts import table
from shoal.core.random import generator

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.claims.experiments.peft import PeftClaim
    from shoal.model.transformer import Transformer

FULL = "full"
"""Name of tuning that trains all weights."""

_CHOOSE_ROWS, _TEST_ROWS = 64, 256
_WARM = 20
# Steps from one look at the part that chooses to the next.
_EVERY = 40
_BASE, _DATA = "base.safetensors", "{}.npy"


def mini_model(setting: PeftClaim, seed: int) -> Transformer:
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


def texts(folder: Path | None) -> dict[str, np.ndarray]:
    """Bytes, uint8: documentation of installed packages, ``prose``, and the parts of a domain.

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
        rows = [json.loads(line) for line in problems.read_text().splitlines()]
        documents = [f"{row['question']}\n{row['answer']}\n".encode() for row in rows]
    else:
        source = Path(sysconfig.get_paths()["stdlib"])
        modules = [path for path in sorted(source.glob("*.py")) if path.stat().st_size > 4000]
        documents = [path.read_bytes()[:60_000] for path in modules]
    assigned = {
        "prose": prose,
        "train": [text for n, text in enumerate(documents) if n % 10 < 8],
        "choose": documents[8::10],
        "test": documents[9::10],
    }
    return {name: np.frombuffer(b"\n".join(some), np.uint8) for name, some in assigned.items()}


def _loss(setting: PeftClaim, model: Transformer, data: np.ndarray, most: int) -> float:
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
    setting: PeftClaim,
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
        if look is not None and ((step + 1) % _EVERY == 0 or step + 1 == steps):
            look(step + 1)


def make_base(setting: PeftClaim, parts: Mapping[str, np.ndarray], place: Path, seed: int) -> float:
    """Train the base and leave it and the texts for :func:`tune`; its loss, nats a byte."""
    from safetensors.torch import save_file

    model = mini_model(setting, seed)
    how: dict[str, Any] = {"steps": setting.pretrain, "lr": 3e-3, "seed": seed}
    _train(setting, model, list(model.parameters()), parts["prose"], **how)
    save_file({name: value.detach() for name, value in model.named_parameters()}, place / _BASE)
    for name, text in parts.items():
        np.save(place / _DATA.format(name), text)
    return _loss(setting, model, parts["test"], _TEST_ROWS)


def tune(
    place: Path,
    setting: PeftClaim,
    method: str,
    options: Mapping[str, Any],
    lr: float,
    seed: int,
) -> tuple[float, float]:
    """Tune a copy of the base that lies in a directory, on one thread.

    Returns the losses of the best step, of the part that chooses and of the one that judges.
    """
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    data = {name: np.load(place / _DATA.format(name)) for name in ("train", "choose", "test")}
    model = mini_model(setting, 0)
    model.load_state_dict(load_file(place / _BASE), strict=False)
    handle: Any = None
    trained = list(model.parameters())
    if method != FULL:
        handle = table("peft").build({"name": method, **options}).inject(model, seed=seed)
        trained = list(handle.trainable().values())
    best: tuple[float, Any] = float("inf"), model.state_dict()

    def look(step: int) -> None:
        nonlocal best
        choose = _loss(setting, model, data["choose"], _CHOOSE_ROWS)
        if choose < best[0]:
            best = choose, copy.deepcopy(model.state_dict())

    how: dict[str, Any] = {"steps": setting.steps, "lr": lr, "seed": seed}
    _train(setting, model, trained, data["train"], **how, handle=handle, look=look)
    model.load_state_dict(best[1])
    return best[0], _loss(setting, model, data["test"], _TEST_ROWS)
