"""Small models and jobs that claims run; needs no torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.claims.protocols import ExperimentContext
from shoal.core.files import write_atomic
from shoal.core.parts import Choice
from shoal.cost.shapes import find
from shoal.ir import Request, SamplingParams, ServeJob, TrainJob, TrainPlan, Work
from shoal.model.config import ModelConfig


def llama(
    hidden: int,
    layers: int,
    heads: int,
    *,
    kv_heads: int = 0,
    vocab: int = 256,
    ffn: int = 0,
    length: int = 256,
    **changes: Any,
) -> ModelConfig:
    """A small decoder.

    One key/value head a query head and three times the width in the MLP, if not given; other fields
    by their names.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": hidden // heads,
        "ffn_hidden": ffn or 3 * hidden,
        "max_position": length,
    }
    return ModelConfig(**(fields | changes))


def mixture(hidden: int, layers: int, experts: int, width: int) -> ModelConfig:
    """A small mixture of experts of this width, two of which serve a token."""
    return llama(
        hidden, layers, 4, vocab=64, ffn=width, length=64, name="mixture", family="mixtral",
        head_dim=8, num_experts=experts, top_k=2,
    )  # fmt: skip


def wide(width: int, layers: int) -> ModelConfig:
    """A model that is wide for its depth."""
    return llama(width, layers, width // 64, vocab=6 * width, ffn=width * 8 // 3, length=128)


def train_job(**fields: Any) -> TrainJob:
    """A job in fp32; its model is only a name, for the configuration comes beside it."""
    return TrainJob.model_validate({"model": "shoal-0.3m", "precision": "fp32", **fields})


def serve_job(model: str | Path = "tiny", **fields: Any) -> ServeJob:
    """A serving job in fp32 on one thread."""
    return ServeJob.model_validate(
        {"model": str(model), "precision": "fp32", "threads": 1, **fields}
    )


def apart(split: dict[str, Any], config: ModelConfig, *, steps: int = 1) -> float:
    """Largest relative difference of training with this split to one process, in float64."""
    from shoal.claims.lab.same_as_one import same_as_one

    job = train_job(
        seq_len=16, global_batch=4, microbatch=1, parallel=split, grad_clip=0.05, steps=1
    )
    return same_as_one(job, config, steps=steps).largest


def corpus_of(data: Path | None, default: str = "stdlib") -> Choice:
    """The user's text, or a corpus by its name."""
    if data is None:
        return Choice(name=default)
    return Choice(name="text", options={"path": str(data)})


def requests(prompts: Iterable[Sequence[int]], tokens: int, **params: Any) -> list[Request]:
    """Requests for so many new tokens of each prompt, numbered."""
    return [
        Request(str(n), list(prompt), len(prompt), SamplingParams(max_tokens=tokens, **params))
        for n, prompt in enumerate(prompts)
    ]


def served(engine: Any, some: Sequence[Request]) -> list[list[int]]:
    """New tokens of requests that an engine serves together."""
    for request in some:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.tokens[request.n_prompt :] for request in some]


def run_plan(context: ExperimentContext, files: int, **fields: Any) -> TrainPlan:
    """A data-parallel job of worker processes on some files of the standard library."""
    from shoal.cost.training.step import estimate
    from shoal.machine.described import load

    corpus = context.work_dir / "corpus"
    if not corpus.exists():
        corpus.mkdir(parents=True)
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]:
            write_atomic(corpus / path.name, path.read_bytes()[:40_000])
    job = train_job(
        data={"name": "text", "path": str(corpus), "pattern": "*.py"},
        threads=1,
        seed=context.seed,
        evaluation={"every": 0, "final": False, "sample_tokens": 0},
        timeout_s=60,
        **fields,
    )
    machine, shape = context.machine or load("laptop"), find(job.model)
    cost = estimate(Work(shape=shape, job=job), machine)
    return TrainPlan(job=job, machine=machine, shape=shape, estimate=cost)


def losses_of(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> loss, of a run's events; the last time a step was done counts."""
    return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}
