"""One rank of a training run: ``python -m shoal.train.worker RUN_DIR [--resume]``.

It reads the plan that lies in the run's directory, so a rank needs no other
argument; under torchrun or Shoal's own supervisor the usual variables name it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.checkpoint.interval import FIRST_STEPS
from shoal.checkpoint.peers import CommPeers
from shoal.core.errors import CheckpointError, MachineError, PlanError, RankError, ShoalError
from shoal.core.files import write_json
from shoal.cost.arithmetic import parameters
from shoal.train import timeline
from shoal.train.layout import RunDir
from shoal.train.protocols import Chooses
from shoal.train.watch.selfcheck import check_arithmetic
from shoal.train.watch.watched import phase

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.snapshot import Snapshots
    from shoal.checkpoint.protocols import Saver
    from shoal.checkpoint.store import Store
    from shoal.core.meter import Meter
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import Plan, TrainJob
    from shoal.parallel.comm import TorchComm
    from shoal.train.loop import Trainer
    from shoal.train.replan import Replanner

__all__ = ["main", "run_rank"]

# The step of a run whose passes are recorded, when memory and threads are warm.
RECORDED = 4

USER_ERROR = 2
PEER_ERROR = 3


@dataclass
class _Rank:
    """Everything one rank holds while it trains."""

    directory: RunDir
    plan: Plan
    meter: Meter
    comm: TorchComm
    tokens: TokenSet
    trainer: Trainer
    store: Store
    saver: Saver
    total: int
    peak_flops: float
    undo: contextlib.ExitStack
    memory: Snapshots | None
    interval: int = 0
    """Steps between saves; 0 for only at the end."""
    stall_s: float | None = None
    """Seconds for which the newest save held this rank up."""
    unsaved: ShoalError | None = None
    """Why the newest save failed, if it did."""

    @property
    def chief(self) -> bool:
        """This rank writes events, evaluation results and samples."""
        return self.comm.rank == 0


def run_rank(directory: RunDir, *, resume: bool, from_step: int | None = None) -> None:
    """Train on this rank until the plan's last step, or until asked to stop.

    Raises:
        ShoalError: whatever the run cannot go on with.
    """
    asked = _catch_termination()
    with _joined(directory) as rank:
        first = _start(rank, resume=resume, from_step=from_step)
        stopped = _train(rank, first, asked)
        _end_saves(rank)
        if not stopped:
            _finish(rank)
        if rank.chief:
            rank.meter.event("stop" if stopped else "end", step=rank.total)


def _catch_termination() -> Callable[[], bool]:
    flag = {"asked": False}

    def handle(_signal: int, _frame: object) -> None:
        flag["asked"] = True

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return lambda: flag["asked"]


@contextlib.contextmanager
def _joined(directory: RunDir) -> Iterator[_Rank]:
    import torch

    from shoal.checkpoint.store import Store
    from shoal.core.meter import SINKS, Meter
    from shoal.core.parts import table
    from shoal.corpora.tokens import open_tokens
    from shoal.ir import Plan
    from shoal.parallel.agree import agree
    from shoal.parallel.comm import TorchComm
    from shoal.plan.length import num_steps
    from shoal.train.allocator import keep_freed_memory
    from shoal.train.build import weights_of
    from shoal.train.loop import Trainer
    from shoal.train.memory import snapshots_of
    from shoal.train.mfu import peak_flops

    plan = Plan.load(directory.plan)
    job = plan.job
    world = int(os.environ.get("WORLD_SIZE", "1"))
    number = int(os.environ.get("RANK", "0"))
    if world != job.parallel.world:
        raise PlanError(
            f"parallel: the plan is for {job.parallel.world} ranks and "
            f"{world} were started; start {job.parallel.world}, or plan for {world}"
        )
    threads = job.threads or max(1, (os.cpu_count() or 1) // local_world())
    torch.set_num_threads(threads)
    keep_freed_memory()
    cuda = plan.machine.device.kind == "gpu" and torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    sinks = []
    if number == 0:
        sinks.append(SINKS.build({"name": "jsonl", "path": str(directory.events)}))
        sinks += [SINKS.build(choice) for choice in job.sinks]
    with Meter(sinks) as meter, contextlib.ExitStack() as undo:
        comm = TorchComm.from_environment(
            meter,
            timeout_s=job.timeout_s,
            beats=directory.ranks,
            device=device,
            rendezvous=os.environ.get("SHOAL_RENDEZVOUS", "env://"),
        )
        try:
            if "SHOAL_SELF_CHECK" in os.environ:
                _self_check(directory, comm)
            if job.watch.record:
                comm = _watched(comm, directory, job)
            weights = weights_of(job)
            place = Path(json.loads(directory.tokens.read_text())["path"])
            tokens = open_tokens(place, weights.config.vocab_size)
            if weights.config.eos_token_id is None:
                # Without it an exported model would never stop by itself.
                eos = {"eos_token_id": tokens.end_of_text}
                weights.config = weights.config.model_copy(update=eos)
            # Ranks that were given different jobs would wait for each other for ever.
            agree(comm, "the job", job.model_dump(mode="json"))
            total = num_steps(job, plan.estimate)
            trainer = undo.enter_context(
                contextlib.closing(
                    Trainer(
                        job,
                        total,
                        weights,
                        tokens,
                        comm,
                        device=device,
                        place=directory.ranks,
                    )
                )
            )
            store = Store(directory.saved_in(job), keep=job.checkpoint.keep)
            saver: Saver = (
                table("save_mode")
                .build(job.checkpoint.mode)
                .build(store, CommPeers(comm), device=device)
            )
            # After an error nothing more is committed; after a good end nothing is under way.
            undo.callback(saver.close, abandon=True)
            trainer.before_update = trainer.before_group = saver.before_update
            memory = None
            if job.checkpoint.memory is not None:
                memory = undo.enter_context(contextlib.closing(snapshots_of(trainer)))
            yield _Rank(
                directory=directory,
                plan=plan,
                meter=meter,
                comm=comm,
                tokens=tokens,
                trainer=trainer,
                store=store,
                saver=saver,
                total=total,
                peak_flops=peak_flops(plan, threads),
                undo=undo,
                memory=memory,
            )
        finally:
            comm.close()


def _watched(comm: TorchComm, directory: RunDir, job: TrainJob) -> TorchComm:
    """The communicator with a flight recorder on it."""
    import socket

    from shoal.train.watch.recorder import Recorder
    from shoal.train.watch.watched import Watched

    recorder = Recorder(
        directory.flight(comm.rank),
        comm.rank,
        comm.world,
        capacity=job.watch.events,
        host=socket.gethostname(),
        beat_s=job.watch.beat_s,
    )
    return cast("TorchComm", Watched(comm, recorder))


def _self_check(directory: RunDir, comm: TorchComm) -> None:
    """What a robust run asks of every rank before it trains.

    Raises:
        MachineError: this rank must not take part.
    """
    from shoal.train.watch.selfcheck import check_neighbours, check_rank

    rates = check_rank(comm.device)
    wrong = check_neighbours(comm)
    if comm.rank in wrong:
        raise MachineError(
            f"self-check: sums with the neighbours are wrong, as seen by ranks {list(wrong)}"
        )
    write_json(directory.ranks / f"rank-{comm.rank}.check", rates)


def local_world() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _identity(rank: _Rank) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued by this run."""
    found = dict(rank.trainer.engine.config.model_dump(mode="json", exclude={"name"}))
    tuned, job = rank.trainer.tuned, rank.plan.job
    if tuned is not None and job.finetune is not None:
        found |= {"finetune": job.finetune.model_dump(mode="json"), "base": tuned.base}
    return found


