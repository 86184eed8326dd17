"""``/v1/rerank``: documents by the cosine of their vectors with that of a query."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.serve.http.embeddings import EmbeddingInputs, read_pooling
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import check_model


@dataclass(frozen=True, kw_only=True)
class RerankInputs:
    """A query and the documents to rank for it.

    Args:
        texts: the query, then the documents.
        most: documents to give, the best ones; None for all.
        shown: whether their texts are given.
    """

    texts: EmbeddingInputs
    most: int | None
    shown: bool

    @property
    def names(self) -> list[str]:
        """Of each text the field that has it."""
        return ["query", *(f"documents[{place}]" for place in range(len(self.texts.texts) - 1))]


def read_rerank(body: Mapping[str, Any], limits: HttpLimits, served: Sequence[str]) -> RerankInputs:
    """A body of ``POST /v1/rerank``, as Jina, Cohere and vLLM have it.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = Fields(body)
    check_model(fields, served)
    query, documents = fields.get("query"), fields.get("documents")
    if not isinstance(query, str) or not query:
        wrong("query", query, "a text", code="missing" if query is None else "invalid_value")
    if not isinstance(documents, list) or not 1 <= len(documents) <= limits.documents:
        given = f"{len(documents)} documents" if isinstance(documents, list) else documents
        code = "missing" if documents is None else "invalid_value"
        wrong("documents", given, f"a list of 1 to {limits.documents} texts", code=code)
    texts = [_document(one, f"documents[{place}]") for place, one in enumerate(documents)]
    return RerankInputs(
        texts=EmbeddingInputs(
            texts=(query, *texts),
            pooling=read_pooling(fields),
            priority=fields.integer("priority", -(2**31), 2**31 - 1, 0) or 0,
        ),
        # vLLM's clients send 0 for all.
        most=fields.integer("top_n", 0, 2**31 - 1, None) or None,
        shown=fields.flag("return_documents"),
    )


def _document(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        wrong(where, value, "a text, or an object with text")
    return text


def ranked(
    vectors: Sequence[Sequence[float]], asked: RerankInputs, name: str, num_tokens: int
) -> dict[str, Any]:
    """The answer: best first, and of equal ones the earlier first.

    Args:
        vectors: of the query, then of the documents.
        asked: what was asked.
        name: what the model is called.
        num_tokens: of all texts.
    """
    states = np.array(vectors, dtype=np.float64)
    states /= np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-12)
    scores = states[1:] @ states[0]
    results = []
    for index in np.argsort(-scores, kind="stable").tolist()[: asked.most]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if asked.shown:
            result["document"] = {"text": asked.texts.texts[index + 1]}
        results.append(result)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    identity = f"rerank-{secrets.token_hex(12)}"
    return {"id": identity, "model": name, "usage": usage, "results": results}
