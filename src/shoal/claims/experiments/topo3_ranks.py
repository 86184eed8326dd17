"""What the claim of three-level ZeRO runs: ranks as threads, their bytes, memory and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.claims.experiments.tiny import train_job
from shoal.claims.frame import wire_bytes

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.ir import TrainJob
    from shoal.parallel.engine import ParallelEngine

__all__ = ["RANKS", "errors", "learn", "node_bytes", "uncounted"]

RANKS, _PER_NODE = 8, 4
_COUNTED = ("parameters", "gradients")


def _job(shard: Any, *, microbatches: int) -> TrainJob:
    return train_job(
        seq_len=16,
        global_batch=RANKS * microbatches,
        microbatch=1,
        recompute="full",
        parallel={"dp": RANKS},
        shard=shard,
        grad_clip=0.05,
    )


def _config() -> Any:
    """A model of which every row count is a multiple of the ranks: nothing is padded."""
    from shoal.claims.experiments.arch_training import mini

    return mini(64, 4, tied=False)


def _stepped(shard: Any, microbatches: int, look: Any) -> list[Any]:
    """One training step on eight ranks, two nodes of two packages of two; what ``look`` saw."""
    import torch

    from shoal.claims.lab.same_as_one import SeededWeights, tokens
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import run_ranks

    config, job = _config(), _job(shard, microbatches=microbatches)
    weights = SeededWeights(config)

    def on(comm: ThreadComm) -> Any:
        session = RankSession(comm, job, config, weights)
        engine = session.engine
        adam = torch.optim.AdamW(list(engine.sharded.owned().values()))
        rows = tokens(job, config.vocab_size, 0, documents=False)
        own = session.rows(rows.inputs, rows.targets, 0)
        engine.backward(own, 1, float(job.global_batch * job.seq_len))
        held = look(engine)
        engine.finish()
        adam.step()
        engine.sharded.publish()
        return held, comm.meter.totals()

    return run_ranks(RANKS, on, ranks_per_node=_PER_NODE)


def node_bytes(shard: Any, microbatches: int) -> float:
    """Bytes that a step of all ranks sends between the nodes, metered."""
    return sum(
        wire_bytes(totals, "scope=node", f"tag={tag}")
        for _, totals in _stepped(shard, microbatches, lambda _: None)
        for tag in _COUNTED
    )


def uncounted(shard: Any) -> tuple[float, ...]:
    """Per rank, bytes held at the end of backward beside 2 p / g0 + 2 p / g1 + 4 p / n.

    The moments are 8 p / n more, of the optimizer, whatever the sharding.
    """
    from shoal.cost.arithmetic import parameters

    count = parameters(_config().shape())
    g0, g1 = shard["levels"]

    def look(engine: ParallelEngine) -> dict[str, int]:
        numbers: dict[str, int] = engine.sharded.held_bytes()  # type: ignore[attr-defined]
        return numbers

    formula = {"weights": 2 * count / g0, "gradients": 2 * count / g1, "masters": 4 * count / RANKS}
    results = []
    for held, _ in _stepped(shard, 2, look):
        results.append(float(sum(abs(held[name] - formula[name]) for name in formula)))
    return tuple(results)


def errors(shards: tuple[Any, ...]) -> tuple[float, ...]:
    """Largest relative difference to one process after two steps, in float64."""
    from shoal.claims.lab.same_as_one import same_as_one

    jobs = (_job(shard, microbatches=2) for shard in shards)
    return tuple(same_as_one(job, _config(), steps=2).largest for job in jobs)


def learn(shard: Any, seed: int, steps: int, ranks: int) -> float:
    """Held-out loss in nats a byte of a small model that ``ranks`` threads have trained."""
    from shoal.claims.experiments.arch_training import mini
    from shoal.claims.experiments.co2_ranks import CO2Worker
    from shoal.claims.lab.thread_ranks import run_ranks

    job = train_job(
        seq_len=64,
        global_batch=8,
        microbatch=1,
        parallel={"dp": ranks},
        shard=shard,
        optimizer={"name": "adamw", "lr": 3e-3},
        seed=seed,
    )

    def on(comm: ThreadComm) -> float:
        return CO2Worker(comm, job, mini(64, 3), steps).learned()

    return run_ranks(ranks, on, ranks_per_node=ranks // 2, timeout_s=300.0)[0]
