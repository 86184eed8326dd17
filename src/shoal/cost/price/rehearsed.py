"""What whole steps take beyond their operators, carried over from rehearsed steps to others.

The probe runs a small model under one split after another (:mod:`shoal.machine.rehearsals`).
Each of these jobs is priced by its operators alone, and its measured time shows two things:
by how much operators of a step are slower than repeated ones (a factor for each precision and
for each number of ranks that share a core), and what each kind of split spends each time its ranks
meet (seconds an event; for gathered weights seconds a byte). Both hold for this host only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal.core.traits import traits
from shoal.cost.price.shares import passes_of
from shoal.ir import Machine, ModelShape, TrainJob, Work
from shoal.machine.rehearsals import REHEARSALS, REHEARSED

# Which rehearsals apply to which split.
_TELL = {
    "tp": ("tp2", "tp2 of 4", "tp4"),
    "sp": ("sp2",),
    "cp": ("cp2", "cp2 of 4"),
    "pp": ("pp2", "pp2 of 4", "pp4"),
    "zero3": ("zero3",),
}
# A factor beyond these is a disturbed measurement.
_LEAST, _MOST = 0.5, 3.0


class OperatorTimes(NamedTuple):
    """A step by operators alone.

    Args:
        compute_s: seconds of the operators of a rank.
        wire_s: seconds of communication.
    """

    compute_s: float
    wire_s: float


def events(job: TrainJob, shape: ModelShape) -> dict[str, float]:
    """How often the ranks of a step meet, by kind of split; bytes gathered and summed for zero3."""
    split = job.parallel
    passes = passes_of(job)
    layers = -(-shape.num_layers // split.pp)
    events: dict[str, float] = {}
    if split.tp > 1:
        met = (layers * (6 if job.sends_again else 4) + 2.0) * passes
        events["sp" if split.sp else "tp"] = met
    if split.cp > 1:
        turns = split.cp + (split.cp - 1) * job.sends_again
        events["cp"] = float(layers * passes * turns)
    if split.pp > 1:
        events["pp"] = float(passes * split.vpp)
    shard = traits("shard", job.shard)
    if split.dp > 1 and "shards_gradients" in shard and not shard & {"levels", "copies_weights"}:
        from shoal.cost.arithmetic import expert_parameters, parameters

        experts = expert_parameters(shape) if split.folded else 0
        local = (parameters(shape) - experts) / split.tp / split.pp
        local += experts / (split.ep * split.etp * split.pp)
        events["zero3"] = (3.0 if "shards_weights" in shard else 2.0) * passes * 4.0 * local
    return events


class RehearsedRates:
    """What the rehearsals of a machine say.

    Args:
        told: predicted seconds of a job from its operators alone.
    """

    def __init__(self, machine: Machine, measured: Callable[[Work], OperatorTimes]) -> None:
        self._took = {
            m.note: m.median
            for m in machine.measurements
            if m.probe == "steps" and m.plausible and m.note in REHEARSALS
        }
        self._told = {
            name: measured(Work(shape=REHEARSED, job=REHEARSALS[name])) for name in self._took
        }
        self._cores = machine.device.num_cores or 1
        self._factors: dict[str, float] = {
            name: self._factor(name)
            for name in ("one", "one bf16", "dp2", "dp2 bf16", "dp4")
            if name in self._took
        }
        self._events = {kind: self._event(kind) for kind in _TELL}

    def __bool__(self) -> bool:
        return "one" in self._took

    def factor(self, precision: str, ranks: int, crowding: float) -> float:
        """How much longer the operators of a step take than they would repeated.

        Args:
            precision: fp32 or bf16.
            ranks: of this host.
            crowding: threads a core.
        """
        known = self._factors
        base = known.get("one" if ranks == 1 else "dp2", 1.0)
        if ranks > 1 and "dp4" in known:
            # Ranks of one core take its cache from each other.
            base += (known["dp4"] - base) * min(1.0, max(0.0, crowding - 1.0))
        if precision == "bf16":
            name = "one" if ranks == 1 else "dp2"
            base *= known.get(f"{name} bf16", known.get(name, 1.0)) / known.get(name, 1.0)
        return base

    def meeting_s(self, met: Mapping[str, float], crowding: float) -> float:
        """Seconds that a step of these :func:`events` takes beyond operators and wires."""
        total = 0.0
        for kind, number in met.items():
            alone, crowded = self._events[kind]
            share = min(1.0, max(0.0, crowding - 1.0))
            total += number * (alone + (crowded - alone) * share)
        return total

    def _factor(self, name: str) -> float:
        result = self._told[name]
        factor = (self._took[name] - result.wire_s) / result.compute_s
        return min(_MOST, max(_LEAST, factor))

    def _crowding(self, name: str) -> float:
        return max(1.0, REHEARSALS[name].parallel.world / self._cores)

    def _event(self, kind: str) -> tuple[float, float]:
        """(seconds of an event on cores of their own, two ranks to a core)."""
        known = [name for name in _TELL[kind] if name in self._took]
        alone = [self._beyond(name, kind) for name in known if self._crowding(name) == 1.0]
        crowded = [self._beyond(name, kind) for name in known if self._crowding(name) > 1.0]
        first = statistics.fmean(alone) if alone else 0.0
        if not crowded and kind == "sp":
            # Sums in two halves wait as whole sums do.
            plain = self._event("tp")
            return first, first + plain[1] - plain[0]
        return first, statistics.fmean(crowded) if crowded else first

    def _beyond(self, name: str, kind: str) -> float:
        job, result = REHEARSALS[name], self._told[name]
        own = self.factor(job.precision, job.parallel.world, self._crowding(name))
        rest = self._took[name] - own * result.compute_s - result.wire_s
        return rest / events(job, REHEARSED)[kind]
