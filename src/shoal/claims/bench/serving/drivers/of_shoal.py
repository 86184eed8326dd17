"""Shoal's own engine, without HTTP."""

from __future__ import annotations

from typing import Any

from loop import Loaded, main

from shoal.core.config import parse
from shoal.core.version import __version__
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.serve.engine.build import build_engine
from shoal.serve.ranks.spinning import spin_briefly

_WEIGHTS = {"bf16": "plain", "int8": "int8-channel", "int4": "int4-g128"}


def load(options: dict[str, Any]) -> Loaded:
    """See :mod:`loop`."""
    spin_briefly()
    job = {
        "model": options["model"],
        "precision": "bf16",
        "weights": _WEIGHTS[options["form"]],
        "threads": options["threads"],
        "kv_tokens": options["kv_tokens"],
        "max_running": options["max_running"],
        "max_position": options["max_position"],
    }
    engine, _ = build_engine(parse(ServeJob, job, where="job"))
    served = 0

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        nonlocal served
        requests = []
        for prompt, count in zip(prompts, new, strict=True):
            served += 1
            params = SamplingParams(max_tokens=count)
            requests.append(Request(str(served), list(prompt), len(prompt), params))
            engine.add(requests[-1])
        while engine.busy:
            engine.step()
        return [request.tokens[request.n_prompt :] for request in requests]

    return Loaded(generate, __version__, f"weights: {_WEIGHTS[options['form']]}, cache of bf16")


if __name__ == "__main__":
    main(load)
