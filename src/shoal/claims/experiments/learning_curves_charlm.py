"""Character language models for learning curves: an LSTM and a Transformer of four widths.

A shard is the beginning of one stream of shuffled documents; validation text is of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.parts import Choice, table
from shoal.core.random import generator, seed64

if TYPE_CHECKING:
    from torch import Tensor, nn

ARCHITECTURES = ("lstm", "transformer")
# Printable ASCII, newline and tab; everything else is one character.
VOCAB = 98
CONTEXT = 64
BATCH = 32


@dataclass(frozen=True)
class CharlmTexts:
    """Characters as uint8, and the names of the documents of each stream."""

    train: np.ndarray
    heldout: np.ndarray
    train_names: frozenset[str]
    heldout_names: frozenset[str]


def _encode(text: str) -> np.ndarray:
    raw = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
    table_256 = np.full(256, VOCAB - 1, dtype=np.uint8)
    table_256[32:127] = np.arange(95)
    table_256[10], table_256[9] = 95, 96
    return table_256[raw]


def _stream(documents: Iterable[Any], length: int, seed: int) -> tuple[np.ndarray, frozenset[str]]:
    """The first ``length`` characters of the documents in a shuffled order."""
    items = sorted(documents, key=lambda document: document.name)
    order = generator(seed, purpose="learning_curves.documents").permutation(len(items))
    pieces, names, total = [], [], 0
    for i in order:
        if total >= length:
            break
        # Long documents are cut, so that no shard is one document.
        piece = _encode(items[i].text[:8192])
        pieces.append(piece)
        names.append(items[i].name)
        total += len(piece)
    if total < length:
        raise DataError(
            f"data: {total:,} characters; the learning curve needs {length:,}; give more text"
        )
    return np.concatenate(pieces)[:length], frozenset(names)


def read_texts(data: Choice, *, train_chars: int, heldout_chars: int, seed: int) -> CharlmTexts:
    """Training and validation text of a corpus, of different documents.

    Raises:
        DataError: the corpus is too small.
    """
    corpus = table("corpus").build(data)
    train, train_names = _stream(corpus.documents("train"), train_chars, seed)
    heldout, heldout_names = _stream(corpus.documents("heldout"), heldout_chars, seed)
    return CharlmTexts(train, heldout, train_names, heldout_names)


@dataclass(frozen=True)
class CharlmSetting:
    """One run: ``chars`` of the shard, at most ``steps``, AdamW's ``lr``."""

    architecture: str
    width: int
    chars: int
    seed: int
    lr: float
    steps: int


def _model(setting: CharlmSetting) -> nn.Module:
    from torch import nn

    width = setting.width

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, width)
            self.core = nn.LSTM(width, width, batch_first=True)
            self.out = nn.Linear(width, VOCAB)

        def forward(self, tokens_BT: Tensor) -> Tensor:
            logits: Tensor = self.out(self.core(self.embed(tokens_BT))[0])
            return logits

    if setting.architecture == "lstm":
        return Lstm()
    from shoal.claims.experiments.tiny import llama
    from shoal.model.transformer import Transformer

    heads = max(1, width // 32)
    return Transformer(llama(width, 2, heads, vocab=VOCAB, ffn=2 * width, length=CONTEXT))


def train(setting: CharlmSetting, texts: CharlmTexts) -> tuple[float, int]:
    """Best validation loss in nats a character, and the model's parameters."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(seed64(setting.seed, purpose="learning_curves.weights"))
    model = _model(setting)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, weight_decay=0.01)
    shard = texts.train[: setting.chars]
    windows = len(texts.heldout) // (CONTEXT + 1)
    held = torch.from_numpy(
        texts.heldout[: windows * (CONTEXT + 1)].reshape(windows, CONTEXT + 1).astype(np.int64)
    )
    every = max(20, setting.steps // 10)
    best, worse = math.inf, 0

    def loss_of(rows_BT: Tensor) -> Tensor:
        logits = model(rows_BT[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows_BT[:, 1:].flatten())

    for step in range(1, setting.steps + 1):
        random = generator(setting.seed, purpose="learning_curves.batch", step=step)
        starts = random.integers(0, len(shard) - CONTEXT - 1, BATCH)
        rows = shard[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
        warm = min(1.0, step / 20)
        for group in optimizer.param_groups:
            left = 1 - (step - 1) / setting.steps
            group["lr"] = setting.lr * warm * (0.1 + 0.9 * left)
        optimizer.zero_grad()
        loss_of(torch.from_numpy(rows)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == setting.steps:
            with torch.no_grad():
                parts = [float(loss_of(part)) * len(part) for part in torch.split(held, 128)]
            now = sum(parts) / len(held)
            worse = 0 if now < best else worse + 1
            best = min(best, now)
            if worse >= 2:
                break
    return best, count
