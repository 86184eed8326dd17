"""Megatron-LM: more stages a rank make a shorter bubble, and a boundary crosses nodes once.

- Four ranks, eight micro-batches, four stages a rank: the passes of every stage are measured on
  this machine, and both schedules are simulated with them and with the measured cost of a
  message between two processes.
- Two processes, four micro-batches, two stages a rank: both schedules train the same model in
  turn, and whole steps are timed.
- The bytes that cross between nodes, counted while t tensor-parallel ranks train with and
  without sending one share each.
- The days of the paper's 175B-parameter run by its own formula.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.pipeline_ranks import profile, time_steps
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.training.megatron import training_days
from shoal.ir import TrainJob
from shoal.parallel.legal import schedule_of
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.model.config import ModelConfig

__all__ = ["MegatronClaim", "internode_bytes"]

# The run of the paper's section 5.1: parameters, tokens, devices, FLOP/s of a device.
_RUN = (175e9, 300e9, 1024, 140e12)
_TENSOR = (2, 4)


@part
class MegatronClaim(BaseClaim):
    """Interleaved stages, shares of boundaries, and the calculator.

    Args:
        rounds: measured steps of each simulated schedule.
        pairs: timed steps of each schedule on two processes.
    """

    rounds: Annotated[int, Ge(1)] = 9
    pairs: Annotated[int, Ge(1)] = 20

    rows: ClassVar[tuple[int, ...]] = (22,)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Count bytes and compute days; the full run also times schedules, for about 2 min."""
        context.progress("bytes between nodes", 0.0)
        shares = [t * internode_bytes(t, scatter=not as_baseline) for t in _TENSOR]
        whole = [internode_bytes(t, scatter=False) for t in _TENSOR]
        days = training_days(*_RUN) * (6 / 8 if as_baseline else 1)
        metrics = {
            "internode_share": PairedSamples(method=tuple(shares), baseline=tuple(whole)),
            "days_175b": PairedSamples(method=(days,)),
        }
        if quick:
            return ClaimSamples(metrics=metrics)
        keep_freed_memory()  # as the ranks of a training run do
        details: dict[str, JsonValue] = {}
        metrics["simulated_speedup"] = self._simulated(context, details, as_baseline)
        context.progress("steps of two processes", 0.4)
        metrics["two_process_speedup"], result = self._processes(context, as_baseline)
        return ClaimSamples(
            metrics=metrics,
            bounds={"simulated_speedup": 33 / 26.25, "two_process_speedup": 20 / 18},
            profile=result,
            details=details,
        )

    def _simulated(
        self, context: ExperimentContext, details: dict[str, JsonValue], as_baseline: bool
    ) -> PairedSamples:
        """Simulated steps with measured passes, round by round."""
        from shoal.claims.lab.measure_passes import measure_link, measure_passes

        config = _model(num_layers=16, hidden=256)
        # Four micro-batches are timed; eight are simulated.
        timed = [_job(4, pp=4), _job(4, pp=4, vpp=4)]
        context.progress("passes of every stage", 0.1)
        plain, interleaved = context.remember(
            "passes", lambda: measure_passes(timed, config, rounds=self.rounds)
        )
        nbytes = int(plain.rounds[0].boundary_bytes)
        link = context.remember("link", lambda: measure_link(nbytes))
        first, second = schedule_of(_job(8, pp=4)), schedule_of(_job(8, pp=4, vpp=4))
        baseline = [simulate(first, costs, link).makespan for costs in plain.rounds]
        method = [simulate(second, costs, link).makespan for costs in interleaved.rounds]
        details["passes_s"] = {
            "1f1b": {k: list(v) for k, v in plain.median.seconds.items()},
            "interleaved": {k: list(v) for k, v in interleaved.median.seconds.items()},
        }
        details["message_s"] = link.seconds(0, 1, nbytes)
        details["message_bytes"] = nbytes
        return PairedSamples(
            method=tuple(baseline if as_baseline else method), baseline=tuple(baseline)
        )

    def _processes(
        self, context: ExperimentContext, as_baseline: bool
    ) -> tuple[PairedSamples, str]:
        """Steps of two processes, in turn."""
        config = _model(num_layers=8, hidden=384)
        jobs = [_job(4, pp=2), _job(4, pp=2, vpp=1 if as_baseline else 2)]
        result = time_steps(jobs, config, pairs=self.pairs, seed=context.seed)
        baseline, method = result.seconds
        notes = [
            profile(events, title=job.parallel.schedule.name)
            for job, events in zip(jobs, result.events, strict=True)
        ]
        return PairedSamples(method=method, baseline=baseline), "\n".join(notes)


def _model(**changes: Any) -> ModelConfig:
    from shoal.model.config import ModelConfig

    hidden = int(changes["hidden"])
    heads = max(4, hidden // 64)
    # A vocabulary of bytes keeps the first and the last stage like the others.
    return ModelConfig(
        family="llama",
        vocab_size=256,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=3 * hidden,
        max_position=256,
        **changes,
    )


def _job(microbatches: int, *, vpp: int = 1, seq_len: int = 256, **parallel: Any) -> TrainJob:
    split: dict[str, Any] = {**parallel, "vpp": vpp}
    split["schedule"] = "interleaved" if vpp > 1 else "1f1b"
    return TrainJob.model_validate(
        {
            "model": "shoal-0.3m",
            "seq_len": seq_len,
            "global_batch": microbatches,
            "microbatch": 1,
            "precision": "fp32",
            "steps": 1,
            "parallel": split,
        }
    )


def internode_bytes(tp: int, *, scatter: bool) -> float:
    """Bytes of one step between two nodes of ``tp`` ranks, each of which has one stage.

    Args:
        tp: tensor-parallel ranks of a stage.
        scatter: each sends its share of a boundary; else each sends all of it.
    """
    from shoal.claims.lab.measure_passes import PlaceholderWeights, batch
    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter
    from shoal.parallel.engine import ParallelEngine
    from shoal.parallel.legal import check_split

    config = _model(num_layers=2, hidden=32)
    job = _job(4, pp=2, tp=tp, seq_len=16, scatter_gather=scatter)
    schedule = check_split(job, config.shape())

    def step(comm: ThreadComm) -> None:
        engine = ParallelEngine(job, schedule, PlaceholderWeights(config), comm)
        rows = batch(job, config.vocab_size)
        engine.backward(rows, 1, rows.targets.numel())
        engine.finish()

    meter = Meter([])
    run_ranks(2 * tp, step, meter=meter, ranks_per_node=tp)
    return sum(
        total
        for name, total in meter.totals().items()
        if name.startswith("wire_bytes{") and "scope=node" in name
    )
