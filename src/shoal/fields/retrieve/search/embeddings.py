"""The embedder ``embeddings_api``: the ``/v1/embeddings`` of a server, such as ``shoal serve``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import httpx2
import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.retrieve.search.protocols import SearchError

# Texts of one request, and the largest answer.
_AT_ONCE, _ANSWER_BYTES = 32, 64 * 2**20


@part
class EmbeddingsApi:
    """Ask a server for the vectors of texts.

    Args:
        url: address of the server, without ``/v1``.
        model: name of its model.
        dim: numbers of a vector, for plans.
        key_variable: environment variable with the server's API key; none is sent without it.
        timeout_s: seconds that an answer may take.
    """

    url: str = "http://127.0.0.1:8000"
    model: str = ""
    dim: Annotated[int, Ge(1), Le(65_536)] = 384
    key_variable: str = "EMBEDDINGS_API_KEY"
    timeout_s: Annotated[float, Gt(0), Le(3600)] = 30.0

    def embed(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """What the server says, as it comes."""
        rows: list[Any] = []
        key = os.environ.get(self.key_variable)
        headers = {} if not key else {"Authorization": f"Bearer {key}"}
        try:
            with httpx2.Client(timeout=self.timeout_s, headers=headers) as client:
                for begin in range(0, len(texts), _AT_ONCE):
                    some = list(texts[begin : begin + _AT_ONCE])
                    rows += self._asked(client, some)
            vectors = np.array(rows, np.float32)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as cause:
            raise SearchError(f"embedder {self.url}: no vectors: {cause}", status=502) from cause
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise SearchError(
                f"embedder {self.url}: {list(vectors.shape)} numbers; expected a vector of finite "
                f"numbers for each of {len(texts)} texts",
                status=502,
            )
        return vectors

    def _asked(self, client: httpx2.Client, texts: list[str]) -> list[Any]:
        body = {"input": texts, **({"model": self.model} if self.model else {})}
        answer = client.post(f"{self.url.rstrip('/')}/v1/embeddings", json=body)
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
        if len(answer.content) > _ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_ANSWER_BYTES} B")
        data = sorted(answer.json()["data"], key=lambda one: int(one["index"]))
        return [one["embedding"] for one in data]

    def dim_of(self, job_dim: int) -> int:
        return self.dim
