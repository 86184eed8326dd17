"""[93] SkipPipe: do routes that skip stages pay on slow networks, and do models bear it?

Source: Blagoev et al., SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in
Heterogeneous Networks, 2025.

On 20 nodes in the regions of a public table, 6 stages of which each micro-batch visits 4: the
simulated step beside the whole pipeline, arranged and planned by the same solver, and beside random
paths; ranks that skip beside one process with masked layers; the loss of a model trained on these
routes, whole and without its two middle stages. The averaging of gradients, which follows the step,
is in the details. The A/A run lets every micro-batch visit all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import corpus_of, llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.kernel.threads import torch_threads
from shoal.plan.routes.conflicts import random_routes
from shoal.plan.routes.network import REGIONS, WanNetwork
from shoal.plan.routes.plan import RoutePlan, RouteTask, plan

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

NODES, STAGES, KEEP, MICROBATCHES = 20, 6, 4, 20
# Eight regions as in the publication of the table, and all ten.
EIGHT = tuple(region for region in REGIONS if region not in ("singapore", "sydney"))
# Layers, a stage each, that are left when the two middle ones vanish.
LEFT = (0, 1, 4, 5)
WHOLE = tuple(range(STAGES))
DRAWS = 5
CONTEXT = 128
BATCH = 32


def networks() -> tuple[WanNetwork, ...]:
    """Twenty nodes distributed over eight regions, and to ten."""
    return (
        WanNetwork.wan(NODES, EIGHT).model_copy(update={"name": "eight regions"}),
        WanNetwork.wan(NODES).model_copy(update={"name": "ten regions"}),
    )


def task(keep: int) -> RouteTask:
    """1.5 billion parameters in 24 layers of width 2048 on nodes of 20 TFLOP/s.

    Micro-batches of 4096 tokens: 2 FLOP a token and parameter, boundaries of 2 byte a number.
    """
    return RouteTask(
        stages=STAGES,
        keep=keep,
        microbatches=MICROBATCHES,
        forward_s=0.1,
        backward_s=0.2,
        head_s=0.027,
        boundary_bytes=2.0 * 4096 * 2048,
        sync_bytes=2.0 * 1.5e9 / STAGES,
        effort=50,
    )


@part
class SkipPipeClaim(BaseClaim, row=93):
    """Simulated networks, and a small model trained on the routes.

    Args:
        width: width of the model's layers.
        steps: optimizer steps of each of two trainings.
        lr: peak learning rate.
        corpus: where the text is from.
    """

    width: Annotated[int, MultipleOf(32), Ge(32)] = 64
    steps: Annotated[int, Ge(20)] = 600
    lr: Annotated[float, Gt(0), Lt(1)] = 6e-3
    corpus: str = "stdlib"

    def collect(self, run: ClaimRun) -> None:
        """Plan and simulate, compare gradients, and train; see the module's description."""
        planned = run.remember("planned", lambda: _planned(run.context))
        full, skips = planned[STAGES], planned[KEEP]
        chosen = run.pick(skips, full)
        drawn = run.remember("drawn", lambda: [time for found in skips for time in _drawn(found)])
        times = [found.timeline.makespan for found in chosen]
        run.put("full_over_skippipe", times, (found.timeline.makespan for found in full))
        run.put("random_over_skippipe", run.pick(np.repeat(times, DRAWS).tolist(), drawn), drawn)
        run.put("gradient_error", _gradient_error(plain=run.as_baseline))
        run.details["with_sync"] = [
            (a.timeline.makespan + a.sync_s) / (b.timeline.makespan + b.sync_s)
            for a, b in zip(full, chosen, strict=True)
        ]
        if run.quick:
            return
        whole = run.remember("whole", lambda: self._trained(run.context, full[0], 0.1))
        kept = whole
        if not run.as_baseline:
            kept = self._trained(run.context, skips[0], 0.6)
        run.put("loss_difference", kept["whole"], whole["whole"])
        inflation = (math.exp(one["left"] - one["whole"]) for one in (kept, whole))
        run.put("inflation_ratio", *inflation)

    def _trained(
        self, context: ExperimentContext, planned: RoutePlan, done: float
    ) -> dict[str, float]:
        """Held-out losses of a model that was trained on these routes."""
        from shoal.claims.experiments.learning_curves_charlm import read_texts

        choice = corpus_of(context.data, self.corpus)
        texts = context.remember(
            "texts",
            lambda: read_texts(choice, train_chars=2**22, heldout_chars=2**15, seed=context.seed),
        )

        # The order of sums, and so the losses, would follow the number of threads.
        with torch_threads(1):
            return train_routes(
                planned, texts.train, texts.heldout, width=self.width, steps=self.steps,
                lr=self.lr, seed=context.seed,
                progress=lambda share: context.progress("training", done + share * 0.4),
            )  # fmt: skip


