"""Short trainings that say which method learns most, and a search that halves its candidates.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter
Optimization, 2016 (successive halving); Zhou et al., AutoPEFT: Automatic Configuration Search for
Parameter-Efficient Fine-Tuning, 2023 (where, which and how large).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ModelError, require
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.train.optimizers.eager import EagerAdamW

_BATCH = 8
_LR = 5e-3
_HELD = 4


@dataclass(frozen=True)
class CandidateResult:
    """How far a candidate came.

    Args:
        method: with its options.
        gain: how much held-out loss fell in its last training, nats a token.
        steps: of that.
    """

    method: Choice
    gain: float
    steps: int


def candidates(
    which: Sequence[str] = ("lora", "dora", "krona"),
    where: Sequence[str] = ("*.q_proj|*.v_proj", "*.self_attn.*", "*.mlp.*", "*_proj"),
    ranks: Sequence[int] = (2, 4, 8),
) -> list[Choice]:
    """Every method at every place and rank; those without a rank once."""
    candidates = []
    for name, targets in itertools.product(which, where):
        options = {"targets": targets}
        if hasattr(table("peft").load(name), "r"):
            candidates += [Choice(name=name, options={**options, "r": r}) for r in ranks]
        else:
            candidates.append(Choice(name=name, options=options))
    return candidates


def probe(
    directory: Path,
    methods: Sequence[Choice],
    *,
    steps: int = 50,
    seq_len: int = 128,
    seed: int = 0,
    data: Choice | str = "stdlib",
) -> dict[str, float]:
    """How much held-out loss falls in some steps of each method, in nats a token.

    Args:
        directory: the model, with its tokenizer.
        methods: what is tried, of different names.
        steps: of each.
        seq_len: tokens of a sequence.
        seed: of batches and methods.
        data: the corpus.

    Raises:
        ModelError: the directory has no tokenizer.
    """
    gain = _trainer(directory, seq_len, seed, data)
    return {method.name: gain(method, steps) for method in methods}


def search(
    directory: Path,
    methods: Sequence[Choice],
    *,
    steps: int = 10,
    seq_len: int = 128,
    seed: int = 0,
    data: Choice | str = "stdlib",
) -> list[CandidateResult]:
    """Candidates by successive halving: the better half goes on with twice the steps.

    Returns:
        All of them, the best first: those that came as far by what they gained.

    Raises:
        ModelError: the directory has no tokenizer.
        ConfigError: there is nothing to choose from.
    """
    require(len(methods) >= 1, "methods", len(methods), expected="at least one")
    gain = _trainer(directory, seq_len, seed, data)
    left = list(methods)
    out: list[CandidateResult] = []
    while True:
        tried = [CandidateResult(method, gain(method, steps), steps) for method in left]
        tried.sort(key=lambda one: -one.gain)
        keep = (len(tried) + 1) // 2 if len(tried) > 1 else 0
        out = tried[keep:] + out
        left = [one.method for one in tried[:keep]]
        if len(left) < 2:
            return tried[:keep] + out
        steps *= 2


def _trainer(
    directory: Path, seq_len: int, seed: int, data: Choice | str
) -> Callable[[Choice, int], float]:
    """Method and steps -> what it gains, from the model of a directory each time."""
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface

    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer}: missing; a probe needs the model's own tokenizer")
    config = huggingface.read_config(directory)
    result = prepare(data, str(tokenizer), config.vocab_size)

    def rows(split: str, step: int) -> torch.Tensor:
        part = result.train if split == "train" else result.heldout
        random = generator(seed, purpose=f"probe {split}", step=step)
        starts = random.integers(0, int(part.offsets[-1]) - seq_len - 1, _BATCH)
        picked = np.empty((_BATCH, seq_len + 1), dtype=np.int64)
        for row, start in zip(picked, starts, strict=True):
            part.read(int(start), row)
        return torch.from_numpy(picked)

    def loss(model: torch.nn.Module, both: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model.loss_sum(both[:, :-1], both[:, 1:])  # type: ignore[operator]
        return made / both[:, 1:].numel()

    def gain(method: Choice, steps: int) -> float:
        model = huggingface.read(directory, torch.float32, packed=False).train()
        held = [rows("heldout", number) for number in range(_HELD)]

        def judged() -> float:
            with torch.no_grad():
                return sum(loss(model, both).item() for both in held) / _HELD

        before = judged()
        handle = table("peft").build(method, where="finetune").inject(model, seed=seed)
        optimizer = EagerAdamW(list(handle.trainable().values()), lr=_LR, weight_decay=0.0)
        if handle.looks:
            handle.look(
                lambda n: torch.autograd.backward(loss(model, rows("train", n))), lambda x: None
            )
        for step in range(steps):
            handle.before_step(step, steps)
            value = loss(model, rows("train", step))
            penalty = handle.penalty()
            optimizer.zero_grad()
            torch.autograd.backward(value if penalty is None else value + penalty)
            handle.before_update(step, steps)
            optimizer.step()
            handle.after_update(step, steps)
        model.eval()
        return before - judged()

    return gain
