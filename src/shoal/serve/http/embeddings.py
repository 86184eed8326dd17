"""``/v1/embeddings``: what is asked, and how vectors are written."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.ir.serving import Request, SamplingParams
from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import check_model, read_prompts

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
    normalize: bool = True
    dimensions: int | None = None
    encoded: bool = False
    priority: int = 0

    def request(self, name: str, tokens: Sequence[int]) -> Request:
        """What the engine computes for the tokens of a text; no other open request has the name."""
        params = SamplingParams(max_tokens=1, pooling=self.pooling)
        # The mean needs every token's state, so nothing of it may be found in the cache.
        salt = name if self.pooling == "mean" else ""
        return Request(name, [*tokens], len(tokens), params, priority=self.priority, salt=salt)

    def vector(self, values: Sequence[float]) -> NDArray[np.float32]:
        """The vector of a text in the wanted length and norm.

        Raises:
            ApiError: the vector has fewer dimensions than requested.
        """
        if self.dimensions is not None and self.dimensions > len(values):
            wrong("dimensions", self.dimensions, f"at most {len(values)}, as the model has")
        vector = np.array(values[: self.dimensions], dtype="<f4")
        if self.normalize:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return vector


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
    return EmbeddingInputs(
        texts=read_prompts(fields.get("input"), limits, model, "input"),
        pooling=read_pooling(fields),
        normalize=fields.get("normalize") is None or fields.flag("normalize"),
        dimensions=fields.integer("dimensions", 1, _MOST, None),
        encoded=form == "base64",
        priority=fields.integer("priority", -(2**31), 2**31 - 1, 0) or 0,
    )


def read_pooling(fields: Fields) -> Literal["mean", "last"]:
    """The field ``pooling``.

    Raises:
        ApiError: it is neither.
    """
    pooling: Any = fields.get("pooling")
    if pooling not in (None, "mean", "last"):
        wrong("pooling", pooling, "mean or last")
    return pooling or "mean"


def written(
    vectors: Sequence[Sequence[float]], texts: EmbeddingInputs, name: str, num_tokens: int
) -> dict[str, Any]:
    """The answer.

    Raises:
        ApiError: the vector has fewer dimensions than requested.
    """
    data = []
    for index, values in enumerate(vectors):
        vector = texts.vector(values)
        shown: Any = vector.tolist()
        if texts.encoded:
            shown = base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}
