"""The probe of training steps: a small model, under one split after another, on this host's cores.

Products and bandwidths alone do not say what a step takes: ranks wait for each other, gathered
weights are copied, and ranks that share a core take its cache from each other. Here whole steps
are rehearsed; :mod:`shoal.cost.price.rehearsed` reads from them what the operators do not explain.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Annotated, Any

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.native import cpu_flags
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.protocols import ProbeContext
from shoal.machine.rehearsals import REHEARSALS, REHEARSED
from shoal.machine.worker import TorchWorker

# Steps that warm up: memory is fetched, pages are touched.
_WARM = 2
# All rehearsals are gone through so often: a host that others use is slow for minutes at a time.
_ROUNDS = 2
# CPU flags, any of which says that bf16 is multiplied by the CPU and not emulated.
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
# Seconds of a rehearsal, fast or full, after which no further step begins: without units for
# bf16 one step takes as long as thirty in fp32.
_BUDGET_S = (3.0, 30.0)
# Ranks of a rehearsal a core: in a fast probe every rank has a core of its own.
_CROWDED = 2
_PATIENCE_S = 180.0
_SEED = 0


@part
class StepsProbe:
    """Time the steps of the rehearsals of :mod:`shoal.machine.rehearsals`.

    Args:
        names: names of the rehearsals; empty for all with at most twice as many ranks as cores
            (with fast, as many as cores), and bf16 only where the CPU has bf16 products.
        repeats: measured steps per round; 0 for two rounds of 8 or, with fast, one of 2. Steps that
            take seconds are measured less often.
    """

    names: tuple[str, ...] = ()
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require(
            set(self.names) <= set(REHEARSALS),
            "probe.steps.names",
            ", ".join(self.names),
            expected=f"some of {', '.join(REHEARSALS)}",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantity ``step`` (s); the note names the rehearsal."""
        repeats = self.repeats or (2 if context.fast else 8)
        cores = len(host.cpus())
        names = self.names or [
            name
            for name, job in REHEARSALS.items()
            if job.parallel.world <= cores * (1 if context.fast else _CROWDED)
            and (job.precision == "fp32" or _BF16 & cpu_flags() or not context.fast)
        ]
        workers: list[TorchWorker] = []
        took: dict[str, list[float]] = {name: [] for name in names}
        try:
            first = context.worker()
            if first.call("gpu_facts") is not None:
                context.skip("steps", "ranks train on the GPU of this host")
                return []
            most = max(REHEARSALS[name].parallel.world for name in names)
            workers = [TorchWorker() for _ in range(most - 1)]
            with scratch_directory("probe") as place:
                for turn, name in itertools.product(range(1 if context.fast else _ROUNDS), names):
                    job = REHEARSALS[name]
                    ranks = [first, *workers][: job.parallel.world]
                    for rank, worker in enumerate(ranks):
                        worker.send(
                            "shoal.train.rehearse:rehearse",
                            rank=rank,
                            world=len(ranks),
                            store=str(place / f"{name} {turn}"),
                            job=job.model_dump(mode="json", exclude_unset=True),
                            shape=REHEARSED.model_dump(mode="json"),
                            steps=_WARM + repeats,
                            budget_s=_BUDGET_S[0 if context.fast else 1],
                        )
                    answers = [worker.receive(timeout_s=_PATIENCE_S) for worker in ranks]
                    # A step is over when its last rank is.
                    slowest = [max(ends) for ends in zip(*answers, strict=True)]
                    took[name] += slowest[_WARM:] or slowest[-1:]
        except (MissingExtraError, MachineError) as cause:
            context.skip("steps", str(cause))
            return []
        finally:
            for worker in workers:
                worker.close()
        return [
            context.measured("steps", "step", "s", seconds, note=name)
            for name, seconds in took.items()
        ]


def rehearse(
    rank: int,
    world: int,
    store: str,
    job: dict[str, Any],
    shape: dict[str, Any],
    steps: int,
    budget_s: float,
) -> list[float]:
    """Seconds of each step of a job on made-up tokens; every rank of the job calls it.

    Args:
        rank: this rank.
        world: ranks of the job, all on this host.
        store: path of a file where they meet; it does not exist yet.
        job: a :class:`~shoal.ir.TrainJob` with every choice made.
        shape: the :class:`~shoal.ir.ModelShape`; the job's name of a model counts for nothing.
        steps: at most; the first ones warm up and are counted, too.
        budget_s: no further step begins once those of a rank have taken so long.
    """
    import torch

    from shoal.core.meter import Meter
    from shoal.core.parts import table
    from shoal.ir import ModelShape, TrainJob
    from shoal.kernel.fused.choice import choose
    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.engine import ParallelEngine
    from shoal.parallel.legal import check_split
    from shoal.parallel.tensor.rows import ReplicaSequences
    from shoal.train.allocator import keep_freed_memory
    from shoal.train.build import FreshWeights

    request, known = TrainJob.model_validate(job), ModelShape.model_validate(shape)
    taken_by = choose(request.kernel, known, request.precision, compiled=request.compile)
    request = request.model_copy(update={"kernel": taken_by})
    torch.set_num_threads(request.threads or max(1, (os.cpu_count() or 1) // world))
    keep_freed_memory()
    weights = FreshWeights(ModelConfig.from_shape(known), _SEED)
    taken = []
    with Meter([]) as meter:
        comm = TorchComm(
            meter, rank=rank, world=world, rendezvous=f"file://{store}", timeout_s=30.0
        )
        try:
            engine = ParallelEngine(request, check_split(request, known), weights, comm)
            updater = table("optimizer").build(request.optimizer).build(engine.sharded.owned())
            rows = request.global_batch // engine.replicas
            generator = torch.Generator().manual_seed(_SEED + engine.replica)
            tokens = torch.randint(
                known.vocab_size, (rows, request.seq_len + 1), generator=generator
            )
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            count = float(request.global_batch * request.seq_len)
            for step in range(steps):
                begin = time.perf_counter()
                mine = ReplicaSequences(inputs, targets, None, engine.replica * rows, step)
                engine.backward(mine, request.microbatch or rows, count)
                engine.finish()
                norm = engine.grad_norm()
                engine.sharded.scale_gradients((1.0 / (norm + 1e-6)).clamp(max=1.0))
                updater.step(1.0)
                engine.sharded.publish()
                taken.append(time.perf_counter() - begin)
                spent = torch.tensor(sum(taken))
                comm.all_reduce(spent, tag="count", op="max").wait()
                if spent.item() >= budget_s:
                    break
        finally:
            comm.close()
    return taken
