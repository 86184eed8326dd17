"""What the claim of Dovetail counts and times: bytes on the way, depths and trees, equal tokens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.claims.experiments.tiny import llama, requests, served
from shoal.core.scratch import scratch_directory
from shoal.ir import MAX_NODES
from shoal.plan.serving.heterogeneous import DraftOption, Heterogeneous
from shoal.plan.trees.drafting import FixedDrafting

if TYPE_CHECKING:
    from shoal.claims.bench.decode import Bench

_DEPTH = 5


class RunCounts(NamedTuple):
    """Bytes a token on the way, by offloading, and beside the formula's; wrong tokens."""

    link: float
    offload: float
    uncounted: float
    wrong: float


def weight_bytes(target: Path) -> int:
    """Bytes of a model's layers and head as they are stored: what offloading sends for a token."""
    return sum(file.stat().st_size for file in target.glob("*.safetensors"))


@contextlib.contextmanager
def held_to(core: int) -> Iterator[None]:
    """Hold this process to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Sweep:
    """Drafters of several depths, trees of several sizes; engines are named ``LAYERS NODES``."""

    def __init__(self, bench: Bench, layers: Sequence[int], nodes: Sequence[int]) -> None:
        self._bench, self._layers, self._nodes = bench, layers, nodes
        self._names = [f"{count} {size}" for count in layers for size in nodes]
        # As the drafters said when the engines began and measured what guesses cost.
        self._level_s = {name: self._drafter(name).level_s for name in self._names}
        self._largest = f"{layers[0]} {max(nodes)}"
        whole_s = self._costs(self._largest).drafting_s(1, MAX_NODES)
        self._round_s = max(0.0, whole_s - self._drafter(self._largest).tree_s)

    def _drafter(self, name: str) -> Any:
        return self._bench.engines[name].runner.drafter  # type: ignore[attr-defined]

    def _costs(self, name: str) -> Any:
        return self._bench.engines[name].scheduler.drafting.cost  # type: ignore[attr-defined]

    def rates(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, float]:
        """Tokens per s of every depth and tree, prompt by prompt in turn; trees always whole."""
        schedulers: dict[str, Any] = {n: self._bench.engines[n].scheduler for n in self._names}
        before = {name: scheduler.drafting for name, scheduler in schedulers.items()}
        for name, scheduler in schedulers.items():
            scheduler.drafting = FixedDrafting(int(name.split()[1]))
        result = self._bench.interleaved(prompts, new_tokens, names=self._names)
        for name, scheduler in schedulers.items():
            scheduler.drafting = before[name]
        return {
            name: sum(one.count for one in answers[0]) / sum(one.seconds for one in answers[0])
            for name, answers in result.items()
        }

    def planned(self, link_s: float, link_bytes_per_s: float, overlap: bool) -> str:
        """What the planner would take, by costs measured at the start and by calibration."""
        drafter = self._drafter(self._largest)
        case = Heterogeneous(
            verify=self._costs(self._largest), hidden=drafter.hidden, itemsize=drafter.itemsize,
            memory_cap=1 << 40, link_s=link_s, link_bytes_per_s=link_bytes_per_s, overlap=overlap,
            round_s=self._round_s,
        )  # fmt: skip
        # A level of a larger tree has more rows, so each size has its own times.
        results = [
            case.rank([self._option(count, size) for count in self._layers], (size,))[0]
            for size in self._nodes
        ]
        best = max(results, key=lambda one: one.tokens_per_s)
        return f"{best.layers} {best.nodes}"

    def _option(self, layers: int, nodes: int) -> DraftOption:
        from shoal.serve.decode.trained import config_of

        name = f"{layers} {nodes}"
        config = config_of("dovetail", Path(self._bench.methods[name]["path"]))  # type: ignore[index]
        return DraftOption(
            layers=layers,
            nbytes=self._drafter(name).memory_bytes(),
            level_s=self._level_s[name],
            right=config.calibration[:_DEPTH],
        )

    def link_bytes_per_token(
        self, name: str, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> float:
        """Bytes on the way for each token of an answer, its prompt's included."""
        drafter = self._drafter(name)
        before, tokens = drafter.link_bytes, 0
        for prompt in prompts:
            tokens += self._bench.answer(name, [prompt], new_tokens).count
        return float(drafter.link_bytes - before) / tokens

    def profile(self, name: str) -> str:
        """Where the time of a round goes."""
        costs, nodes = self._costs(name), int(name.split()[1])
        return (
            f"a step of one row takes {1e3 * costs.seconds(1):.2f} ms, of {1 + nodes} "
            f"{1e3 * costs.seconds(1 + nodes):.2f}; guesses {1e3 * costs.drafting_s(1):.2f} ms"
        )

    def close(self) -> None:
        """End the drafters."""
        for name in self._names:
            self._drafter(name).close()


def tiny(seed: int, *, offloads: bool) -> RunCounts:
    """Count bytes and tokens of a tiny target and an untrained drafter in float64."""
    import torch

    from shoal.ir import ServeJob
    from shoal.model import huggingface
    from shoal.model.drafters import files
    from shoal.model.drafters.fusion import FusionDrafter
    from shoal.serve.engine.build import engine_of
    from shoal.train.zoo import random

    config = llama(64, 2, 4, kv_heads=2, vocab=97, ffn=96, initializer_range=0.12)
    model = random(config, seed).requires_grad_(False)
    net = FusionDrafter(config, 1)
    source = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data.normal_(0, 0.1, generator=source)
    answers, link, uncounted = [], 0.0, 0.0
    with scratch_directory("claim") as home:
        place, drafts = home / "tiny", home / "drafter"
        huggingface.write(place, model)
        kept = files.DrafterConfig(
            name="dovetail", options={"layers": 1}, target=files.fingerprint(place),
            vocab_size=config.vocab_size, hidden=config.hidden, calibration=((0.5, 0.2),) * 3,
        )  # fmt: skip
        files.write(drafts, kept, net.state_dict())
        target = model.to(torch.float64)
        # Stored in fp32 and computed in fp64: offloading would send twice what is stored.
        offload = 2.0 * weight_bytes(place)
        method = None if offloads else {"name": "dovetail", "path": str(drafts), "depth": 3}
        for speculative in (None, method):
            fields = {"model": str(place), "kv_tokens": 512, "threads": 1}
            job = ServeJob.model_validate({**fields, "speculative": speculative})
            engine = engine_of(job, target)[0]
            drafter: Any = None
            if speculative is not None:
                engine.scheduler.drafting = FixedDrafting(6)  # type: ignore[attr-defined]
                drafter = engine.runner.drafter  # type: ignore[attr-defined]
            before = 0 if drafter is None else drafter.link_bytes
            answers += served(engine, requests([range(20)], 60))
            if drafter is not None:
                link = (drafter.link_bytes - before) / len(answers[-1])
                uncounted = abs(float(drafter.link_bytes - drafter.expected_bytes))
                drafter.close()
    wrong = sum(one != two for one, two in zip(*answers, strict=True))
    return RunCounts(offload if offloads else link, offload, uncounted, float(wrong))