def _start(rank: _Rank, *, resume: bool, from_step: int | None) -> int:
    """Load a checkpoint if asked, the newest or a named one; returns the first step.

    A run that has saved none begins where its ``start.json`` says.
    """
    from shoal.train.memory import version_in_memory
    from shoal.train.start import open_start, take_over

    first = 0
    saved = report = None
    version = version_in_memory() if resume and from_step is None else None
    if version is not None and version.step >= max(rank.store.steps(), default=0):
        with contextlib.closing(version):
            _expect_run(rank, version.meta)
            rank.trainer.load(version)
        first = version.step
    elif from_step is not None:
        saved = rank.store.open(from_step, verify=False)
    elif resume:
        saved = rank.store.latest(verify=False)  # what is loaded is verified on the way
    if saved is not None:
        saved.require_model(_identity(rank))
        _expect_run(rank, saved.meta)
        report = rank.trainer.load(saved)
        first = int(saved.meta["step"])
    elif not first and (other := open_start(rank.directory.root)) is not None:
        first = take_over(rank.trainer, other, _identity(rank), _run_of(rank))
    if rank.chief:
        rank.meter.event(
            "start",
            step=first,
            total=rank.total,
            ranks=rank.comm.world,
            resumed=first > 0,
            level="memory" if version is not None and saved is None and first else "disk",
            parameters=int(parameters(rank.plan.shape)),
            **(
                {}
                if report is None
                else {
                    "load_s": report.seconds,
                    "wanted_bytes": report.wanted_bytes,
                    "read_bytes": report.read_bytes,
                }
            ),
        )
    return first


