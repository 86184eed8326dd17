"""From a serving job that guesses to its runner, and to how much its scheduler lets it guess."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import require
from shoal.core.parts import Choice, table
from shoal.ir import Foretold, Limits, ServeJob
from shoal.kernel.protocols import Ready
from shoal.model.transformer import Transformer
from shoal.plan.batching.common import Queues
from shoal.plan.trees.drafting import Paying
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import CapturedRows
from shoal.serve.decode.costs import measure_costs
from shoal.serve.decode.dovetail.layers import LaterRows
from shoal.serve.decode.protocols import Acceptance, Adjustable, Hosting, Speculator
from shoal.serve.decode.runner import SpeculativeRunner
from shoal.serve.engine.captured import Captured
from shoal.serve.engine.loop import Engine
from shoal.serve.engine.runner import FlatModel

__all__ = ["speculate", "speculative_runner"]


def acceptance(choice: Choice, *, lossless: bool = False) -> Acceptance:
    """The rule that a speculator names.

    Args:
        choice: of it.
        lossless: of the job.

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


def speculative_runner(
    job: ServeJob,
    model: Transformer,
    cache: PagedCache,
    recordable: Ready | None,
    options: dict[str, Any],
) -> SpeculativeRunner:
    """The runner of a job that guesses.

    Args:
        job: what is served.
        model: ready to serve.
        cache: its own.
        recordable: the kernel of attention, where steps can be recorded.
        options: of the runner.

    Raises:
        ShoalError: the drafter's files are missing, or were made for another model.
    """
    assert job.speculative is not None and job.max_position is not None
    part: Speculator = table("speculative").build(job.speculative, where="speculative")
    drafter = part.drafter(job, model)
    left: FlatModel = model
    recorded: CapturedRows | None = None
    captured = None
    if isinstance(drafter, Hosting) and drafter.target_layers:
        left, cache = drafter.left(model, cache)
        if recordable is not None:
            recorded = LaterRows(left, cache, recordable, job.max_position)
    elif recordable is not None:
        recorded = CapturedRows(model, cache, recordable, job.max_position)
        captured = Captured(model, cache, recordable, job.max_position)
    return SpeculativeRunner(
        left,
        cache,
        drafter=drafter,
        accept=acceptance(part.accept, lossless=job.lossless),
        recorded=recorded,
        captured=captured,
        **options,
    )


def speculate(engine: Engine, runner: SpeculativeRunner, limits: Limits, job: ServeJob) -> None:
    """Let an engine guess where it pays, by what steps cost here; measures that."""
    scheduler = engine.scheduler
    assert job.speculative is not None
    assert isinstance(scheduler, Queues)
    drafter = runner.drafter
    if isinstance(drafter, Adjustable):
        ways: list[Paying] = []
        for number, expected in enumerate(drafter.ways()):
            drafter.take(number)
            ways.append(Paying(expected, measure_costs(runner, limits)))
        best = max(range(len(ways)), key=lambda way: ways[way].rate(ways[way].best(1), 1))
        drafter.take(best)
        scheduler.drafting = ways[best]
    else:
        part: Foretold = table("speculative").build(job.speculative, where="speculative")
        scheduler.drafting = Paying(part.expects().tokens, measure_costs(runner, limits))
    engine.check = runner.accept.check
