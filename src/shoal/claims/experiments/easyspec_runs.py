"""What the claim of EasySpec counts and times: passes, acceptance, many devices, equal tokens."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.experiments.easyspec_ranks import PASSES, repeated
from shoal.claims.experiments.tiny import llama, requests, served
from shoal.claims.frame import paired
from shoal.claims.protocols import PairedSamples
from shoal.core.measure import interleave
from shoal.core.scratch import scratch_directory
from shoal.plan.trees.drafting import FixedDrafting
from shoal.plan.trees.fuzzy import draft_step_s, even_groups

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.claims.bench.decode import Bench, DecodeBatchResult

__all__ = ["TimedPasses", "acceptance", "eight_devices", "reading_s", "timed_passes", "tiny"]

# Rounds after which stale keys and values have had time to do harm.
_LATE = 20


class _Told(FixedDrafting):
    """Guesses always, and remembers what came of it, round by round."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rounds: list[tuple[int, int]] = []

    def observe(self, guessed: Sequence[int], accepted: Sequence[int]) -> None:
        """See :class:`~shoal.ir.decoding.Drafting`."""
        self.rounds += zip(guessed, accepted, strict=True)


def acceptance(
    bench: Bench, name: str, prompts: Sequence[Sequence[int]], new_tokens: int, depth: int
) -> tuple[float, float]:
    """Share of guesses that are accepted: in all rounds, and from the twentieth of answers on."""
    engine = bench.engines[name]
    before = engine.scheduler.drafting  # type: ignore[attr-defined]
    first: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    for prompt in prompts:
        result = engine.scheduler.drafting = _Told(depth)  # type: ignore[attr-defined]
        bench.answer(name, [prompt], new_tokens)
        first += result.rounds
        late += result.rounds[_LATE:]
    engine.scheduler.drafting = before  # type: ignore[attr-defined]

    def share(rounds: list[tuple[int, int]]) -> float:
        return sum(right for _, right in rounds) / max(1, sum(count for count, _ in rounds))

    return share(first), share(late)


def timed_passes(engine: Any, pairs: int, seed: int) -> PairedSamples:
    """Seconds of draft passes of one row, by groups and layer by layer, in turn."""
    drafter = engine.runner.drafter
    timed = interleave(
        {"method": lambda: repeated(drafter.quick), "baseline": lambda: repeated(drafter.net)},
        pairs,
        warmup=3,
        seed=seed,
    )
    return paired(timed.seconds["method"], timed.seconds["baseline"])


