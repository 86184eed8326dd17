"""Requests that take a part of the model: some of its parallel streams, or a share of its layers.

What a request of another part left in the cache has other keys and values for the same tokens, so
both are words of its salt.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shoal.core.errors import ServeError, require
from shoal.ir import Request
from shoal.model.duo import computing
from shoal.model.parscale import computing as streaming
from shoal.model.transformer import Transformer
from shoal.serve.engine.hooks import EngineHook, ForwardPass

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder


def _salted(request: Request, word: str) -> None:
    if word not in request.salt:
        request.salt = f"{word} {request.salt}"


class StreamsHook(EngineHook):
    """Computes each request with its requested number of streams."""

    kind: ClassVar[str] = "streams"

    def __init__(self, model: Transformer) -> None:
        self._model, self._most = model, model.config.architecture.streams.num

    def facts(self) -> Mapping[str, Any]:
        return {"streams": self._most}

    def check(self, request: Request) -> None:
        if request.params.streams is not None:
            _salted(request, f"streams={request.params.streams}")

    def around(self, work: ForwardPass) -> AbstractContextManager[None]:
        if all(chunk.request.params.streams is None for chunk in work.chunks):
            return nullcontext()
        counts = torch.tensor([one.request.params.streams or self._most for one in work.chunks])
        lengths = torch.tensor([chunk.length for chunk in work.chunks])
        return streaming(self._model, counts.repeat_interleave(lengths).to(_device(self._model)))


class SharesHook(EngineHook):
    """Computes each request with its requested share of the model.

    Args:
        model: with feed-forward layers of two sizes, whose routers were trained.
    """

    kind: ClassVar[str] = "shares"

    def __init__(self, model: Transformer) -> None:
        self._model, self._ffn = model, model.config.architecture.ffn

    def facts(self) -> Mapping[str, Any]:
        return {"shares": True}

    def check(self, request: Request) -> None:
        """Keys and values of deeper layers follow from what was computed for them."""
        if request.params.compute is not None:
            _salted(request, f"compute={request.params.compute!r}")

    def around(self, work: ForwardPass) -> AbstractContextManager[None]:
        if all(chunk.request.params.compute is None for chunk in work.chunks):
            return nullcontext()
        shifts = [self._ffn.shift(chunk.request.params.compute) for chunk in work.chunks]
        lengths = torch.tensor([context.length for context in work.contexts])
        shift_N = torch.tensor(shifts).repeat_interleave(lengths).to(_device(self._model))
        return computing(self._model, shift_N, work.needed)


def streams_of(built: EngineBuilder) -> StreamsHook | None:
    """Of a model with streams.

    Raises:
        ServeError: its cache is one that does not know their prefixes.
    """
    if built.model.config.architecture.streams.num == 1:
        return None
    require(
        built.local,
        "kv",
        built.job.kv.name,
        expected="paged or slots for a model with streams: no other cache knows their prefixes",
        error=ServeError,
    )
    return StreamsHook(built.model) if built.plain else None


def shares_of(built: EngineBuilder) -> SharesHook | None:
    """Of a model whose routers were trained."""
    return SharesHook(built.model) if built.model.config.architecture.ffn.shares else None


def _device(model: Transformer) -> torch.device:
    return model.weight.device