def _planned(context: ExperimentContext) -> dict[int, list[RoutePlan]]:
    result: dict[int, list[RoutePlan]] = {}
    for keep in (STAGES, KEEP):
        for network in networks():
            context.progress(f"routes through {keep} of {STAGES} stages", 0.0)
            result.setdefault(keep, []).append(plan(network, task(keep)))
    return result


def _drawn(skips: RoutePlan) -> list[float]:
    """Seconds of a step by random paths through the same arrangement of nodes."""
    times = []
    for seed in range(DRAWS):
        routes = random_routes(skips.problem, seed=seed)
        drawn = RoutePlan(
            skips.network, skips.task, skips.stages, skips.problem, skips.tick_s, routes
        )
        times.append(drawn.timeline.makespan)
    return times


def _gradient_error(*, plain: bool) -> float:
    """Worst error of ranks that skip, against the masked model; of ``plain``, the whole one."""
    from shoal.claims.lab.masked import same_as_masked
    from shoal.claims.lab.same_as_one import same_as_one

    split = {"pp": 5, "schedule": {"name": "skippipe", "keep": 2, "of": 3}}
    job = train_job(seq_len=8, global_batch=6, microbatch=1, steps=1, parallel=split)
    config = model_config(32, layers=3, context=8)
    with torch_threads(1):
        return (same_as_one if plain else same_as_masked)(job, config, steps=2).largest


def model_config(width: int, *, layers: int = STAGES, context: int = CONTEXT) -> ModelConfig:
    """A character model with a layer a stage."""
    from shoal.claims.experiments.learning_curves_charlm import VOCAB

    heads = width // 32
    kv_heads = heads // 2 if heads % 2 == 0 else 1
    ffn = 8 * width // 3 // 8 * 8
    return llama(width, layers, heads, kv_heads=kv_heads, vocab=VOCAB, ffn=ffn, length=context)


def train_routes(
    planned: RoutePlan,
    train: np.ndarray,
    heldout: np.ndarray,
    *,
    width: int,
    steps: int,
    lr: float,
    seed: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> dict[str, float]:
    """Train a character model whose micro-batches take planned routes, one sequence each.

    Returns the held-out loss, nats a character: ``whole``, and ``left``, without the middle stages.
    """
    import torch

    from shoal.claims.experiments.arch_training import windows
    from shoal.claims.lab.masked import layer_routes, masked_backward
    from shoal.core.random import generator
    from shoal.model.initialise import empty, init_weights
    from shoal.parallel.tensor.rows import ReplicaSequences

    config = model_config(width)
    routes = layer_routes(config.shape(), planned.schedule)
    model = empty(config)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        random = generator(seed, purpose="skippipe.batch", step=step)
        starts = random.integers(0, len(train) - CONTEXT - 1, len(routes))
        inputs, targets = windows(train, starts, CONTEXT)
        warm = min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = lr * warm * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        masked_backward(model, ReplicaSequences(inputs, targets, None, 0, step), routes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            progress(step / steps)
    return {"whole": _loss(model, heldout, WHOLE), "left": _loss(model, heldout, LEFT)}


def _loss(model: Transformer, heldout: np.ndarray, layers: tuple[int, ...]) -> float:
    """Held-out loss of these layers alone, in nats a character."""
    import torch

    from shoal.claims.lab.masked import visiting

    count = len(heldout) // (CONTEXT + 1)
    rows = torch.from_numpy(
        heldout[: count * (CONTEXT + 1)].reshape(count, CONTEXT + 1).astype(np.int64)
    )
    with torch.no_grad(), visiting(model, layers):
        losses = [model.loss_sum(p[:, :-1], p[:, 1:]) for p in torch.split(rows, BATCH)]
    return float(sum(losses)) / (count * CONTEXT)