def _run_of(rank: _Rank) -> dict[str, Any]:
    """What must stay when a run goes on."""
    job = rank.plan.job
    return {
        "data": rank.tokens.fingerprint,
        "seed": job.seed,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "optimizer": job.optimizer.name,
    }


def _expect_run(rank: _Rank, meta: Mapping[str, Any]) -> None:
    """Refuse to continue on other data, with another seed or another batch."""
    now = _run_of(rank)
    then = meta["run"]
    for key, value in now.items():
        if then.get(key) != value:
            raise CheckpointError(
                f"{rank.store.where}: saved with {key} = {then.get(key)!r}, and the run "
                f"has {value!r}; set it back, or start a new run under another name"
            )


def _save(rank: _Rank, step: int) -> None:
    """Begin to save; what training waits for is over when this returns."""
    meta = _meta(rank, step)
    rank.saver.save(step, rank.trainer.pieces(), meta)
    if rank.plan.job.checkpoint.dump:
        from shoal.checkpoint.formats.deepspeed_dump import dump

        trainer = rank.trainer
        dump(
            rank.directory.dumps,
            step,
            trainer.engine,
            trainer.updater.state(),
            meta,
            rank.comm.barrier,
            keep=rank.plan.job.checkpoint.keep,
        )


def _choose_interval(rank: _Rank, step: int, step_s: float) -> None:
    """Take the interval that loses the least, the same on all ranks, and show it."""
    from shoal.checkpoint.interval import choose, failures_seen
    from shoal.core.meter import read_events

    chosen = None
    if rank.chief:
        failures, seconds = failures_seen(read_events(rank.directory.events))
        chosen = choose(
            stall_s=rank.stall_s or 0.0, step_s=step_s, failures=failures, observed_s=seconds
        )
        rank.meter.event(
            "checkpoint_interval",
            step=step,
            steps=chosen.steps,
            stall_s=chosen.stall_s,
            mtbf_s=chosen.mtbf_s,
            overhead=chosen.overhead,
        )
    told = CommPeers(rank.comm).gather(str(chosen.steps if chosen else 0).encode())
    rank.interval = int(told[0])