def reading_s(draft: Path, pairs: int, seed: int) -> float:
    """Seconds in which one core reads every weight of a draft once, as one product of a row.

    No pass by groups can take less: it multiplies by all of them.
    """
    import torch

    from shoal.model import huggingface
    from shoal.model.linear import DispatchedLinear

    config = huggingface.read_config(draft)
    model = huggingface.read(draft, torch.bfloat16)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    numbers = matrices - (0 if config.tied else config.vocab_size * config.hidden)
    ways = {}
    for wider in (1, 4, 16):  # one order of reading is faster than another
        width = wider * config.hidden
        weight = torch.zeros(numbers // width, width, dtype=torch.bfloat16)
        ways[str(width)] = functools.partial(_read, DispatchedLinear(weight), weight[:1].clone())
    timed = interleave(ways, pairs, warmup=2, seed=seed)
    return min(statistics.median(one) for one in timed.seconds.values()) / PASSES


def _read(product: Callable[[Tensor], Tensor], row: Tensor) -> None:
    import torch

    with torch.inference_mode():
        for _ in range(PASSES):
            product(row)


@dataclass(frozen=True)
class TimedPasses:
    """Passes and answers of one realisation, by groups and layer by layer.

    Args:
        passes: s of a hundred passes.
        answers: s of a token.
        speedup: of the passes.
        bounds: of both speedups.
        details: of both in words and numbers.
    """

    passes: PairedSamples
    answers: PairedSamples
    speedup: float
    bounds: dict[str, float]
    details: dict[str, Any]

    @classmethod
    def of(
        cls,
        passes: PairedSamples,
        answers: Mapping[str, Sequence[Sequence[DecodeBatchResult]]],
        read_s: float,
        depth: int,
    ) -> TimedPasses:
        """From what was timed.

        Args:
            passes: see above.
            answers: by groups (``method``) and layer by layer.
            read_s: in which the weights are read, faster than which no pass can be.
            depth: passes of a round; the first of them is exact.
        """
        from shoal.claims.experiments.decoding import seconds_per_token, summarize

        each = seconds_per_token(answers["method"], answers["baseline"])[0]
        method, baseline = (
            statistics.median(one) / PASSES for one in (passes.method, passes.baseline)
        )
        words = {name: summarize(rounds[0]) for name, rounds in answers.items()}
        speedup = _speedup(passes)
        round_s = statistics.median(each.baseline) * words["baseline"]["tokens_per_step"]
        bounds = {
            "draft_pass": baseline / read_s,
            "end_to_end": round_s / (round_s - (depth - 1) * (baseline - read_s)),
        }
        details = {
            "draft_pass": speedup, "method_us": 1e6 * method, "baseline_us": 1e6 * baseline,
            "reading_us": 1e6 * read_s, "end_to_end": _speedup(each), "answers": words,
        }  # fmt: skip
        return cls(passes, each, speedup, bounds, details)


def _speedup(pairs: PairedSamples) -> float:
    ratios = (slow / fast for fast, slow in zip(pairs.method, pairs.baseline, strict=True))
    return statistics.median(ratios)


def eight_devices(group: int) -> tuple[float, float]:
    """Seconds of a draft pass of Llama-3.1-8B on eight H100, by tensor parallelism and by groups.

    Weights are read once a pass, and collectives take their latency at every doubling of ranks.
    """
    from shoal.cost import shapes
    from shoal.machine.described import load

    devices = 8
    shape, machine = shapes.find("Llama-3.1-8B"), load("H100")
    read = next(tier.read_bandwidth for tier in machine.device.memory if tier.read_bandwidth)
    latency = machine.links[0].latency_s
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    attention_s = [2 * 2 * shape.hidden * heads / read] * shape.num_layers
    mlp_s = [2 * 3 * shape.hidden * shape.ffn_hidden / read] * shape.num_layers
    doublings = math.log2(devices)

    def seconds(size: int) -> float:
        return draft_step_s(
            even_groups(size, shape.num_layers),
            attention_s=attention_s,
            mlp_s=mlp_s,
            gather_s=doublings * latency,
            devices=devices,
            exchange_s=2 * doublings * latency,
        )

    return seconds(1), seconds(group)


def tiny(seed: int, group: int) -> tuple[int, int]:
    """Tokens that differ from the target's alone in float64, and attention calls of a draft pass.

    Args:
        seed: of a draft of eight layers, which is its own target.
        group: layers of a group.
    """
    import torch

    from shoal.ir import ServeJob
    from shoal.model import huggingface
    from shoal.serve.engine.build import engine_of
    from shoal.train.zoo import random

    config = llama(64, 8, 4, kv_heads=2, vocab=97, ffn=96, initializer_range=0.12)
    model = random(config, seed).requires_grad_(False)
    answers, calls = [], 0
    with scratch_directory("claim") as home:
        place = home / "tiny"
        huggingface.write(place, model)
        target = model.to(torch.float64)
        for speculative in (None, {"name": "easyspec", "path": str(place), "group": group}):
            fields = {"model": str(place), "kv_tokens": 512, "threads": 1}
            job = ServeJob.model_validate({**fields, "speculative": speculative})
            engine = engine_of(job, target)[0]
            if speculative is not None:
                engine.scheduler.drafting = FixedDrafting(4)  # type: ignore[attr-defined]
            answers += served(engine, requests([range(20)], 40))
            if speculative is not None:
                quick = engine.runner.drafter.quick.model  # type: ignore[attr-defined]
                calls = len(getattr(quick, "groups", (1,) * config.num_layers))
    return sum(one != two for one, two in zip(*answers, strict=True)), calls
