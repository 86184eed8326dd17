"""What the claim of Medusa counts: trees and their paths, other shapes, calibration, equal answers.

Shapes: N rows of a tree, B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.claims.bench.decode import PLAIN, Bench
from shoal.claims.experiments.decoding import root_path, summarize
from shoal.claims.frame import paired
from shoal.claims.protocols import PairedSamples
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.ir import Chunk, DrafterCalibration, Request, SamplingParams, ServeJob
from shoal.plan.trees.drafting import FixedDrafting

_MEDUSA = "medusa"


def tree_logits(seed: int, *, masked: bool, nodes: int = 24) -> list[float]:
    """Largest difference between a node's scores and those of its path alone, in float64.

    ``masked``: every node sees its own path; else all rows before it, as text would.
    """
    from shoal.model.config import ModelConfig
    from shoal.serve.decode.protocols import TokenTree, branches
    from shoal.serve.decode.runner import SpeculativeRunner
    from shoal.serve.engine.build import engine_of
    from shoal.train.zoo import random

    config = ModelConfig(
        name="tree", vocab_size=97, hidden=64, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=16, ffn_hidden=128, max_position=256,
    )  # fmt: skip
    model = random(config, seed).double().requires_grad_(False)
    source = generator(seed, purpose="tree of a claim")
    parent = [-1, *(int(source.integers(max(0, row - 5), row)) for row in range(1, nodes + 1))]
    tokens = source.integers(config.vocab_size, size=nodes + 1)
    prompt = source.integers(config.vocab_size, size=40).tolist()
    shape = branches(tuple(parent) if masked else tuple(range(-1, nodes)))
    job = ServeJob(model="tree", kv_tokens=512, threads=1, speculative={"name": "ngram"})
    runner = engine_of(job, model)[2]
    assert isinstance(runner, SpeculativeRunner)
    request = Request("tree", prompt, len(prompt), SamplingParams(max_tokens=1))
    request.blocks = list(range(runner.cache.num_blocks))
    with torch.inference_mode():
        runner.forward([Chunk(request, 0, len(prompt) - 1)], {})
        root = Chunk(request, len(prompt) - 1, 1, nodes)
        tokens[0] = prompt[-1]
        _, logits_NV, _ = runner.forward([root], {"tree": TokenTree(tokens, shape)})
        alone = [
            model(torch.tensor([[*prompt, *root_path(tokens, parent, row)]]))[0, -1]
            for row in range(nodes + 1)
        ]
    return [float((a - b).abs().max()) for a, b in zip(logits_NV, alone, strict=True)]


def trees(
    bench: Bench,
    heads: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    as_baseline: bool,
) -> PairedSamples:
    """Tokens a step with the best tree of some sizes, and with fixed ones of as many nodes."""
    product = {"name": "cartesian", "widths": (2, 2, 1)}
    made: dict[str, Any] = {"auto": "auto", "chain": "chain", "product": product}
    options = {"name": "medusa", "path": str(heads)}
    methods = {name: {**options, "tree": tree} for name, tree in made.items()}
    others = Bench(bench.model, methods, threads=bench.threads)

    def rate(name: str, nodes: int) -> float:
        others.engines[name].scheduler.drafting = FixedDrafting(nodes)  # type: ignore[attr-defined]
        answers = [others.answer(name, [prompt], new_tokens) for prompt in prompts]
        return summarize(answers)["tokens_per_step"]

    sizes = {"chain": 4, "product": 10}
    fixed = [rate(name, nodes) for name, nodes in sizes.items()]
    # Without heads a step gives one token.
    return paired((1.0 if as_baseline else rate("auto", n) for n in sizes.values()), fixed)


def calibrated(target: Path, heads: Path, *, as_baseline: bool) -> PairedSamples:
    """Tokens a step on the calibration's own prompts, and what its shares add up to."""
    from shoal.model import huggingface
    from shoal.model.drafters import files
    from shoal.train.drafters.features import prepare_features
    from shoal.train.zoo.drafters import drafter_recipe

    job = drafter_recipe("medusa", target)
    features = prepare_features(
        job,
        huggingface.read(target, torch.bfloat16),
        fingerprint=files.fingerprint(target),
        tokenizer=files.tokenizer_hash(target),
    )
    index = features.index
    text = features.rows("judged", range(index.judged), torch.float32).tokens.numpy()
    shares = DrafterCalibration(files.read(heads).config.calibration)
    spec = table("tree").build("auto").build(shares, 16)
    bench = Bench(target, {_MEDUSA: {"name": "medusa", "path": str(heads)}, PLAIN: None})
    bench.engines[_MEDUSA].scheduler.drafting = FixedDrafting(len(spec))  # type: ignore[attr-defined]
    name = PLAIN if as_baseline else _MEDUSA
    answers = [
        bench.answer(name, [row[: index.prompt].tolist()], index.seq_len - index.prompt)
        for row in text
    ]
    measured = summarize(answers)["tokens_per_step"]
    return PairedSamples(method=(measured,), baseline=(spec.expected()[-1],))


def equal_answers(
    target: Path,
    method: Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> list[float]:
    """1 for every answer in float64 that is plain decoding's, token for token."""
    from shoal.model import huggingface

    model = huggingface.read(target, torch.float64).requires_grad_(False).eval()
    bench = Bench(target, {PLAIN: None, "method": method}, precision="fp64", loaded=model)
    if method is not None:
        bench.engines["method"].scheduler.drafting = FixedDrafting(12)  # type: ignore[attr-defined]
    same = []
    for prompt in prompts:
        plain, result = (bench.answer(name, [prompt], new_tokens) for name in (PLAIN, "method"))
        same.append(float(plain.tokens == result.tokens))
    return same