def _tell_saves(rank: _Rank) -> None:
    """Say which saves are over; one that failed does not end the run."""
    for ticket in rank.saver.finished():
        rank.unsaved = ticket.error
        rank.stall_s = sum(ticket.blocked_s.values())
        if not rank.chief:
            continue
        if ticket.error is not None:
            rank.meter.event("checkpoint_failed", step=ticket.step, message=str(ticket.error))
            continue
        rank.meter.event(
            "checkpoint",
            step=ticket.step,
            seconds=ticket.seconds,
            blocked_s=ticket.blocked_s,
            phases_s=ticket.phases_s,
            bytes=ticket.bytes,
            ranks_s=list(ticket.ranks_s),
        )
        for number, phases in enumerate(ticket.ranks_s):
            for name, seconds in phases.items():
                rank.meter.gauge("checkpoint_phase_s", seconds, rank=str(number), phase=name)


def _end_saves(rank: _Rank) -> None:
    """Wait for what is under way.

    Raises:
        CheckpointError: the last step is not saved.
    """
    with phase(rank.comm, "checkpoint"):
        rank.saver.close()
        _tell_saves(rank)
        # Rank 0 commits for all, so nobody leaves before it is done.
        rank.comm.barrier()
    if rank.unsaved is not None:
        raise rank.unsaved


def _meta(rank: _Rank, step: int) -> dict[str, Any]:
    """What is kept beside the tensors; order of the data and random numbers follow from it."""
    job = rank.plan.job
    return {
        "step": step,
        "model": _identity(rank),
        "run": _run_of(rank),
        "job": job.model_dump(mode="json"),
    }


def _snapshot(rank: _Rank, step: int) -> None:
    """Begin to copy the state into memory; it is settled before the next update."""
    from shoal.train.loop import held_by

    assert rank.memory is not None
    if rank.memory.due(step):
        held = held_by(rank.trainer.engine, rank.trainer.updater)
        rank.memory.begin(step, held, _meta(rank, step))


def _settle(rank: _Rank) -> None:
    """Wait until the snapshot that was begun is coded, and tell what it has cost."""
    assert rank.memory is not None
    settled = rank.memory.settle()
    if settled is not None and rank.chief and settled.step % rank.plan.job.log_every == 0:
        rank.meter.event("snapshot", **settled._asdict())


def _train(rank: _Rank, first: int, asked: Callable[[], bool]) -> bool:
    """Run the steps; returns whether the run was stopped before its end."""
    from shoal.train.mfu import step_flops

    job = rank.plan.job
    flops = step_flops(rank.plan)
    every = job.checkpoint.every
    rank.interval = FIRST_STEPS if every == "auto" else every
    saved_at = first
    recorded = min(first + RECORDED, rank.total - 1) if job.parallel.pp > 1 else None
    replanner = _replanner(rank)
    if rank.memory is not None:
        rank.trainer.after_backward = lambda: _settle(rank)
    for step in range(first, rank.total):
        before = _sent(rank)
        record = step == recorded or replanner is not None
        result = rank.trainer.step(step, stop=asked(), record=record)
        if step == recorded:
            timeline.gather(rank.trainer.engine, rank.directory, step)
        if rank.chief and (step % job.log_every == 0 or step + 1 == rank.total):
            rank.meter.event(
                "step",
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                step_s=result.seconds,
                tokens_per_s=result.tokens / result.seconds,
                mfu=flops / result.seconds / rank.peak_flops,
                memory_bytes=rank.trainer.memory_bytes(),
                wire_bytes=_sent(rank) - before,
                **({"tier_bytes": tiers} if (tiers := rank.trainer.tier_bytes()) else {}),
            )
        updater = rank.trainer.updater
        if rank.chief and isinstance(updater, Chooses) and (chosen := updater.choice()) is not None:
            rank.meter.event("swap", step=step, **chosen)
        done = step + 1
        last = done == rank.total
        if rank.memory is not None and not last and not result.stop:
            _snapshot(rank, done)
        if every == "auto":
            due = done - saved_at >= rank.interval
        else:
            due = bool(every) and done % every == 0
        if last or due or result.stop:
            if job.watch.record and job.watch.check_every:
                # What a unit that computes wrongly has spoilt must not become a checkpoint.
                check_arithmetic(rank.comm.device, seed=done)
            with phase(rank.comm, "checkpoint"):
                _save(rank, done)
            saved_at = done
        _tell_saves(rank)
        if every == "auto" and first < saved_at == done - 1:
            # The step after a save has shown all that the save held up.
            _choose_interval(rank, done, result.seconds)
        if job.evaluation.every and done % job.evaluation.every == 0 and not last:
            with phase(rank.comm, "evaluate"):
                _evaluate(rank, done, final=False)
        if result.stop and not last:
            return True
        if replanner is not None and not last:
            _replan(rank, replanner, step, result.seconds)
    return False


