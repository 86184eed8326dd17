"""``/v1/embeddings``: what is asked, and how vectors are written."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import check_model, read_prompts

__all__ = ["EmbeddingInputs", "read_embeddings", "written"]

# More than any model has; what this one has is known with its first vector.
_MOST = 2**20


@dataclass(frozen=True, kw_only=True)
class EmbeddingInputs:
    """Texts that want vectors.

    Args:
        texts: each a text, or its tokens.
        pooling: the mean of the states of all tokens, or the last one.
        normalize: vectors of length 1.
        dimensions: numbers to keep of each vector, the first ones; None for all.
        encoded: in base64 instead of numbers.
        priority: a smaller number goes first.
    """

    texts: tuple[str | tuple[int, ...], ...]
    pooling: Literal["mean", "last"]
    normalize: bool
    dimensions: int | None
    encoded: bool
    priority: int


def read_embeddings(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> EmbeddingInputs:
    """A body of ``POST /v1/embeddings``.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = Fields(body)
    check_model(fields, served)
    form = fields.get("encoding_format")
    if form not in (None, "float", "base64"):
        wrong("encoding_format", form, "float or base64")
    pooling: Any = fields.get("pooling")
    if pooling not in (None, "mean", "last"):
        wrong("pooling", pooling, "mean or last")
    return EmbeddingInputs(
        texts=read_prompts(fields.get("input"), limits, model, "input"),
        pooling=pooling or "mean",
        normalize=fields.get("normalize") is None or fields.flag("normalize"),
        dimensions=fields.integer("dimensions", 1, _MOST, None),
        encoded=form == "base64",
        priority=fields.integer("priority", -(2**31), 2**31 - 1, 0) or 0,
    )


def written(
    vectors: Sequence[Sequence[float]], texts: EmbeddingInputs, name: str, num_tokens: int
) -> dict[str, Any]:
    """The answer.

    Raises:
        ApiError: fewer dimensions are there than were asked for.
    """
    data = []
    for index, values in enumerate(vectors):
        if texts.dimensions is not None and texts.dimensions > len(values):
            wrong("dimensions", texts.dimensions, f"at most {len(values)}, as the model has")
        vector = np.array(values[: texts.dimensions], dtype="<f4")
        if texts.normalize:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        shown: Any = vector.tolist()
        if texts.encoded:
            shown = base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}
