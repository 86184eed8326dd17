"""What the claim of EasySpec counts and times: passes, acceptance, many devices, equal tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.protocols import Paired
from shoal.core.measure import interleave
from shoal.plan.fuzzy import draft_step_s, even_groups
from shoal.plan.trees.drafting import Always

if TYPE_CHECKING:
    from shoal.claims.bench.decode import Bench
    from shoal.serve.decode.draft_net import DraftNet

__all__ = ["acceptance", "eight_devices", "timed_passes", "tiny"]

# Rounds after which stale keys and values have had time to do harm.
_LATE = 20
_PASSES = 100


class _Told(Always):
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
        told = engine.scheduler.drafting = _Told(depth)  # type: ignore[attr-defined]
        bench.answer(name, [prompt], new_tokens)
        first += told.rounds
        late += told.rounds[_LATE:]
    engine.scheduler.drafting = before  # type: ignore[attr-defined]

    def share(rounds: list[tuple[int, int]]) -> float:
        return sum(right for _, right in rounds) / max(1, sum(count for count, _ in rounds))

    return share(first), share(late)


def timed_passes(engine: Any, pairs: int, seed: int) -> Paired:
    """Seconds of draft passes of one row, by groups and layer by layer, in turn."""
    import torch

    from shoal.serve.decode.captured import Branch

    drafter = engine.runner.drafter
    blocks = list(range(16))
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    row = Branch([7], blocks, 200, 200, zero, one)

    def passes(net: DraftNet) -> None:
        with torch.inference_mode():
            for _ in range(_PASSES):
                net.rows([row])

    timed = interleave(
        {"method": lambda: passes(drafter.quick), "baseline": lambda: passes(drafter.net)},
        pairs,
        warmup=3,
        seed=seed,
    )
    return Paired(method=timed.seconds["method"], baseline=timed.seconds["baseline"])


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

    from shoal.ir import Request, SamplingParams, ServeJob
    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.serve.build import engine_of
    from shoal.train.zoo import random

    config = ModelConfig(
        name="tiny", vocab_size=97, hidden=64, num_layers=8, num_heads=4, num_kv_heads=2,
        head_dim=16, ffn_hidden=96, max_position=256, initializer_range=0.12,
    )  # fmt: skip
    model = random(config, seed).requires_grad_(False)
    answers, calls = [], 0
    with TemporaryDirectory() as home:
        place = Path(home) / "tiny"
        huggingface.write(place, model)
        target = model.to(torch.float64)
        for speculative in (None, {"name": "easyspec", "path": str(place), "group": group}):
            told = {"model": str(place), "kv_tokens": 512, "threads": 1, "speculative": speculative}
            engine = engine_of(ServeJob.model_validate(told), target)[0]
            if speculative is not None:
                engine.scheduler.drafting = Always(4)  # type: ignore[attr-defined]
            request = Request("tiny", list(range(20)), 20, SamplingParams(max_tokens=40))
            engine.add(request)
            while engine.busy:
                engine.step()
            answers.append(request.tokens)
            if speculative is not None:
                quick = engine.runner.drafter.quick.model  # type: ignore[attr-defined]
                calls = len(getattr(quick, "groups", (1,) * config.num_layers))
    return sum(one != two for one, two in zip(*answers, strict=True)), calls
