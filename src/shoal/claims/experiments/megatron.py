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

from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.pipeline_ranks import profile, time_steps
from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun, wire_bytes
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.training.megatron import training_days
from shoal.ir import TrainJob
from shoal.parallel.legal import schedule_of
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.model.config import ModelConfig

# The run of the paper's section 5.1: parameters, tokens, devices, FLOP/s of a device.
_RUN = (175e9, 300e9, 1024, 140e12)
_TENSOR = (2, 4)


@part
class MegatronClaim(BaseClaim, row=22):
    """Interleaved stages, shares of boundaries, and the calculator.

    Args:
        rounds: measured steps of each simulated schedule.
        pairs: timed steps of each schedule on two processes.
    """

    rounds: Annotated[int, Ge(1)] = 30
    pairs: Annotated[int, Ge(1)] = 20

    def collect(self, run: ClaimRun) -> None:
        """Count bytes and compute days; the full run also times schedules, for about 2 min."""
        run.progress("bytes between nodes", 0.0)
        shares = [t * internode_bytes(t, scatter=not run.as_baseline) for t in _TENSOR]
        run.put("internode_share", shares, (internode_bytes(t, scatter=False) for t in _TENSOR))
        run.put("days_175b", training_days(*_RUN) * run.pick(1, 6 / 8))
        if run.quick:
            return
        keep_freed_memory()  # as the ranks of a training run do
        self._simulated(run)
        run.progress("steps of two processes", 0.4)
        config = _model(8, 384)
        jobs = [_job(4, pp=2), _job(4, pp=2, vpp=run.pick(2, 1))]
        result = time_steps(jobs, config, pairs=self.pairs, seed=run.seed)
        baseline, method = result.seconds
        run.put("two_process_speedup", method, baseline, bound=20 / 18)
        run.profile = "\n".join(
            profile(events, title=job.parallel.schedule.name)
            for job, events in zip(jobs, result.events, strict=True)
        )

    def _simulated(self, run: ClaimRun) -> None:
        """Simulated steps with measured passes, round by round."""
        from shoal.claims.lab.measure_passes import measure_link, measure_passes

        config = _model(16, 256)
        # Four micro-batches are timed; eight are simulated.
        timed = [_job(4, pp=4), _job(4, pp=4, vpp=4)]
        run.progress("passes of every stage", 0.1)
        plain, interleaved = run.remember(
            "passes", lambda: measure_passes(timed, config, rounds=self.rounds)
        )
        nbytes = int(plain.rounds[0].boundary_bytes)
        link = run.remember("link", lambda: measure_link(nbytes))
        first, second = schedule_of(_job(8, pp=4)), schedule_of(_job(8, pp=4, vpp=4))
        baseline = [simulate(first, costs, link).makespan for costs in plain.rounds]
        method = [simulate(second, costs, link).makespan for costs in interleaved.rounds]
        run.put("simulated_speedup", run.pick(method, baseline), baseline, bound=33 / 26.25)


def _model(layers: int, hidden: int) -> ModelConfig:
    # A vocabulary of bytes keeps the first and the last stage like the others.
    return llama(hidden, layers, max(4, hidden // 64))


def _job(microbatches: int, *, vpp: int = 1, seq_len: int = 256, **parallel: Any) -> TrainJob:
    split = {**parallel, "vpp": vpp, "schedule": "interleaved" if vpp > 1 else "1f1b"}
    return train_job(
        seq_len=seq_len, global_batch=microbatches, microbatch=1, steps=1, parallel=split
    )


def internode_bytes(tp: int, *, scatter: bool) -> float:
    """Bytes of one step between two nodes of ``tp`` ranks, each of which has one stage.

    ``scatter``: each sends its share of a boundary; else each sends all of it.
    """
    from shoal.claims.lab.measure_passes import batch
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter

    config = _model(2, 32)
    job = _job(4, pp=2, tp=tp, seq_len=16, scatter_gather=scatter)

    def step(comm: ThreadComm) -> None:
        RankSession(comm, job, config).passes(batch(job, config.vocab_size))

    meter = Meter([])
    run_ranks(2 * tp, step, meter=meter, ranks_per_node=tp)
    return wire_bytes(meter.totals(), "scope=node")
