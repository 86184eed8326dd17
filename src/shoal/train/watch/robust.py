"""A run that finds its own faults: stop, exclude, take a spare or shrink, go on.

The driver watches the ranks from outside: signs of life, their output, their records. When a
rule fires it ends all ranks, keeps the evidence, excludes the place that is to blame and starts
again from the newest good checkpoint, in which every rank first checks its own arithmetic,
its loopback and its neighbours. A *place* is what a rank runs on; rank numbers move, places
stay, and a place that has failed is not used again.

Source: Jiang et al., MegaScale, 2024, section 4 (driver, executors, self-checks).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.config import Value
from shoal.core.errors import (
    CheckpointError,
    MachineError,
    NonFiniteError,
    RankError,
    ShoalError,
    require,
)
from shoal.core.files import write_atomic, write_json
from shoal.core.meter import SINKS, EventTail, Meter
from shoal.core.parts import table
from shoal.ir import TrainJob, TrainPlan, TrainReport
from shoal.parallel.comm.heartbeat import RunningClock
from shoal.train.layout import RunDir
from shoal.train.memory import MemoryLevel
from shoal.train.run import (
    Watch,
    conclude,
    conclude_stopped,
    finished,
    prepare_run,
    threads_of,
)
from shoal.train.run_lock import alone
from shoal.train.supervise import Supervisor
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.phases import open_phases
from shoal.train.watch.protocols import Fault, FaultLocator
from shoal.train.watch.recorder import Flight, read

_LOOK_S = 0.25
_PAUSES = 200
"""Pauses between looks are at least so many times as long as a look."""
_MISSED = 3
# Lines of a rank's output that say that the hardware or its driver has failed.
_ERRORS = re.compile(
    r"CUDA error|NCCL (?:error|WARN)|uncorrectable ECC|\bXid\b|Bus error|Segmentation fault|"
    r"Input/output error|Cannot allocate memory|MemoryError|Out of memory"
)
# Steps between two looks for stragglers, of which two in a row must find the same one.
_NEW_STEPS = 10
_LONG_PHASES = frozenset({"checkpoint", "evaluate"})
# Failures without a culprit and without a step between them that end the run.
_PATIENCE = 3


class DriverFailure(Value):
    """A failure, as a rule of the driver reports it.

    Args:
        rule: lost, error, keyword, beat, hang, slow, or self_check.
        rank: who is to blame; None if none could be named.
        place: what that rank runs on.
        step: newest step that was finished; -1 if none was.
        seconds: from the last progress, or the rank's last sign of life, to this finding.
        message: a sentence for people.
        fault: what the locator says, if it was asked.
        more: other ranks that failed with it, in the same step.
    """

    rule: str
    rank: int | None
    place: int | None
    step: int
    seconds: float
    message: str
    fault: Fault | None = None
    more: tuple[DriverFailure, ...] = ()

    @property
    def faulty(self) -> tuple[int, ...]:
        """Places of all ranks that are to blame."""
        places = (one.place for one in (self, *self.more))
        return tuple(dict.fromkeys(place for place in places if place is not None))


class _FailureError(RankError):
    """Carries a finding out of the supervisor's loop."""

    def __init__(self, found: DriverFailure) -> None:
        super().__init__(found.message)
        self.failure = found


class Robust(Value):
    """How a run looks after itself.

    Args:
        spares: places that stand by.
        min_ranks: data-parallel replicas below which the run stops instead of shrinking; 0 for
            never shrinking.
        hang_s: seconds without progress of any rank that are a hang.
        slow_s: seconds between looks for stragglers; 0 for never.
        locator: who names hanging and slow ranks.
        exclude_slow: a straggler is excluded, not only reported.
    """

    spares: int = 0
    min_ranks: int = 1
    hang_s: float = 30.0
    slow_s: float = 10.0
    locator: str = "megascale"
    exclude_slow: bool = True


