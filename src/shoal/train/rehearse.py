"""Training steps on made-up tokens, as the probe of this machine has them run: nothing is kept."""

from __future__ import annotations

import os
import time
from typing import Any

__all__ = ["rehearse"]

_SEED = 0


def rehearse(
    rank: int, world: int, store: str, job: dict[str, Any], shape: dict[str, Any], steps: int
) -> list[float]:
    """Seconds of each step of a job; every rank of the job calls it.

    Args:
        rank: this rank.
        world: ranks of the job, all on this host.
        store: path of a file where they meet; it does not exist yet.
        job: a :class:`~shoal.ir.TrainJob` with every choice made.
        shape: the :class:`~shoal.ir.ModelShape`; the job's name of a model counts for nothing.
        steps: how many; the first ones warm up and are counted, too.
    """
    import torch

    from shoal.core.meter import Meter
    from shoal.core.parts import table
    from shoal.ir import ModelShape, TrainJob
    from shoal.kernel.fused.choice import choose
    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.engine import Engine
    from shoal.parallel.legal import check_split
    from shoal.parallel.tensor.rows import Rows
    from shoal.train.allocator import keep_freed_memory
    from shoal.train.build import FreshWeights

    asked, known = TrainJob.model_validate(job), ModelShape.model_validate(shape)
    taken_by = choose(asked.kernel, known, asked.precision, compiled=asked.compile)
    asked = asked.model_copy(update={"kernel": taken_by})
    torch.set_num_threads(asked.threads or max(1, (os.cpu_count() or 1) // world))
    keep_freed_memory()
    weights = FreshWeights(ModelConfig.from_shape(known), _SEED)
    taken = []
    with Meter([]) as meter:
        comm = TorchComm(
            meter, rank=rank, world=world, rendezvous=f"file://{store}", timeout_s=30.0
        )
        try:
            engine = Engine(asked, check_split(asked, known), weights, comm)
            updater = table("optimizer").build(asked.optimizer).build(engine.sharded.owned())
            rows = asked.global_batch // engine.replicas
            generator = torch.Generator().manual_seed(_SEED + engine.replica)
            tokens = torch.randint(known.vocab_size, (rows, asked.seq_len + 1), generator=generator)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            count = float(asked.global_batch * asked.seq_len)
            for step in range(steps):
                begin = time.perf_counter()
                mine = Rows(inputs, targets, None, engine.replica * rows, step)
                engine.backward(mine, asked.microbatch or rows, count)
                engine.finish()
                norm = engine.grad_norm()
                engine.sharded.scale_gradients((1.0 / (norm + 1e-6)).clamp(max=1.0))
                updater.step(1.0)
                engine.sharded.publish()
                taken.append(time.perf_counter() - begin)
        finally:
            comm.close()
    return taken
