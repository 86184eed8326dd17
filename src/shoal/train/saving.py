"""The saves of a run, on one rank: when they are made, and what is reported of them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shoal.checkpoint.interval import FIRST_STEPS, choose, failures_seen
from shoal.checkpoint.levels import CheckpointLevels, LevelCopier, LevelReport
from shoal.checkpoint.peers import CommPeers
from shoal.checkpoint.store import Store
from shoal.core.errors import NonFiniteError
from shoal.core.meter import read_events
from shoal.core.parts import table
from shoal.ir.hooks import StepHook
from shoal.train.finite import non_finite
from shoal.train.hooks import RankRun, RunHook
from shoal.train.resuming import meta_of
from shoal.train.watch.selfcheck import check_arithmetic
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from shoal.checkpoint.protocols import Saver
    from shoal.core.errors import ShoalError
    from shoal.core.meter import Meter
    from shoal.ir import TrainJob
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.train.layout import RunDir
    from shoal.train.loop import RankTrainer, TrainStepResult


class RunSaver(StepHook, RunHook):
    """Saves a run; all ranks make the same calls.

    Args:
        meter: where rank 0 reports.

    Attributes:
        stores: those of all levels, nearest first.
        origin: step at which the run's newest branch begins, and the stores that may have it; None
            if the run has one branch.
        peers: the ranks, as saving sees them.

    Raises:
        CheckpointError: another run is saving there, or the place refuses.
    """

    kind = "saves"

    def __init__(
        self, directory: RunDir, job: TrainJob, comm: TorchComm, meter: Meter, *, device: str
    ) -> None:
        self._directory, self._job, self._comm, self._meter = directory, job, comm, meter
        self.peers = CommPeers(comm)
        nearest, *others = directory.levels_of(job)
        self.store = Store(nearest, keep=job.checkpoint.keep)
        farther = [
            (level, Store(place, keep=level.keep))
            for level, place in zip(job.checkpoint.levels, others, strict=True)
        ]
        origin = directory.origin_of(job)
        self.origin = None if origin is None else (origin[0], [Store(x) for x in origin[1]])
        self.stores = (self.store, *(store for _, store in farther))
        self._levels = CheckpointLevels(
            self.peers,
            [
                functools.partial(
                    LevelCopier, self.store, store, every=level.every, tries=level.tries
                )
                for level, store in farther
            ],
        )
        mode = table("save_mode").build(job.checkpoint.mode)
        self._saver: Saver = mode.build(self.store, self.peers, device=device)
        every = job.checkpoint.every
        self._auto = every == "auto"
        self._interval = FIRST_STEPS if every == "auto" else every
        self._saved_at = self._first = 0
        self._stall_s = 0.0
        self._late = False
        self._unsaved: ShoalError | None = None

    def begin(self, run: RankRun, first: int) -> None:
        """The run begins with this step."""
        self._saved_at = self._first = first

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """Save where that is due, at the end of a round of workers, or where the run ends."""
        done = number + 1
        self._late = self._late or self._due(done)
        if run.ends(number, result) or (self._late and run.trainer.settled):
            self._late = False
            if self._job.watch.record and self._job.watch.check_every:
                # What a unit that computes wrongly has spoilt must not become a checkpoint.
                check_arithmetic(self._comm.device, seed=done)
            run.event("phase", step=done, phase="saving")
            with phase(self._comm, "checkpoint"):
                self.save(run.trainer, done)
        self._tell()
        if self._auto and self._first < self._saved_at == done - 1:
            # The step after a save has shown all that the save held up.
            self._choose_interval(done, result.seconds)

    def _due(self, done: int) -> bool:
        """Whether a checkpoint is due when so many steps are done."""
        if self._auto:
            return done - self._saved_at >= self._interval
        return bool(self._interval) and done % self._interval == 0

    def changing(self, names: Collection[str] | None = None) -> None:
        """Wait for what is still copied of these, or of all."""
        self._saver.before_update(names)

    def save(self, trainer: RankTrainer, step: int) -> None:
        """Begin to save; what training waits for is over when this returns.

        Raises:
            NonFiniteError: what this rank would save is not finite. Without it the other ranks
                cannot commit, so nothing is saved.
        """
        meta, pieces = meta_of(trainer, self._job, step), trainer.pieces()
        bad = non_finite(pieces)
        if bad:
            raise NonFiniteError(
                f"step {step} is not saved: {bad}, on rank {self.peers.rank}; lower optimizer.lr "
                "or use precision: fp32, and continue with --resume"
            )
        self._saver.save(step, pieces, meta)
        self._saved_at = step
        if self._job.checkpoint.dump:
            from shoal.checkpoint.formats.deepspeed_dump import dump

            dump(
                self._directory.dumps,
                step,
                trainer.engine,
                trainer.updater.state(),
                meta,
                self._comm.barrier,
                keep=self._job.checkpoint.keep,
            )

    def end(self) -> None:
        """Wait for what is under way.

        Raises:
            CheckpointError: the last step is not saved.
        """
        self._saver.close()
        self._tell()
        # Rank 0 commits for all, so no rank leaves before it is done.
        self._comm.barrier()
        if self._unsaved is not None:
            raise self._unsaved

    def drain(self) -> None:
        """Wait for what is still on its way to farther levels; no other rank is waited for."""
        beat = self._comm.beat
        self._levels.close(alive=(lambda: None) if beat is None else beat.alive)
        self.tell_levels(self._levels.reports())

    def abandon(self) -> None:
        """Commit nothing more, and send nothing more."""
        self._saver.close(abandon=True)
        self._levels.close(abandon=True)

    def tell_levels(self, reports: Sequence[LevelReport]) -> None:
        """Say what became of checkpoints at farther levels, on rank 0."""
        if self.peers.rank == 0:
            for report in reports:
                self._meter.event("checkpoint_level", **report._asdict())

    def _tell(self) -> None:
        self.tell_levels(self._levels.reports())
        for ticket in self._saver.finished():
            self._unsaved = ticket.error
            self._stall_s = sum(ticket.blocked_s.values())
            if self.peers.rank:
                if ticket.error is not None:
                    print(f"step {ticket.step} is not saved: {ticket.error}", flush=True)
                continue
            if ticket.error is not None:
                message = str(ticket.error)
                self._meter.event("checkpoint_failed", step=ticket.step, message=message)
                continue
            self._meter.event(
                "checkpoint",
                step=ticket.step,
                seconds=ticket.seconds,
                blocked_s=ticket.blocked_s,
                phases_s=ticket.phases_s,
                bytes=ticket.bytes,
                mode=self._job.checkpoint.mode.name,
                spans_s=ticket.spans_s,
                ranks_s=[share.phases_s for share in ticket.ranks],
                ranks_spans_s=[share.spans_s for share in ticket.ranks],
                ranks_bytes=[share.bytes for share in ticket.ranks],
            )
            for number, share in enumerate(ticket.ranks):
                labels = {"rank": str(number)}
                self._meter.gauge("checkpoint_bytes", share.bytes, **labels)
                for name, seconds in share.phases_s.items():
                    self._meter.gauge("checkpoint_phase_s", seconds, **labels, phase=name)

    def _choose_interval(self, step: int, step_s: float) -> None:
        """Take the interval that loses the least, the same on all ranks, and show it."""
        chosen = None
        if self.peers.rank == 0:
            failures, seconds = failures_seen(read_events(self._directory.events))
            chosen = choose(
                stall_s=self._stall_s, step_s=step_s, failures=failures, observed_s=seconds
            )
            self._meter.event(
                "checkpoint_interval",
                step=step,
                steps=chosen.steps,
                stall_s=chosen.stall_s,
                mtbf_s=chosen.mtbf_s,
                overhead=chosen.overhead,
            )
        result = self.peers.gather(str(chosen.steps if chosen else 0).encode())
        self._interval = int(result[0])