@alone
def execute_robust(
    plan: TrainPlan,
    run_dir: Path,
    robust: Robust,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    replan: Callable[[TrainJob], TrainPlan] | None = None,
    inject: Callable[[Supervisor, dict[str, Any]], None] | None = None,
    environment: Callable[[int], Mapping[str, str]] | None = None,
    module: str = "shoal.train.worker",
    anyway: bool = False,
) -> TrainReport:
    """Run a plan on this host and repair what fails.

    Args:
        plan: what to run.
        run_dir: directory of the run.
        robust: how.
        resume: continue from the newest checkpoint.
        watch: called with every event; ``fault`` and ``restart`` are the driver's own.
        replan: makes the plan of a job with fewer ranks; without it the plan keeps its other
            choices.
        inject: called with the supervisor and every event, to break something on purpose.
        environment: variables of a place.
        module: what a rank runs.
        anyway: run on this host's CPU what was planned for GPUs; nothing of it is scored.

    Raises:
        RankError: nothing is left to go on with; the newest checkpoint is kept.
        ShoalError: an error that no restart repairs.
    """
    require(robust.spares >= 0, "--spares", robust.spares, expected="0 or more")
    require(robust.hang_s > 0, "robust.hang_s", robust.hang_s, expected="seconds above 0")
    require(
        plan.job.watch.record,
        "watch.record",
        False,
        expected="true with --robust: faults are found in the records",
    )
    directory = RunDir(run_dir)
    if resume and (before := finished(plan, directory, watch)) is not None:
        return before
    prepare_run(plan, directory, resume=resume, watch=watch, anyway=anyway)
    driver = _Driver(plan, directory, robust, watch, replan, inject, environment, module)
    return driver.run(resume=resume)


