"""From a serving job that guesses to its runner, and to how much its scheduler lets it guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import require
from shoal.core.parts import Choice, table
from shoal.ir import Output, Request, SchedulerLimits, ServeJob, SpeculationEstimator
from shoal.plan.batching.common import Queues
from shoal.plan.trees.drafting import ProfitableDrafting
from shoal.serve.decode.captured import CapturedRows
from shoal.serve.decode.costs import measure_costs
from shoal.serve.decode.dovetail.layers import LaterRows
from shoal.serve.decode.protocols import Acceptance, Adjustable, HostingDrafter, Speculator
from shoal.serve.decode.runner import SpeculativeRunner
from shoal.serve.engine.captured import CapturedModel, recordable
from shoal.serve.engine.hooks import EngineHook, ExecutedStep
from shoal.serve.engine.loop import Engine
from shoal.serve.engine.runner import FlatModel

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder


def acceptance(choice: Choice, *, lossless: bool = False) -> Acceptance:
    """The rule that a speculator names.

    Raises:
        ConfigError: it changes what the model would say, and the job does not allow that.
    """
    rule: Acceptance = table("accept").build(choice, where="speculative.accept")
    require(
        rule.lossless or not lossless,
        "speculative.accept",
        choice.name,
        expected="greedy, rejection or sample_match with lossless: true",
        hint=f"{choice.name} also accepts what the model would not have drawn",
    )
    return rule


def speculative_runner(built: EngineBuilder, options: dict[str, Any]) -> SpeculativeRunner:
    """The runner of a job that guesses.

    Raises:
        ShoalError: the drafter's files are missing, or were made for another model.
    """
    job, model, cache = built.job, built.model, built.cache
    assert job.speculative is not None and job.max_position is not None
    part: Speculator = table("speculative").build(job.speculative, where="speculative")
    drafter = part.drafter(job, model)
    left: FlatModel = model
    recorded: CapturedRows | None = None
    # Passes over trees are recorded on a CPU alone.
    attention = recordable(built) if cache.device.type == "cpu" else None
    if isinstance(drafter, HostingDrafter) and drafter.target_layers:
        left, cache = drafter.left(model, cache)
        if attention is not None:
            recorded = LaterRows(left, cache, attention, job.max_position)
    elif attention is not None:
        recorded = CapturedRows(model, cache, attention, job.max_position)
        captured = CapturedModel(model, cache, attention, job.max_position)
        options = {**options, "hooks": [*options["hooks"], captured]}
    return SpeculativeRunner(
        left,
        cache,
        drafter=drafter,
        accept=acceptance(part.accept, lossless=job.lossless),
        recorded=recorded,
        **options,
    )


class SpeculationHook(EngineHook):
    """Rejects requests that an acceptance rule does not support, and counts draft tokens."""

    kind: ClassVar[str] = "speculation"

    def __init__(self, runner: SpeculativeRunner) -> None:
        self._runner = runner
        self._trees = self._guesses = self._right = 0

    def check(self, request: Request) -> None:
        self._runner.accept.check(request.params)

    def committed(self, done: ExecutedStep, outputs: Sequence[Output]) -> None:
        """Count the guesses of a step, and those that held."""
        for request_id, nodes in done.result.guessed.items():
            if nodes:
                self._trees += 1
                self._guesses += nodes
                self._right += len(done.result.tokens[request_id]) - 1

    def metrics(self) -> Mapping[str, float]:
        return {
            "draft_trees_total": self._trees,
            "draft_tokens_total": self._guesses,
            "draft_tokens_accepted_total": self._right,
        }


def speculate(
    engine: Engine, runner: SpeculativeRunner, limits: SchedulerLimits, job: ServeJob
) -> None:
    """Let an engine guess where it pays, by what steps cost here; measures that."""
    scheduler = engine.scheduler
    assert job.speculative is not None
    assert isinstance(scheduler, Queues)
    drafter = runner.drafter
    if isinstance(drafter, Adjustable):
        ways: list[ProfitableDrafting] = []
        for number, expected in enumerate(drafter.ways()):
            drafter.take(number)
            ways.append(ProfitableDrafting(expected, measure_costs(runner, limits)))
        best = max(range(len(ways)), key=lambda way: ways[way].rate(ways[way].best(1), 1))
        drafter.take(best)
        scheduler.drafting = ways[best]
    else:
        part: SpeculationEstimator = table("speculative").build(
            job.speculative, where="speculative"
        )
        scheduler.drafting = ProfitableDrafting(
            part.expects().tokens, measure_costs(runner, limits)
        )
    engine.register(SpeculationHook(runner))
