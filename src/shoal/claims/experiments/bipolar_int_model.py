"""The mini-model of the claim bipolar_int: finetuned to few bits, and scored by the kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.claims.experiments.tiny import corpus_of
from shoal.corpora.heldout import heldout_chunks
from shoal.corpora.tokens import prepare
from shoal.kernel.formats import weight_format
from shoal.model.huggingface import read
from shoal.model.lowbit import LowBitLinear
from shoal.model.transformer import Transformer
from shoal.train import zoo
from shoal.train.qat import finetune, matrices

__all__ = ["ScoredModel"]

_CONTEXT = 256
_SCORED_TOKENS = 40_000


class ScoredModel:
    """A model and its held-out loss.

    Args:
        model: a name of the zoo, or a directory.
        data: the user's own text; None for the default corpus.
        progress: called with (text, share done).
    """

    def __init__(
        self, model: str, data: Path | None, progress: Callable[[str, float], None]
    ) -> None:
        progress(f"training {model}, unless that was done before", 0.6)
        ours = model in zoo.names()
        place = zoo.trained(model) if ours else Path(model)
        self.model = read(place, torch.float32)
        tokenizer = "bpe" if ours and data is None else str(place)
        self.tokens = prepare(corpus_of(data), tokenizer, self.model.config.vocab_size)
        self.loss = self._loss(self.model)

    @torch.no_grad()
    def _loss(self, model: Transformer) -> float:
        """Nats a held-out token."""
        model.eval()
        total = counted = 0.0
        for batch in heldout_chunks(
            self.tokens.heldout, context=_CONTEXT, batch_tokens=4096, max_tokens=_SCORED_TOKENS
        ):
            data = torch.from_numpy(batch.tokens)
            scored = torch.from_numpy(batch.scored)
            targets = data[:, 1:].masked_fill(~scored, -100)
            total += float(model.loss_sum(data[:, :-1], targets))
            counted += float(scored.sum())
        return total / counted

    def few_bits(
        self,
        weights: str,
        activations: str,
        *,
        seconds: float | None,
        seed: int,
        progress: Callable[[str, float], None],
    ) -> float:
        """Nats a held-out token with products of few bits in all blocks.

        Args:
            weights: their format.
            activations: what inputs are rounded to.
            seconds: of finetuning; None to round and leave it.
            seed: of the order of the text.
            progress: called with (text, share done).
        """
        model = copy.deepcopy(self.model)
        if seconds is None:
            fmt = weight_format(weights)
            codes = {
                f"{name}.weight": fmt.quantize(linear.weight)
                for name, linear in matrices(model).items()
            }
        else:
            codes = finetune(
                model, weights, activations, self.tokens.train, seconds=seconds, seed=seed,
                progress=lambda text, done: progress(text, 0.6 + 0.4 * done),
            )  # fmt: skip
        for name, linear in matrices(model).items():
            owner, _, last = name.rpartition(".")
            low = LowBitLinear.from_packed(
                codes[f"{name}.weight"], linear.bias, activations=activations
            )
            setattr(model.get_submodule(owner), last, low)
        return self._loss(model)
