"""The in-memory level of a run's checkpoints: who starts it, fills it and goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory.layout import coding_groups
from shoal.checkpoint.store import Store
from shoal.core.errors import ConfigError, require
from shoal.core.meter import SINKS, Meter
from shoal.ir.hooks import StepHook, TrainStep
from shoal.train.hooks import RankRun, RunHook

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.fleet import Fleet
    from shoal.checkpoint.inmemory.recovery import InMemory
    from shoal.checkpoint.inmemory.snapshot import Snapshots
    from shoal.ir import TrainJob
    from shoal.machine.emulate import EmulatedNetwork
    from shoal.train.layout import RunDir
    from shoal.train.loop import RankTrainer, TrainStepResult

# Ranks that differ in these hold the same part of the model.
_REPLICAS = ("dp", "cp")


def check_memory(job: TrainJob) -> None:
    """Refuse an in-memory level that the job's ranks cannot have.

    Raises:
        ConfigError: too few replicas for the code, or a setting that it does not go with.
    """
    choice = job.checkpoint.memory
    if choice is None:
        return
    code = MEMORY_CODES.build(choice, where="checkpoint.memory")
    for ranks in job.parallel.attention().groups(*_REPLICAS):
        for group in coding_groups(ranks, group=code.group, ranks_per_node=code.ranks_per_node):
            code.check(len(group))
    require(
        not job.replan.enabled,
        "replan.enabled",
        True,
        expected="false with checkpoint.memory: who keeps what is fixed for a start",
    )


class EmulatedHosts:
    """Emulated hosts with the same number of ranks each.

    Args:
        network: the hosts.
        ranks_per_node: ranks of a host.
    """

    def __init__(self, network: EmulatedNetwork, ranks_per_node: int) -> None:
        self._network = network
        self._size = ranks_per_node

    def address(self, rank: int) -> str:
        """Of the host of a rank."""
        return self._network.addresses[rank // self._size]

    def prefix(self, rank: int) -> Sequence[str]:
        """What makes a command one of that host."""
        return ("ip", "netns", "exec", self._network.names[rank // self._size])

    def environment(self, rank: int) -> dict[str, str]:
        """Ranks of other hosts are reached over the network alone."""
        return {
            **self._network.environment,
            "LOCAL_RANK": str(rank % self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
        }


class MemoryLevel:
    """The snapshot processes of a run on this host, while the block lasts.

    Args:
        job: what is trained; without ``checkpoint.memory`` there are no processes.
        directory: of the run.
        watch: called with the events ``recover`` and ``memory_off``.
        hosts: the emulated hosts that the ranks run on.
    """

    def __init__(
        self,
        job: TrainJob,
        directory: RunDir,
        watch: Callable[[dict[str, Any]], None] | None,
        hosts: EmulatedHosts | None = None,
    ) -> None:
        self.directory = directory
        self.watch = watch
        self.hosts = hosts
        self.fleet: Fleet | None = None
        self._store = Store(directory.saved_in(job), keep=job.checkpoint.keep)
        origin = directory.origin_of(job)
        self._begins = 0 if origin is None else origin[0]
        self._start(job)

    def recover(self) -> None:
        """After the trainers have ended by a failure: bring all processes to one version.

        Raises:
            ShoalError: the processes cannot be reached or replaced.
        """
        if self.fleet is not None:
            self._tell("recover", **self.fleet.recover()._asdict())

    def to_disk(self) -> None:
        """Have the recovered version saved, if it is newer than the newest checkpoint.

        Raises:
            RankError: it could not be saved.
        """
        if self.fleet is None:
            return
        step, store = self.fleet.members.restore, self._store
        if step is not None and step > max(store.steps(), default=self._begins):
            self.fleet.persist(store.where, store.keep)

    def change(self, job: TrainJob) -> TrainJob:
        """Go on with another job of the run, on other ranks; returns what can go on.

        Where its replicas are too few for the code, it goes on without.
        """
        try:
            check_memory(job)
        except ConfigError as cause:
            policy = job.checkpoint.model_copy(update={"memory": None})
            job = job.model_copy(update={"checkpoint": policy})
            self._tell("memory_off", message=str(cause))
        self.close()
        self._start(job)
        return job

    def close(self) -> None:
        """End the processes; what they hold is gone."""
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, job: TrainJob) -> None:
        if job.checkpoint.memory is not None:
            from shoal.checkpoint.inmemory.fleet import Fleet

            world = job.parallel.world
            if self.hosts is None:
                self.fleet = Fleet(self.directory.ranks, world)
            else:
                self.fleet = Fleet(
                    self.directory.ranks, world, host=self.hosts.address, prefix=self.hosts.prefix
                )

    def _tell(self, kind: str, **what: Any) -> None:
        with Meter([SINKS.build({"name": "jsonl", "path": str(self.directory.events)})]) as meter:
            meter.event(kind, **what)
        if self.watch is not None:
            self.watch({"kind": kind, **what})


class MemoryHook(StepHook, RunHook):
    """Copies the state into memory between steps, while the next one makes its passes."""

    kind = "memory"

    def __init__(self, run: RankRun) -> None:
        self._run, self._snapshots = run, snapshots_of(run.trainer)

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """Begin to copy; it is settled before the next update."""
        from shoal.train.resuming import meta_of

        if self._snapshots.due(number + 1) and not run.ends(number, result):
            trainer, done = run.trainer, number + 1
            held = trainer.pieces()
            for name, pieces in held.items():
                # What changes before it is settled is copied at once.
                held[name] = [
                    replace(piece, tensor=piece.tensor.clone()) if piece.volatile else piece
                    for piece in pieces
                ]
            self._snapshots.begin(done, held, meta_of(trainer, run.plan.job, done))

    def after_backward(self, step: TrainStep) -> None:
        """Wait until the snapshot is coded, and report what it has cost.

        When a rank updates its state, all ranks have returned from here.
        """
        settled = self._snapshots.settle()
        if settled is not None and settled.step % self._run.plan.job.log_every == 0:
            self._run.event("snapshot", **settled._asdict())

    def close(self) -> None:
        """End the copying."""
        self._snapshots.close()


def snapshots_of(trainer: RankTrainer) -> Snapshots:
    """What takes the snapshots of this rank.

    Raises:
        ConfigError: the snapshot processes were not started.
        RankError: they do not answer.
    """
    from shoal.checkpoint.inmemory.snapshot import Snapshots, members

    result = members()
    choice = trainer.job.checkpoint.memory
    if result is None or choice is None:
        raise ConfigError(
            "checkpoint.memory: no snapshot processes were started for this rank; start the "
            "ranks with shoal train"
        )
    return Snapshots(
        *result,
        rank=trainer.comm.rank,
        replicas=trainer.engine.ranks.data.ranks,
        choice=choice,
        exchange=lambda data: _exchanged(trainer, data),
    )


def _exchanged(trainer: RankTrainer, data: bytes) -> list[bytes]:
    """What every replica gave, of whatever length."""
    import torch

    comm = trainer.engine.ranks.data
    length = torch.tensor([len(data)], device=trainer.device)
    lengths = length.new_empty(comm.world)
    comm.all_gather(lengths, length, tag="snapshot").wait()
    sizes = [int(size) for size in lengths.tolist()]
    mine = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
    mine = mine.to(trainer.device)
    out = mine.new_empty(comm.world * max(sizes))
    comm.all_gather(out, mine, tag="snapshot").wait()
    rows = out.view(comm.world, -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def version_in_memory() -> InMemory | None:
    """The version that the snapshot processes were brought to; None if there is none."""
    from shoal.checkpoint.inmemory.recovery import InMemory
    from shoal.checkpoint.inmemory.snapshot import members

    result = members()
    if result is None or result[0].restore is None:
        return None
    return InMemory(*result, result[0].restore)