class _Driver:
    def __init__(
        self,
        plan: TrainPlan,
        directory: RunDir,
        robust: Robust,
        watch: Watch | None,
        replan: Callable[[TrainJob], TrainPlan] | None,
        inject: Callable[[Supervisor, dict[str, Any]], None] | None,
        environment: Callable[[int], Mapping[str, str]] | None,
        module: str,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.robust = robust
        self.watch = watch
        self.replan = replan
        self.inject = inject
        self.environment = environment
        self.module = module
        world = plan.job.parallel.world
        self.places = list(range(world))
        self.spares = list(range(world, world + robust.spares))
        self.excluded: list[int] = []
        self.step = -1

    def run(self, *, resume: bool) -> TrainReport:
        with MemoryLevel(self.plan.job, self.directory, self.watch) as self.level:
            try:
                self._until_done(resume=resume)
            except KeyboardInterrupt:
                if self.supervisor.saved:
                    conclude_stopped(self.plan, self.directory)
                raise
        return conclude(self.plan, self.directory)

    def _until_done(self, *, resume: bool) -> None:
        without_culprit, last_step = 0, -1
        while True:
            began = time.monotonic()
            try:
                self._once(resume=resume)
                return
            except _FailureError as error:
                result = error.failure
            except (RankError, MachineError) as error:
                result = self._from_error(error)
            except NonFiniteError as error:
                # A loss that is no number may be a unit that computes wrongly: the self-checks
                # of the next start show it. The same again is the job's own fault.
                if without_culprit and self.step == last_step:
                    raise
                result = DriverFailure(
                    rule="error",
                    rank=None,
                    place=None,
                    step=self.step,
                    seconds=0.0,
                    message=str(error),
                )
            without_culprit = without_culprit + 1 if result.place is None else 0
            if self.step > last_step:
                without_culprit = min(without_culprit, 1)
            last_step = self.step
            self._keep()
            self._tell("fault", seconds_of_start=time.monotonic() - began, **result.model_dump())
            resume = True
            self.level.recover()
            if self.supervisor.stopping:
                self.level.to_disk()
                raise RankError(f"{result.message}\nthe run was asked to stop; {self._saved()}")
            self._repair(result, without_culprit)

    def _once(self, *, resume: bool) -> None:
        job = self.plan.job
        supervisor = Supervisor(
            self.directory,
            ranks=job.parallel.world,
            threads=threads_of(job),
            timeout_s=max(job.timeout_s, 2 * self.robust.hang_s),
            hang_s=self.robust.hang_s,
            resume=resume,
            environment=self._environment,
            module=self.module,
            level=self.level.fleet,
        )
        self.supervisor = supervisor
        tail = EventTail(self.directory.events)
        rules = _Rules(self, supervisor)

        def tick() -> None:
            for event in tail:
                if event["kind"] == "step":
                    self.step = int(event["step"])
                if self.watch is not None:
                    self.watch(event)
                if self.inject is not None:
                    self.inject(supervisor, event)
            rules.look()

        # What was printed before this start is not of it.
        supervisor.start()
        supervisor.wait(tick)

    def _keep(self) -> None:
        """Put what the ranks have recorded aside: the next start begins new records."""
        folder = self.directory.faults / str(1 + sum(1 for _ in self.directory.faults.glob("*")))
        for path in sorted(self.directory.ranks.glob("*.flight")):
            write_atomic(folder / path.name, path.read_bytes())

    def _environment(self, rank: int) -> dict[str, str]:
        place = self.places[rank]
        extra = self.environment(place) if self.environment is not None else {}
        return {"SHOAL_PLACE": str(place), "SHOAL_SELF_CHECK": "1", **extra}

    def _from_error(self, error: ShoalError) -> DriverFailure:
        failures = self.supervisor.failures
        if not failures:
            return self.failure("lost", None, 0.0, str(error))
        first, *rest = failures
        rule = "self_check" if isinstance(error, MachineError) else first.rule
        more = tuple(self.failure(one.rule, one.rank, 0.0, one.text) for one in rest)
        return self.failure(rule, first.rank, 0.0, str(error), more=more)

    def _repair(self, found: DriverFailure, without_culprit: int) -> None:
        """Choose the places of the next start.

        Raises:
            RankError: there are none.
        """
        if found.place is None:
            if without_culprit >= _PATIENCE:
                self.level.to_disk()
                raise RankError(
                    f"{found.message}\n{without_culprit} starts failed and no rank could be "
                    f"located; {self._saved()}"
                )
            self._tell("restart", message=found.message, places=self.places, ranks=len(self.places))
            return
        lost = found.faulty
        self.excluded += lost
        for place in lost[: len(self.spares)]:
            self.places[self.places.index(place)] = self.spares.pop(0)
        left = [place for place in lost if place in self.places]
        if left:
            self._shrink(left, found)
        self._tell("restart", message=found.message, places=self.places, ranks=len(self.places))

    def _shrink(self, lost: Sequence[int], found: DriverFailure) -> None:
        """Go on with fewer data-parallel replicas."""
        job = self.plan.job
        parallel = job.parallel
        rest = parallel.world // parallel.dp
        floor = self.robust.min_ranks
        fitting = [
            dp
            for dp in range(1, parallel.dp)
            if job.global_batch % dp == 0 and dp * rest <= parallel.world - len(lost)
        ]
        # Other ranks keep other parts: they, or a resumed run, take over from the disk.
        self.level.to_disk()
        if not floor or not fitting or fitting[-1] < floor:
            raise RankError(
                f"{found.message}\nno spare is left for place {' and '.join(map(str, lost))}, and "
                f"the run cannot go on with fewer than "
                f"{parallel.dp if not floor else max(floor, 1)} replicas; "
                f"{self._saved()}"
            )
        degrees = parallel.model_copy(update={"dp": fitting[-1]})
        changed = job.model_copy(update={"parallel": degrees, "microbatch": None})
        if self.replan is not None:
            self.plan = self.replan(changed)
        else:
            self.plan = self.plan.model_copy(update={"job": changed, "estimate": None})
        left = [place for place in self.places if place not in lost]
        world = self.plan.job.parallel.world
        self.places, self.spares = left[:world], left[world:]
        job = self.level.change(self.plan.job)
        self.plan = self.plan.model_copy(update={"job": job})
        prepare_run(self.plan, self.directory, resume=True, watch=self.watch, anyway=True)

    def _saved(self) -> str:
        from shoal.checkpoint.levels import newest
        from shoal.checkpoint.store import Store

        try:
            places = self.directory.levels_of(self.plan.job)
            saved = newest([Store(place) for place in places])
        except CheckpointError:
            return "there is no checkpoint yet: the run must start again"
        return (
            f"the state of step {saved.meta['step']} is saved; mend or add a machine and continue "
            f"with: shoal train --dir {self.directory.root} --resume --robust"
        )

    def _tell(self, kind: str, **what: Any) -> None:
        with Meter([SINKS.build({"name": "jsonl", "path": str(self.directory.events)})]) as meter:
            meter.event(kind, **what)
        if self.watch is not None:
            self.watch({"kind": kind, **what})

    def failure(
        self,
        rule: str,
        rank: int | None,
        seconds: float,
        message: str,
        fault: Fault | None = None,
        more: tuple[DriverFailure, ...] = (),
    ) -> DriverFailure:
        """A failure of now."""
        return DriverFailure(
            rule=rule,
            rank=rank,
            place=None if rank is None else self.places[rank],
            step=self.step,
            seconds=seconds,
            message=message,
            fault=fault,
            more=more,
        )

    def fail(self, first: DriverFailure, *rest: DriverFailure) -> None:
        """End this start.

        Raises:
            RankError: always; it carries the findings.
        """
        message = "; ".join(one.message for one in (first, *rest))
        result = first.model_copy(update={"message": message, "more": rest})
        write_json(self.directory.ranks / "fault.json", result.model_dump(mode="json"))
        raise _FailureError(result)


class _Rules:
    """What is looked at while the ranks run."""

    def __init__(self, driver: _Driver, supervisor: Supervisor) -> None:
        self.driver = driver
        self.supervisor = supervisor
        self.locator: FaultLocator = table("locator").build(
            {"name": driver.robust.locator, "hang_s": 0.5 * driver.robust.hang_s}
        )
        self._clock = RunningClock()
        self._next = 0.0
        self._next_slow = driver.robust.slow_s
        self._counts: dict[int, int] = {}
        self._moved = 0.0
        self._beaten: dict[int, tuple[int, float]] = {}
        self._slow: dict[int, int] = {}
        self._looked = driver.step
        self._read: dict[int, int] = {}
        for rank in range(supervisor.ranks):
            log = driver.directory.log(rank)
            self._read[rank] = log.stat().st_size if log.exists() else 0

    def look(self) -> None:
        """Apply every rule; raises what it finds."""
        now = self._clock()
        if now < self._next:
            return
        began = time.monotonic()
        self._look(now)
        # Every rank has a record, so a look takes longer with more of them and pauses with it.
        self._next = now + max(_LOOK_S, _PAUSES * (time.monotonic() - began))

    def _look(self, now: float) -> None:
        self._keywords()
        flights = self._flights()
        if len(flights) < self.supervisor.ranks:
            return  # they still start
        self._beats(flights, now)
        self._progress(flights, now)
        new = self.driver.step - self._looked >= _NEW_STEPS
        if self.driver.robust.slow_s and now >= self._next_slow and new:
            self._next_slow = now + self.driver.robust.slow_s
            self._looked = self.driver.step
            self._stragglers(flights)

    def _flights(self) -> dict[int, Flight]:
        flights = {}
        for rank in range(self.supervisor.ranks):
            flight = read(self.driver.directory.flight(rank))
            if flight is not None:
                flights[rank] = flight
        return flights

    def _keywords(self) -> None:
        failures: list[DriverFailure] = []
        for rank in range(self.supervisor.ranks):
            log = self.driver.directory.log(rank)
            if not log.exists() or log.stat().st_size <= self._read[rank]:
                continue
            with log.open("rb") as file:
                file.seek(self._read[rank])
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[rank] += whole
            for line in data[:whole].decode(errors="replace").splitlines():
                if _ERRORS.search(line):
                    said = f"rank {rank} printed: {line.strip()}"
                    failures.append(self.driver.failure("keyword", rank, 0.0, said))
                    break
        if failures:
            self.driver.fail(*failures)

    def _beats(self, flights: dict[int, Flight], now: float) -> None:
        """A rank whose process has stopped, while the others' go on."""
        beat_s = self.driver.plan.job.watch.beat_s
        for rank, flight in flights.items():
            if self._beaten.get(rank, (0, 0.0))[0] != flight.beat:
                self._beaten[rank] = (flight.beat, now)
        ages = {rank: now - self._beaten[rank][1] for rank in flights}
        silent = [rank for rank, age in ages.items() if age > _MISSED * beat_s + 0.5 * beat_s]
        # Where most are silent it is this host that is busy, or asleep.
        if len(silent) == 1 or (silent and 2 * len(silent) < len(ages)):
            longest = max(silent, key=lambda rank: ages[rank])
            if len(ages) > 1 or ages[longest] > 2 * _MISSED * beat_s:
                # Ranks that were stopped together beat at different moments.
                stopped = [rank for rank in ages if self.supervisor.stopped(rank)]
                order = sorted({*silent, *stopped}, key=lambda rank: -ages[rank])
                self.driver.fail(
                    *(
                        self.driver.failure(
                            "beat",
                            rank,
                            ages[rank],
                            f"rank {rank} has missed {int(ages[rank] / beat_s)} beats of "
                            f"{beat_s:g} s: its process does not run",
                        )
                        for rank in order
                    )
                )

    def _progress(self, flights: dict[int, Flight], now: float) -> None:
        """No rank enters anything any more: one hangs."""
        counts = {rank: flight.lost + len(flight.rows) for rank, flight in flights.items()}
        if counts != self._counts:
            self._counts, self._moved = counts, now
            return
        silent = now - self._moved
        if silent <= self.driver.robust.hang_s or not any(counts.values()):
            return
        if self.driver.step < 0 and silent < self.supervisor.start_s:
            busy = [f for f in flights.values() if len(f.rows) and int(f.rows["step"][-1]) < 0]
            if busy:
                return  # before the first step compiling takes its time
        phases = {phase.name for flight in flights.values() for phase in open_phases(flight)}
        if phases & _LONG_PHASES and (silent <= self.driver.plan.job.timeout_s):
            return
        verdict = self.locator.locate(Evidence(flights, now=time.monotonic_ns()))
        hanging = {
            fault.ranks[0]: self.driver.failure("hang", fault.ranks[0], silent, fault.text, fault)
            for fault in verdict.faults
            if fault.kind.endswith("hang") and fault.place == "rank"
        }
        if hanging:
            self.driver.fail(*hanging.values())
        text = "; ".join(fault.text for fault in verdict.faults) or "no rank makes progress"
        behind = self._behind()
        if behind is not None:
            text += f"; below the records, rank {behind} alone has not come to it"
        fault = verdict.faults[0] if verdict.faults else None
        self.driver.fail(self.driver.failure("hang", behind, silent, text, fault))

    def _behind(self) -> int | None:
        """The one rank that the heartbeats, written further down, show behind all others."""
        beats = self.supervisor.beats()
        places = sorted((beat.collective, beat.inside, beat.rank) for beat in beats)
        if len(places) < 2 or places[0][:2] == places[1][:2]:
            return None
        return places[0][2]

    def _stragglers(self, flights: dict[int, Flight]) -> None:
        verdict = self.locator.locate(Evidence(flights, now=time.monotonic_ns()))
        slow = {
            fault.ranks[0]: fault
            for fault in verdict.faults
            if fault.kind == "non_communication_slow" and fault.place == "rank"
        }
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        named = [
            self.driver.failure("slow", rank, fault.seconds, fault.text, fault)
            for rank, fault in slow.items()
            if self._slow[rank] >= 2 and self.driver.robust.exclude_slow
        ]
        if named:
            self.driver.fail(*named)
