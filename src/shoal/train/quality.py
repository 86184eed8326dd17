"""How much a model lost when its weights were made few bits.

Source of the measure of agreement: Dutta et al., Accuracy is Not All You Need, 2024 (flips).
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from shoal.core.config import Value
from shoal.core.errors import DataError
from shoal.core.measure import PairedTimes, interleave
from shoal.corpora import heldout
from shoal.corpora.tokens import TokenSplit
from shoal.model.attention import KVCache
from shoal.model.transformer import Transformer

# Logits of so many tokens are in memory at a time, of both models.
_BATCH_TOKENS = 2048
_CONTEXT = 512


class Quality(Value):
    """Two models on the same held-out text.

    Args:
        perplexity: of the model.
        reference: perplexity of the one it is compared with.
        agreement: share of the tokens for which both think the same token most likely.
    """

    tokens: int
    perplexity: float
    reference: float
    agreement: float

    @property
    def rise(self) -> float:
        """By which share the perplexity is higher."""
        return self.perplexity / self.reference - 1


@torch.inference_mode()
def compare(
    model: Transformer, reference: Transformer, text: TokenSplit, *, max_tokens: int | None = None
) -> Quality:
    """Both models on held-out text, each document with a context of its own.

    Args:
        model: the one in question.
        reference: the one it was made from.
        text: usually ``TokenSet.heldout``.
        max_tokens: about how many tokens; None for all.

    Raises:
        DataError: nothing is held out.
    """
    context = min(model.config.max_position, _CONTEXT)
    sums, agreed, count = [0.0, 0.0], 0, 0
    batches = heldout.heldout_chunks(
        text, context=context, batch_tokens=_BATCH_TOKENS, max_tokens=max_tokens
    )
    for batch in batches:
        tokens = torch.from_numpy(batch.tokens)
        scored = torch.from_numpy(batch.scored)
        targets = tokens[:, 1:][scored]
        best = []
        for place, each in enumerate((model, reference)):
            logits = each(tokens[:, :-1])[scored].float()
            sums[place] += float(F.cross_entropy(logits, targets, reduction="sum"))
            best.append(logits.argmax(-1))
        agreed += int((best[0] == best[1]).sum())
        count += len(targets)
    if count == 0:
        raise DataError("data: there is no held-out text to compare on; give more documents")
    return Quality(
        tokens=count,
        perplexity=math.exp(min(sums[0] / count, 700.0)),
        reference=math.exp(min(sums[1] / count, 700.0)),
        agreement=agreed / count,
    )


def decode_times(
    models: dict[str, Transformer], *, context: int = 32, steps: int = 8, pairs: int = 15
) -> PairedTimes:
    """Seconds of ``steps`` tokens of one sequence, the models in turn.

    Args:
        models: name -> model.
        context: tokens before the first one.
        steps: tokens of one round.
        pairs: rounds.
    """
    config = next(iter(models.values())).config
    context = min(context, config.max_position - steps)
    opening = torch.arange(context).remainder(config.vocab_size)[None]
    token = torch.zeros(1, 1, dtype=torch.int64)
    caches = {}
    with torch.inference_mode():
        for name, model in models.items():
            cache = KVCache(config, 1, context + steps, dtype=model.embed.weight.dtype)
            model(opening, cache=cache)
            caches[name] = cache

    def run(name: str) -> None:
        cache = caches[name]
        cache.length = context
        with torch.inference_mode():
            for _ in range(steps):
                models[name](token, cache=cache)

    return interleave({name: functools.partial(run, name) for name in models}, pairs)
