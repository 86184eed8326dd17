"""Training steps of a small model, under one split after another, on the cores of this host.

Products and bandwidths alone do not say what a step takes: ranks wait for each other, gathered
weights are copied, and ranks that share a core take its cache from each other. Here whole steps
are rehearsed; :mod:`shoal.cost.price.rehearsed` reads from them what the operators do not explain.
"""

from __future__ import annotations

import itertools

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.protocols import Context
from shoal.machine.rehearsals import REHEARSALS, REHEARSED
from shoal.machine.worker import Worker

__all__ = ["Steps"]

# Steps that warm up: memory is fetched, pages are touched.
_WARM = 2
# All rehearsals are gone through so often: a host that others use is slow for minutes at a time.
_ROUNDS = 2
# Ranks of a rehearsal a core: in a fast probe every rank has a core of its own.
_CROWDED = 2


@part
class Steps:
    """Steps of the rehearsals of :mod:`shoal.machine.rehearsals`.

    Args:
        names: which rehearsals; empty for all that have at most twice as many ranks as cores,
            or, fast, as many.
        repeats: measured steps of each round; 0 for two rounds of 8 or, fast, one of 2.
    """

    names: tuple[str, ...] = ()
    repeats: int = 0

    def __post_init__(self) -> None:
        require(
            set(self.names) <= set(REHEARSALS),
            "probe.steps.names",
            ", ".join(self.names),
            expected=f"some of {', '.join(REHEARSALS)}",
        )
        require(self.repeats >= 0, "probe.steps.repeats", self.repeats, expected="0 or more")

    def run(self, context: Context) -> list[Measurement]:
        """Quantity ``step`` (s); the note names the rehearsal."""
        repeats = self.repeats or (2 if context.fast else 8)
        cores = len(host.cpus())
        names = self.names or [
            name
            for name, job in REHEARSALS.items()
            if job.parallel.world <= cores * (1 if context.fast else _CROWDED)
        ]
        workers: list[Worker] = []
        took: dict[str, list[float]] = {name: [] for name in names}
        try:
            first = context.worker()
            if first.call("gpu_facts") is not None:
                context.skip("steps", "ranks train on the GPU of this host")
                return []
            most = max(REHEARSALS[name].parallel.world for name in names)
            workers = [Worker() for _ in range(most - 1)]
            with scratch_directory("probe") as place:
                for turn, name in itertools.product(range(1 if context.fast else _ROUNDS), names):
                    job = REHEARSALS[name]
                    ranks = [first, *workers][: job.parallel.world]
                    for rank, worker in enumerate(ranks):
                        worker.send(
                            "rehearse",
                            rank=rank,
                            world=len(ranks),
                            store=str(place / f"{name} {turn}"),
                            job=job.model_dump(mode="json", exclude_unset=True),
                            shape=REHEARSED.model_dump(mode="json"),
                            steps=_WARM + repeats,
                        )
                    answers = [worker.receive() for worker in ranks]
                    # A step is over when its last rank is.
                    took[name] += [max(ends) for ends in zip(*answers, strict=True)][_WARM:]
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
