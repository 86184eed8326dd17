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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shoal.core.errors import MachineError, PlanError, RankError, ShoalError
from shoal.core.files import reserve, use_reserved, write_json
from shoal.core.janitor import leave
from shoal.cost.arithmetic import parameters
from shoal.train.device import computes_on
from shoal.train.hooks import RankRun, RunHook
from shoal.train.layout import RunDir
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from shoal.core.meter import Sink
    from shoal.ir import TrainJob
    from shoal.parallel.comm.collectives import TorchComm

USER_ERROR = 2
PEER_ERROR = 3


def run_rank(directory: RunDir, *, resume: bool, sinks: Sequence[Sink] = ()) -> None:
    """Train on this rank until the plan's last step, or until asked to stop.

    Args:
        directory: of the run, prepared.
        resume: continue from the newest checkpoint.
        sinks: take the events too, on rank 0.

    Raises:
        ShoalError: an error that ends the run.
    """
    request = _catch_termination()
    with joined(directory, sinks) as run:
        for hook in _hooks(run):
            run.add(hook)
        first = _start(run, resume=resume)
        stopped = _train(run, first, request)
        with phase(run.comm, "checkpoint"):
            run.saves.end()
        if not stopped:
            for hook in run.hooks:
                hook.completed(run)
        run.saves.drain()
        run.event("stop" if stopped else "end", step=run.total)


def _hooks(run: RankRun) -> Iterator[RunHook]:
    """What this run does between its steps; their order is that of their kinds."""
    from shoal.train.evaluate import EvaluationHook
    from shoal.train.events import EventsHook
    from shoal.train.memory import MemoryHook
    from shoal.train.replan import ReplanHook
    from shoal.train.timeline import TimelineHook

    job = run.plan.job
    yield EventsHook()
    yield run.saves
    yield EvaluationHook()
    if job.parallel.pp > 1:
        yield TimelineHook()
    if job.checkpoint.memory is not None:
        yield MemoryHook(run)
    if job.replan.enabled and run.comm.world > 1:
        yield ReplanHook(run)


def _train(run: RankRun, first: int, asked: Callable[[], bool]) -> bool:
    """Run the steps; returns whether the run was stopped before its end."""
    for hook in run.hooks:
        hook.begin(run, first)
    for number in range(first, run.total):
        record = [hook.step_begins(run, number) for hook in run.hooks]
        result = run.trainer.step(number, stop=asked(), record=any(record))
        for hook in run.hooks:
            hook.step_done(run, number, result)
        if result.stop:
            return number + 1 < run.total
    return False


def _catch_termination() -> Callable[[], bool]:
    flag = {"asked": False}

    def handle(_signal: int, _frame: object) -> None:
        flag["asked"] = True

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return lambda: flag["asked"]


@contextlib.contextmanager
def joined(directory: RunDir, watching: Sequence[Sink] = ()) -> Iterator[RankRun]:
    """This rank among all others, ready to train; without hooks of the run.

    Args:
        directory: of the run, prepared.
        watching: take the events too, on rank 0.
    """
    import torch

    from shoal.core.meter import SINKS, Meter
    from shoal.corpora.tokens import open_tokens
    from shoal.ir import TrainPlan
    from shoal.parallel.comm.agree import agree
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.plan.length import num_steps
    from shoal.train.allocator import keep_freed_memory
    from shoal.train.build import weights_of, with_ends
    from shoal.train.loop import RankTrainer
    from shoal.train.mfu import peak_flops
    from shoal.train.nodes import tokens_of
    from shoal.train.saving import RunSaver

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
            weights.config = with_ends(weights.config, tokens)
            # Ranks that were given different jobs would wait for each other for ever.
            agree(comm, "the job", job.model_dump(mode="json"))
            total = num_steps(job, plan.estimate)
            trainer = undo.enter_context(
                contextlib.closing(
                    RankTrainer(
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
            saves = RunSaver(directory, job, comm, meter, device=device)
            # After an error nothing more is committed; after a good end nothing is under way.
            undo.callback(saves.abandon)
            yield RankRun(
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
            )
        finally:
            comm.close()


def _watched(comm: TorchComm, directory: RunDir, job: TrainJob) -> TorchComm:
    """The communicator with a flight recorder on it."""
    import socket

    from shoal.train.watch.recorder import Recorder
    from shoal.train.watch.watched_comm import WatchedComm

    recorder = Recorder(
        directory.flight(comm.rank),
        comm.rank,
        comm.world,
        capacity=job.watch.events,
        host=socket.gethostname(),
        beat_s=job.watch.beat_s,
    )
    return cast("TorchComm", WatchedComm(comm, recorder))


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


def _start(run: RankRun, *, resume: bool) -> int:
    """Load a state if asked, report where the run begins, and return the first step."""
    from shoal.corpora.order import cut_documents
    from shoal.train.resuming import resumed

    job = run.plan.job
    result = resumed(run.trainer, run.saves, run.directory, resume=resume)
    run.event(
        "start",
        step=result.step,
        total=run.total,
        ranks=run.comm.world,
        resumed=result.step > 0,
        level=result.level,
        parameters=int(parameters(run.plan.shape)),
        tokens=len(run.tokens.train),
        learned=run.tokens.train.num_learned,
        documents=run.tokens.train.num_documents,
        cut=cut_documents(run.tokens.train, job.packing, seq_len=job.seq_len),
        **result.cost(),
    )
    return result.step


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
            # A peer's death is reported by the peer's own status, not by ours.
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
