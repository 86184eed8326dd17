"""What the claim of EasySpec counts and times: passes, acceptance, many devices, equal tokens."""

from __future__ import annotations

import copy
import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.experiments.tiny import llama, requests, served
from shoal.claims.frame import paired
from shoal.claims.protocols import PairedSamples
from shoal.claims.ranks import on_ranks
from shoal.core.measure import interleave
from shoal.core.random import generator
from shoal.core.scratch import scratch_directory
from shoal.ir import ServeJob
from shoal.plan.trees.drafting import FixedDrafting
from shoal.plan.trees.fuzzy import draft_step_s, even_groups

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.claims.bench.decode import Bench, DecodeBatchResult
    from shoal.parallel.protocols import Comm
    from shoal.parallel.tensor.layer import Share
    from shoal.serve.decode.draft.net import DraftNet

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


class TimedPasses:
    """S of a hundred passes and of a token, by groups and layer by layer; bounds of both.

    A pass takes ``read_s`` at least; of ``depth`` passes the first is exact.
    """

    def __init__(
        self,
        passes: PairedSamples,
        answers: Mapping[str, Sequence[Sequence[DecodeBatchResult]]],
        read_s: float,
        depth: int,
    ) -> None:
        from shoal.claims.experiments.decoding import seconds_per_token, summarize

        self.passes, self.read_s = passes, read_s
        self.answers, _ = seconds_per_token(answers["method"], answers["baseline"])
        self.method_s, self.baseline_s = (
            statistics.median(one) / PASSES for one in (passes.method, passes.baseline)
        )
        self.speedup = _speedup(passes)
        steps = summarize(answers["baseline"][0])["tokens_per_step"]
        round_s = statistics.median(self.answers.baseline) * steps
        self.bounds = {
            "draft_pass": self.baseline_s / read_s,
            "end_to_end": round_s / (round_s - (depth - 1) * (self.baseline_s - read_s)),
        }

    def __str__(self) -> str:
        return (
            f"{1e6 * self.baseline_s:.0f} us and {1e6 * self.method_s:.0f} us by groups, of which "
            f"reading the weights alone is {1e6 * self.read_s:.0f} us, and answers are "
            f"{_speedup(self.answers):.3f} times as fast"
        )


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
    """Tokens that are not the target's in float64, and attention calls of a pass by groups."""
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


PASSES = 100
_RANKS = 2


def repeated(net: DraftNet) -> None:
    """A hundred passes of one row that sees two hundred tokens."""
    import numpy as np
    import torch

    from shoal.serve.decode.captured import TreeRows

    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    row = TreeRows([7], list(range(16)), 200, 200, zero, one)
    with torch.inference_mode():
        for _ in range(PASSES):
            net.rows([row])


def passes(
    comm: Comm, *, path: str, job: ServeJob, groups: list[int], full: bool, pairs: int, seed: int
) -> Mapping[str, tuple[float, ...]]:
    """Seconds of draft passes by groups, and twice layer by layer, on one rank, in turn."""
    import torch

    from shoal.serve.decode.draft.ranked import part_of, ranked

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    nets, limit = {}, 512
    for name, grouped in (("method", max(groups) > 1), ("baseline", False)):
        share: Share = "layers" if grouped else "heads"
        part = part_of(path, job, limit, torch.bfloat16, comm.rank, comm.world, share)
        chosen = tuple(groups) if grouped else None
        nets[name] = ranked(part, comm, limit, share, chosen, full=full and grouped)
    timed = interleave(
        {name: functools.partial(repeated, net) for name, net in nets.items()},
        pairs,
        warmup=3,
        seed=seed,
    )
    return timed.seconds


def ranked_passes(
    draft: Path, target: Path, groups: Sequence[int], full: bool, pairs: int, seed: int
) -> PairedSamples:
    """The same of two ranks, one core each, as the first of them sees it."""
    job = {"model": str(target), "threads": 1, "kv_tokens": 512, "max_running": 1}
    job["speculative"] = {"name": "draft_model", "path": str(draft)}  # trees are read
    ranks = on_ranks(
        f"{__name__}:passes", _RANKS, path=str(draft), job=ServeJob.model_validate(job),
        groups=list(groups), full=full, pairs=pairs, seed=seed,
    )  # fmt: skip
    return paired(ranks[0]["method"], ranks[0]["baseline"])


def answers_in_turn(
    bench: Bench,
    name: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    rounds: int,
    seed: int,
) -> dict[str, list[list[DecodeBatchResult]]]:
    """Answers with the draft by groups (``method``) and layer by layer (``baseline``), in turn.

    One engine gives both, so that both have the same ranks: its drafter is exchanged.
    """
    from shoal.serve.decode.draft.part import DraftModelDrafter

    engine: Any = bench.engines[name]
    runner, decides = engine.runner, engine.scheduler.drafting
    grouped = runner.drafter
    plain = DraftModelDrafter(
        grouped.net, depth=grouped.depth, breadth=1, nodes=grouped.depth, limit=grouped.limit
    )
    drafters = {
        "method": (grouped, copy.deepcopy(decides)),
        "baseline": (plain, copy.deepcopy(decides)),
    }

    def answer(which: str, prompt: Sequence[int]) -> DecodeBatchResult:
        runner.drafter, engine.scheduler.drafting = drafters[which]
        return bench.answer(name, [prompt], new_tokens)

    result: dict[str, list[list[DecodeBatchResult]]] = {which: [] for which in drafters}
    try:
        for which in drafters:  # kernels are prepared and passes recorded before anything is timed
            for prompt in prompts[:3]:
                answer(which, prompt)
        for turn in range(rounds):
            for answers in result.values():
                answers.append([])
            for number, prompt in enumerate(prompts):
                draws = generator(seed, purpose="bench order", step=turn * len(prompts) + number)
                for place in draws.permutation(2).tolist():
                    which = list(drafters)[place]
                    result[which][turn].append(answer(which, prompt))
    finally:
        runner.drafter, engine.scheduler.drafting = grouped, decides
    return result
