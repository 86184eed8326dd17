"""What formats of the cache lose in a model of the user's: scores and held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shoal.core.errors import DataError, ModelError
from shoal.core.parts import Choice
from shoal.corpora import heldout
from shoal.corpora.tokens import TokenSplit, prepare
from shoal.kernel.kv import kv_format
from shoal.model import huggingface
from shoal.model.ksort import By, coded, ksort
from shoal.model.kv_report import KVReport, kv_report
from shoal.model.transformer import Transformer
from shoal.train.quantize import calibration

_CONTEXT = 512
_BATCH_TOKENS = 2048


@torch.inference_mode()
def held_out_perplexity(model: Transformer, text: TokenSplit, *, max_tokens: int | None) -> float:
    """Perplexity of held-out text, each document with a context of its own.

    Args:
        model: what predicts.
        text: usually ``TokenSet.heldout``.
        max_tokens: about how many tokens; None for all.

    Raises:
        DataError: nothing is held out.
    """
    context = min(model.config.max_position, _CONTEXT)
    total, count = 0.0, 0
    for batch in heldout.heldout_chunks(
        text, context=context, batch_tokens=_BATCH_TOKENS, max_tokens=max_tokens
    ):
        tokens = torch.from_numpy(batch.tokens)
        scored = torch.from_numpy(batch.scored)
        logits = model(tokens[:, :-1])[scored].float()
        total += float(F.cross_entropy(logits, tokens[:, 1:][scored], reduction="sum"))
        count += len(logits)
    if count == 0:
        raise DataError("data: there is no held-out text to predict; give more documents")
    return math.exp(min(total / count, 700.0))


def report_directory(
    directory: Path,
    *,
    data: Choice | str | Mapping[str, Any] = "stdlib",
    by: By = "weight",
    blocks: tuple[int, ...] = (32, 64, 128),
    samples: int = 4,
    eval_tokens: int = 8192,
    progress: Callable[[float, float, str], None] | None = None,
) -> KVReport:
    """Sizes of the key channels of a directory's model, and what formats of its cache lose.

    Args:
        directory: a model directory, with its tokenizer.json.
        data: corpus whose training split gives keys, and whose held-out split is predicted.
        by: what determines the size of a channel: weight or calibration.
        blocks: numbers that share an exponent.
        samples: sequences of up to 256 tokens that give keys.
        eval_tokens: about how many held-out tokens each format is tried on, keys and values
            in it; 0 for none.
        progress: called with what is done, all, and what it is.

    Raises:
        ModelError: the directory cannot be read, or has no tokenizer.
        KernelError: no block divides a head.
    """
    say = progress or (lambda _done, _all, _text: None)
    home = directory.parent if huggingface.is_gguf(directory) else directory
    tokenizer = home / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer}: not found; copy the model's tokenizer there")
    model = huggingface.read(directory, packed=False).eval()
    config = model.config
    text = prepare(data, str(tokenizer), config.vocab_size, progress=say)
    tokens_BT = calibration(
        text.train,
        samples=samples,
        length=min(256, config.max_position),
        vocab_size=config.vocab_size,
    )
    result = kv_report(model, tokens_BT=tokens_BT, by=by, blocks=blocks)
    if not eval_tokens:
        return result
    rows = []
    for index, row in enumerate(result.rows):
        say(index, len(result.rows), f"predicting with {row.format}")
        each = model
        if row.order != "none":
            each = huggingface.read(directory, packed=False).eval()
            ksort(each, by=by, mode=row.order, tokens_BT=tokens_BT)  # type: ignore[arg-type]
        form = None if row.format == "plain" else kv_format(row.format)
        with coded(each, form, form):
            perplexity = held_out_perplexity(each, text.heldout, max_tokens=eval_tokens)
        rows.append(row.model_copy(update={"perplexity": perplexity}))
    return result.model_copy(update={"rows": tuple(rows)})
