"""Requests and outputs as plain values, which frames carry between processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from shoal.ir.serving import Output, Request, SamplingParams, TokenInfo

_PARAMS = tuple(field.name for field in fields(SamplingParams))


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """How to sample, as plain values."""
    packed = {name: getattr(params, name) for name in _PARAMS}
    return {**packed, "stop_ids": sorted(params.stop_ids)}


def unpack_params(raw: Mapping[str, Any]) -> SamplingParams:
    """The inverse of :func:`pack_params`."""
    bias = tuple((token, value) for token, value in raw["logit_bias"])
    stop_ids = frozenset(raw["stop_ids"])
    return SamplingParams(**{**raw, "stop_ids": stop_ids, "logit_bias": bias})


def pack_request(request: Request) -> dict[str, Any]:
    """A request that is to be computed, as plain values."""
    return {
        "id": request.id,
        "tokens": list(request.tokens),
        "n_prompt": request.n_prompt,
        "params": pack_params(request.params),
        "priority": request.priority,
        "adapter": request.adapter,
        "salt": request.salt,
        "fork_of": request.fork_of,
    }


def unpack_request(raw: Mapping[str, Any]) -> Request:
    """The inverse of :func:`pack_request`; the request arrives now."""
    return Request(
        id=raw["id"],
        tokens=list(raw["tokens"]),
        n_prompt=raw["n_prompt"],
        params=unpack_params(raw["params"]),
        arrival=time.monotonic(),
        priority=raw["priority"],
        adapter=raw["adapter"],
        salt=raw["salt"],
        fork_of=raw["fork_of"],
    )


def pack_infos(infos: Iterable[TokenInfo]) -> list[Any]:
    """Log probabilities, as plain values."""
    return [[info.logprob, info.top] for info in infos]


def unpack_infos(raw: Iterable[Any]) -> tuple[TokenInfo, ...]:
    """The inverse of :func:`pack_infos`."""
    return tuple(
        TokenInfo(logprob, tuple((token, value) for token, value in top)) for logprob, top in raw
    )


def pack_output(output: Output) -> list[Any]:
    """What a step gave one request, as plain values."""
    infos = pack_infos(output.infos)
    return [output.request_id, output.tokens, infos, output.finish, output.cached]


def unpack_output(raw: list[Any]) -> Output:
    """The inverse of :func:`pack_output`."""
    request_id, tokens, infos, finish, cached = raw
    return Output(request_id, tuple(tokens), unpack_infos(infos), finish, cached)
