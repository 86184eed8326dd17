"""What a mini-model has learned, source by source of its text, beside a bigram model of it.

A model that knows no more than which token follows which is of no use where decoding is
measured: whatever it says is easily guessed, or a loop.

Shapes: V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from shoal.core.config import Value
from shoal.core.errors import ShoalError
from shoal.core.parts import Choice
from shoal.core.traits import traits
from shoal.corpora import CORPORA
from shoal.corpora.heldout import heldout_chunks
from shoal.corpora.tokens import TokenSet, TokenSplit
from shoal.model import huggingface

# A target of decoding is so many nats a token better than a bigram model.
MARGIN = 0.3

_CONTEXT = 512
_BATCH_TOKENS = 4096
_READ = 2**20


class HeldOutLosses(Value):
    """Held-out losses in nats a token.

    Args:
        model: source -> loss of the model; ``all`` is the whole.
        bigram: source -> loss of a bigram model of the same training text.
    """

    model: dict[str, float]
    bigram: dict[str, float]

    def lines(self) -> list[str]:
        """A line for each source."""
        return [
            f"{source}: {loss:.3f} nats a token held out; a bigram model {self.bigram[source]:.3f}"
            for source, loss in self.model.items()
        ]

    def check(self, name: str) -> None:
        """Refuse a target that has learned too little.

        Raises:
            ShoalError: it is not so much better than a bigram model.
        """
        gap = self.bigram["all"] - self.model["all"]
        if gap < MARGIN:
            raise ShoalError(
                f"{name}: {self.model['all']:.3f} nats a token held out, {gap:.3f} below a bigram "
                f"model; speculation on it would measure nothing; a gap of {MARGIN} is wanted"
            )


def learned(
    directory: Path, tokens: TokenSet, data: Choice, *, max_tokens: int = 60_000
) -> HeldOutLosses:
    """Score a model on what its training held out.

    Args:
        directory: of the model.
        tokens: of its corpus.
        data: that corpus; where it is mixed, its sources are scored separately.
        max_tokens: about how many tokens are scored.
    """
    names = [document.name for document in CORPORA.build(data).documents("heldout")]
    mixed = "several_sources" in traits("corpus", data)
    sources = [name.partition("/")[0] if mixed else data.name for name in names]
    model = huggingface.read(directory, torch.bfloat16).eval()
    pairs = _Bigram(tokens.train, tokens.vocab_size)
    sums: dict[str, np.ndarray] = {}
    for batch in heldout_chunks(
        tokens.heldout, context=_CONTEXT, batch_tokens=_BATCH_TOKENS, max_tokens=max_tokens
    ):
        data_BT = torch.from_numpy(batch.tokens)
        with torch.no_grad():
            logits = model(data_BT[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), data_BT[:, 1:].flatten(), reduction="none")
        own = loss.view(batch.scored.shape).numpy()
        other = pairs(batch.tokens[:, :-1], batch.tokens[:, 1:])
        for row, document in enumerate(batch.documents.tolist()):
            scored = batch.scored[row]
            array = np.array([own[row][scored].sum(), other[row][scored].sum(), scored.sum()])
            for source in (sources[document], "all"):
                sums[source] = sums.get(source, 0.0) + array
    order = [*(source for source in dict.fromkeys(sources) if source in sums), "all"]
    return HeldOutLosses(
        model={source: float(sums[source][0] / sums[source][2]) for source in order},
        bigram={source: float(sums[source][1] / sums[source][2]) for source in order},
    )


class _Bigram:
    """-log p(next | token), of counts that fall back on those of single tokens."""

    def __init__(self, split: TokenSplit, vocab: int) -> None:
        self._vocab = vocab
        self._pairs = np.zeros(vocab * vocab, dtype=np.int64)
        buffer = np.empty(_READ + 1, dtype=np.int64)
        for start in range(0, len(split) - 1, _READ):
            part = buffer[: min(_READ, len(split) - 1 - start) + 1]
            split.read(start, part)
            np.add.at(self._pairs, part[:-1] * vocab + part[1:], 1)
        self._next = self._pairs.reshape(vocab, vocab).sum(0) + 1.0
        self._next /= self._next.sum()
        self._seen = self._pairs.reshape(vocab, vocab).sum(1)

    def __call__(self, token: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Losses of tokens behind others, in nats."""
        # A few imagined tokens of the general kind: about the best number on source code.
        weight = 20.0
        count = self._pairs[token * self._vocab + after]
        array: np.ndarray = -np.log(
            (count + weight * self._next[after]) / (self._seen[token] + weight)
        )
        return array
