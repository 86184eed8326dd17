"""One rank of a training run: ``python -m shoal.train.worker RUN_DIR [--resume]``.

It reads the plan that lies in the run's directory, so a rank needs no other
argument; under torchrun or Shoal's own supervisor the usual variables name it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shoal.core.errors import MachineError, PlanError, RankError, ShoalError
from shoal.core.files import reserve, use_reserved, write_json
from shoal.core.janitor import leave
from shoal.cost.arithmetic import parameters
from shoal.train import timeline
from shoal.train.device import computes_on
from shoal.train.layout import RunDir
from shoal.train.protocols import Chooses
from shoal.train.watch.selfcheck import check_arithmetic
from shoal.train.watch.watched import phase

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.snapshot import Snapshots
    from shoal.core.meter import Meter, Sink
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import TrainJob, TrainPlan
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.hdp.offload import HostShare
    from shoal.train.loop import StepResult, Trainer
    from shoal.train.replan import Replanner
    from shoal.train.saving import Saves

__all__ = ["main", "run_rank"]

# The step of a run whose passes are recorded, when memory and threads are warm.
RECORDED = 4

USER_ERROR = 2
PEER_ERROR = 3


@dataclass
class _Rank:
    """Everything one rank holds while it trains."""

    directory: RunDir
    plan: TrainPlan
    meter: Meter
    comm: TorchComm
    tokens: TokenSet
    trainer: Trainer
    saves: Saves
    total: int
    peak_flops: float
    undo: contextlib.ExitStack
    memory: Snapshots | None

    @property
    def chief(self) -> bool:
        """This rank writes events, evaluation results and samples."""
        return self.comm.rank == 0


def run_rank(directory: RunDir, *, resume: bool, sinks: Sequence[Sink] = ()) -> None:
    """Train on this rank until the plan's last step, or until asked to stop.

    Args:
        directory: of the run, prepared.
        resume: continue from the newest checkpoint.
        sinks: take the events too, on rank 0.

    Raises:
        ShoalError: whatever the run cannot go on with.
    """
    asked = _catch_termination()
    with _joined(directory, sinks) as rank:
        first = _start(rank, resume=resume)
        stopped = _train(rank, first, asked)
        with phase(rank.comm, "checkpoint"):
            rank.saves.end()
        if not stopped:
            _finish(rank)
        rank.saves.drain()
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
def _joined(directory: RunDir, watching: Sequence[Sink] = ()) -> Iterator[_Rank]:
    import torch

    from shoal.core.meter import SINKS, Meter
    from shoal.corpora.tokens import open_tokens
    from shoal.ir import TrainPlan
    from shoal.parallel.comm.agree import agree
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.plan.length import num_steps
    from shoal.train.allocator import keep_freed_memory
    from shoal.train.build import weights_of
    from shoal.train.loop import Trainer
    from shoal.train.memory import snapshots_of
    from shoal.train.mfu import peak_flops
    from shoal.train.nodes import tokens_of
    from shoal.train.saving import Saves

    plan = TrainPlan.load(directory.plan)
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
    cuda = computes_on(plan.machine) == "gpu"
    device = "cuda" if cuda else "cpu"
    if cuda:
        if job.base == "shared":
            raise PlanError(
                "base = shared on a GPU: its memory holds the weights of one job; give base = own"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    sinks: list[Sink] = []
    if number == 0:
        sinks.append(SINKS.build({"name": "jsonl", "path": str(directory.events)}))
        sinks += [SINKS.build(choice) for choice in job.sinks]
        sinks += watching
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
            tokens = open_tokens(tokens_of(directory), weights.config.vocab_size)
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
                        machine=plan.machine,
                    )
                )
            )
            saves = Saves(directory, job, comm, meter, device=device)
            # After an error nothing more is committed; after a good end nothing is under way.
            undo.callback(saves.abandon)
            trainer.before_update = trainer.before_group = saves.before_update
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
                saves=saves,
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


def _start(rank: _Rank, *, resume: bool) -> int:
    """Load a state if asked, tell where the run begins, and return the first step."""
    from shoal.train.resuming import resumed

    found = resumed(rank.trainer, rank.saves, rank.directory, resume=resume)
    if rank.chief:
        rank.meter.event(
            "start",
            step=found.step,
            total=rank.total,
            ranks=rank.comm.world,
            resumed=found.step > 0,
            level=found.level,
            parameters=int(parameters(rank.plan.shape)),
            **found.cost(),
        )
    return found.step


def _snapshot(rank: _Rank, step: int) -> None:
    """Begin to copy the state into memory; it is settled before the next update."""
    from shoal.train.resuming import meta_of
    from shoal.train.state import held_by

    assert rank.memory is not None
    if rank.memory.due(step):
        held = held_by(rank.trainer.engine, rank.trainer.updater)
        rank.memory.begin(step, held, meta_of(rank.trainer, rank.plan.job, step))


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
    rank.saves.begin(first)
    recorded = min(first + RECORDED, rank.total - 1) if job.parallel.pp > 1 else None
    replanner = _replanner(rank)
    if rank.memory is not None:
        rank.trainer.after_backward = lambda: _settle(rank)
    due = evaluate = False
    for step in range(first, rank.total):
        before = _sent(rank)
        record = step == recorded or replanner is not None
        result = rank.trainer.step(step, stop=asked(), record=record)
        if step == recorded:
            timeline.gather(rank.trainer.engine, rank.directory, step)
        if rank.chief and step == first and rank.trainer.arena_bytes:
            rank.meter.event("arenas", **rank.trainer.arena_bytes)
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
                **_outer(rank.trainer, result),
                **_balance(result),
                **_gradients(rank.trainer),
                **_dealt(rank.trainer),
            )
        if rank.chief and result.round_loss is not None:
            rank.meter.event("round", step=step, loss=result.round_loss)
        updater = rank.trainer.updater
        if rank.chief and isinstance(updater, Chooses) and (chosen := updater.choice()) is not None:
            rank.meter.event("swap", step=step, **chosen)
        done = step + 1
        last = done == rank.total
        if rank.memory is not None and not last and not result.stop:
            _snapshot(rank, done)
        # What falls within a round of workers waits for its end, when they agree.
        due = due or rank.saves.due(done)
        if last or result.stop or (due and rank.trainer.settled):
            due = False
            if job.watch.record and job.watch.check_every:
                # What a unit that computes wrongly has spoilt must not become a checkpoint.
                check_arithmetic(rank.comm.device, seed=done)
            with phase(rank.comm, "checkpoint"):
                rank.saves.save(rank.trainer, done)
        rank.saves.tell(done, result.seconds)
        evaluate = evaluate or (job.evaluation.every > 0 and done % job.evaluation.every == 0)
        if evaluate and rank.trainer.settled and not last:
            evaluate = False
            with phase(rank.comm, "evaluate"):
                _evaluate(rank, done, final=False)
        if result.stop and not last:
            return True
        if replanner is not None and not last:
            _replan(rank, replanner, step, result.seconds)
    return False


def _balance(result: StepResult) -> dict[str, float]:
    """What a step event says of experts."""
    found = result.balance
    if found is None:
        return {}
    loss = {} if found.loss is None else {"balance": found.loss}
    told = {"imbalance": found.imbalance, "dropped": found.dropped, **loss}
    if result.lent is not None:
        told |= {"copies_exposed_s": result.lent.exposed_s, "copies_bytes": result.lent.peak_bytes}
    if result.moved is not None:
        told |= {"moved_experts": result.moved.experts, "moved_bytes": result.moved.sent_bytes}
    return told


def _gradients(trainer: Trainer) -> dict[str, int]:
    """What a step event says of gradients that travelled in slices, and of the rest."""
    found = trainer.engine.sent_gradients()
    if found is None:
        return {}
    return {"gradients_hidden_bytes": found[0], "gradients_after_bytes": found[1]}


def _outer(trainer: Trainer, result: StepResult) -> dict[str, float]:
    """What a step event says of workers with rounds."""
    return {} if trainer.engine.outer is None else {"outer_exposed_s": result.outer_exposed_s}


def _dealt(trainer: Trainer) -> dict[str, float]:
    """What a step event says of sequences that were dealt out."""
    hybrid = trainer.engine.hybrid
    if hybrid is None or hybrid.plan is None:
        return {}
    from shoal.plan.balance.sequences.predicted import predict

    plan = hybrid.plan
    return {
        "sequences": len(plan.lengths),
        "shared_sequences": sum(len(s.sequences) for s in plan.steps if len(s.ranks) > 1),
        "micro_steps": len(plan.steps),
        "idle_share": predict(plan, hybrid.cost).idle_share,
        **_at_host(hybrid.host),
    }


def _at_host(host: HostShare | None) -> dict[str, float]:
    """What a step event says of activations that went to the host."""
    if host is None:
        return {}
    return {"kept_bytes": host.kept_bytes, "offloaded_bytes": host.sent_bytes}


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
    rank.saves.before_update()
    rank.trainer, sent = switch(rank.trainer, change.job, rank.tokens, rank.comm)
    rank.trainer.before_update = rank.trainer.before_group = rank.saves.before_update
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


def _end_with(directory: RunDir, number: int, kind: str, message: str) -> None:
    """Write what this rank ends with where the supervisor reads it, and into its log."""
    record = json.dumps({"type": kind, "message": message})
    use_reserved(directory.spare(number), directory.error(number), record.encode())
    with contextlib.suppress(OSError):  # the log may lie on a full disk
        print(f"error: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the rank named by the environment; its status is the exit code."""
    directory = RunDir(Path(sys.argv[1]))
    number = int(os.environ.get("RANK", "0"))
    reserve(directory.spare(number))
    with directory.stack(number).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            run_rank(directory, resume="--resume" in sys.argv[2:])
        except ShoalError as error:
            _end_with(directory, number, type(error).__name__, str(error))
            # A peer's death is told by the peer's own status, not by ours.
            return PEER_ERROR if isinstance(error, RankError) else USER_ERROR
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise
            message = f"{error.filename or directory.ranks}: cannot be written ({error.strerror})"
            _end_with(directory, number, "StoreError", f"{message}; free some space and resume")
            return USER_ERROR
        finally:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGUSR1)
    return 0


if __name__ == "__main__":
    # Threads of a broken process group must not keep a rank alive.
    leave(main())