def _replanner(rank: _Rank) -> Replanner | None:
    """Who says when another plan is better, if the job asks for that."""
    if not rank.plan.job.replan.enabled or rank.comm.world == 1:
        return None
    from shoal.train.replan import Replanner

    return Replanner(rank.plan.job, rank.plan.machine, rank.plan.shape, rank.comm)


def _replan(rank: _Rank, replanner: Replanner, step: int, seconds: float) -> None:
    """Go over to another plan where that pays."""
    events = rank.trainer.engine.runtime.events or []
    change = replanner.observe(seconds, sum(event.end - event.start for event in events))
    if change is None:
        return
    from shoal.train.reshard import switch

    begin = time.perf_counter()
    rank.saver.before_update()
    rank.trainer, sent = switch(rank.trainer, change.job, rank.tokens, rank.comm)
    rank.trainer.before_update = rank.trainer.before_group = rank.saver.before_update
    rank.undo.enter_context(contextlib.closing(rank.trainer))
    replanner.changed(change.job)
    if rank.chief:
        rank.meter.event(
            "replan",
            step=step,
            seconds=time.perf_counter() - begin,
            gain=change.gain,
            reason=change.reason,
            moved_bytes=sent,
            parallel=change.job.parallel.model_dump(mode="json", exclude_defaults=True),
            shard=str(change.job.shard),
            microbatch=change.job.microbatch,
        )


def _sent(rank: _Rank) -> float:
    """Bytes that this rank has sent so far."""
    totals = rank.meter.totals()
    return sum(value for key, value in totals.items() if key.startswith("wire_bytes"))


def _evaluate(rank: _Rank, step: int, *, final: bool) -> None:
    from shoal.train.evaluate import bits_per_byte, sample

    evaluation = rank.plan.job.evaluation
    begin = time.perf_counter()
    found = bits_per_byte(
        rank.trainer, rank.tokens, max_tokens=None if final else evaluation.tokens
    )
    text = ""
    if evaluation.sample_tokens and rank.chief:
        text = sample(rank.trainer, rank.tokens, evaluation.sample_tokens)
    rank.comm.barrier()
    if rank.chief:
        rank.meter.event(
            "eval", step=step, final=final, seconds=time.perf_counter() - begin, **found
        )
        if text:
            rank.meter.event("sample", step=step, text=text)


def _finish(rank: _Rank) -> None:
    if rank.plan.job.evaluation.final:
        with phase(rank.comm, "evaluate"):
            _evaluate(rank, rank.total, final=True)


def main() -> int:
    """Run the rank named by the environment; its status is the exit code."""
    directory = RunDir(Path(sys.argv[1]))
    number = int(os.environ.get("RANK", "0"))
    with directory.stack(number).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            words = sys.argv[2:]
            named = [w.removeprefix("--from-step=") for w in words if w.startswith("--from-step=")]
            run_rank(
                directory,
                resume="--resume" in words,
                from_step=int(named[0]) if named else None,
            )
        except ShoalError as error:
            write_json(
                directory.error(number), {"type": type(error).__name__, "message": str(error)}
            )
            print(f"error: {error}", file=sys.stderr)
            # A peer's death is told by the peer's own status, not by ours.
            return PEER_ERROR if isinstance(error, RankError) else USER_ERROR
        finally:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGUSR1)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a broken process group must not keep a rank alive.
    os._exit(code)
