"""Ranks of an engine as threads, to which commands may come in any order."""

from __future__ import annotations

import queue
import threading

from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.ir import SchedulerLimits, Step
from shoal.serve.cache.host import HostCopyHook
from shoal.serve.engine.ahead import AheadEngine
from shoal.serve.engine.pooling import PoolingHook
from shoal.serve.engine.prompt_logprobs import PromptLogprobs
from shoal.serve.ranks.commands import CommandQueue, CommandWriter
from shoal.serve.ranks.part import check_parts
from shoal.serve.ranks.worker import Rank


class Weights:
    """The parameters of a model in memory, as those of a directory."""

    def __init__(self, model):
        self.config, self.dtype = model.config, model.embed.weight.dtype
        self._found = dict(model.named_parameters())

    def __call__(self, name):
        return self._found[name].detach().reshape(-1)


class ThreadRanks:
    """A runner; commands are held back until a result is asked for, then shuffled rank by rank."""

    def __init__(self, job, model, num_blocks, block_size, *, shuffle=False, **options):
        self.depth = job.parallel.depth
        world = job.parallel.world
        self._inboxes = [CommandQueue(self.depth + 1) for _ in range(world)]
        self._writer, self._held, self._shuffle = CommandWriter(), [], shuffle
        self._results = queue.Queue()
        self._ticket = self._turn = 0
        self.commands = []

        def work(comm):
            try:
                rank = Rank(comm, job, model, **options)
                rank.serve(
                    job,
                    num_blocks,
                    block_size,
                    self._inboxes[comm.rank],
                    lambda ticket, result: self._results.put((ticket, result)),
                )
            except BaseException as cause:
                self._results.put((-1, cause))
                raise

        def run():
            try:
                run_ranks(world, work)
            except BaseException as cause:
                self._results.put((-1, cause))

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def submit(self, step):
        command = self._writer.command(step)
        self.commands.append(command)
        self._held.append(command)
        return command["ticket"]

    def _deliver(self):
        for rank, inbox in enumerate(self._inboxes):
            order = list(self._held)
            if self._shuffle:
                generator(self._turn, purpose="order", index=rank).shuffle(order)
            for command in order:
                inbox.put(command)
        self._held = []
        self._turn += 1

    def collect(self):
        self._deliver()
        ticket, result = self._results.get(timeout=30)
        if isinstance(result, BaseException):
            raise result
        assert ticket == self._ticket
        self._ticket += 1
        return result

    def execute(self, step):
        self.submit(step)
        return self.collect()

    def close(self):
        self._held.append({**self._writer.command(Step(())), "kind": "stop"})
        self._deliver()
        self._thread.join(30)
        assert not self._thread.is_alive()


def thread_engine(job, model, **options):
    """An engine whose model, or the parameters of one, is shared by threads; and its runner."""
    if hasattr(model, "named_parameters"):
        model = Weights(model)
    check_parts(job, model.config)
    job = job.model_copy(update={"host_tokens": job.host_tokens_of(job.kv_tokens)})
    kv = table("kv").build(job.kv, where="kv").build(job.kv_tokens)
    longest = job.max_position or model.config.max_position
    limits = SchedulerLimits(
        max_running=job.max_running, max_step_tokens=job.max_step_tokens, max_position=longest
    )
    ranks = ThreadRanks(job, model, kv.num_blocks, kv.block_size, **options)
    preemption = table("preempt").build(job.preempt).build(kv, limits, host_tokens=job.host_tokens)
    scheduler = table("scheduler").build(job.scheduler).build(kv, limits, preemption)
    hooks = (HostCopyHook(), PoolingHook(), PromptLogprobs())
    vocab = model.config.vocab_size
    return AheadEngine(scheduler, ranks, kv=kv, vocab_size=vocab, hooks=hooks), ranks
