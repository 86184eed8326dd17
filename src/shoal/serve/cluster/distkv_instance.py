"""The process of one instance of several that lend each other memory for keys and values.

``python -m shoal.serve.cluster.distkv_instance --fd N`` talks to the process that started it
through an inherited socket, and to the other instances through Unix sockets of their own. A
``host`` instance has a cache and no requests: it only lends.

Messages in: ``start`` (job, instance, directory, cpus), ``peers`` (paths), ``room`` (blocks that
others would lend), ``add`` (id, tokens, n_prompt, params, priority, adapter, salt), ``abort``
(id), ``loans`` (creditor and blocks of each), ``recall`` (creditor, blocks), ``lost`` (instance).
Messages out: ``ready`` (what model and cache are), ``mapped``, ``taken`` (id of a request that is
queued), ``outputs`` (with ``stats``), ``beat``, ``failed`` (why the process ends).

Source: Lin et al., Infinite-LLM, 2024, section 4.2.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.core.config import parse
from shoal.core.errors import ServeError, require
from shoal.core.parts import table
from shoal.ir import Request, ServeJob
from shoal.model import huggingface
from shoal.plan.batching.cache.distributed import Distributed, DistributedBlocks
from shoal.plan.batching.cache.loans import InstanceStatus
from shoal.serve.cache.paged import PagedCache, token_bytes
from shoal.serve.cluster.borrow import LendingHook
from shoal.serve.cluster.distattn import DistRunner, part_kernel
from shoal.serve.cluster.instance import main_of
from shoal.serve.cluster.lending import Lender
from shoal.serve.engine.build import DTYPES, concrete, engine_of, load_model
from shoal.serve.engine.loop import Engine
from shoal.serve.engine.process import EngineConnection
from shoal.serve.engine.wire import pack_output, unpack_request

# A lender's thread must not wait long for the interpreter while the engine's has it.
_SWITCH_S = 2e-4
# s between looks at the socket while requests wait for others' memory.
_PAUSE_S = 2e-3


class DistKVInstance:
    """One engine of several, at the end of a connection."""

    def __init__(self, start: Mapping[str, Any], parent: EngineConnection) -> None:
        job = parse(ServeJob, start["job"], where="job")
        part = table("kv").build(job.kv, where="kv")
        assert isinstance(part, Distributed)
        self.parent, self.part = parent, part
        self.number: int = start["instance"]
        self.engine: Engine | None = None
        self._lock = threading.RLock()
        self._told = InstanceStatus(instance=-1)
        self._spoke = 0.0
        host = self.number == part.instances
        if host:
            config = huggingface.read_config(Path(job.model))
            torch.set_num_threads(job.threads or 1)
            dtype = DTYPES[start["dtype"]]
            assert dtype is not None
            self.kv = DistributedBlocks(part.host_tokens // part.block_size, part.block_size)
            form = table("kv_format").build(job.kv_format, where="kv_format")
            cache = PagedCache(config, self.kv.num_blocks, part.block_size, dtype=dtype, form=form)
            most = 0
        else:
            model = load_model(job)
            config = model.config
            if job.kv_tokens is None:
                whole = concrete(job, config, model.embed.weight.dtype).kv_tokens
                assert whole is not None
                job = job.model_copy(update={"kv_tokens": max(1, whole // part.instances)})
            self.engine, limits, runner = engine_of(job, model, runner_type=DistRunner)
            assert isinstance(runner, DistRunner)
            assert isinstance(self.engine.kv, DistributedBlocks)
            self.kv, cache, most = self.engine.kv, runner.cache, limits.max_position
            runner.part = part_kernel(config, cache, batch=job.max_running)
            self.lending = LendingHook(self.engine, self.number, self._lock)
        require(
            cache.device.type == "cpu",
            "kv.distributed",
            str(cache.device),
            expected="a model on CPUs: queries go to lenders through memory of the host",
            hint="serve with kv = paged",
            error=ServeError,
        )
        self.form = {
            "model": job.model,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "dtype": str(cache.dtype),
            "format": str(cache.form),
            "block_size": cache.block_size,
        }
        path = str(Path(start["directory"], f"lender{self.number}"))
        kernel = part_kernel(config, cache)
        self.lender = Lender(self.form, self.kv, cache, kernel, config.num_heads, self._lock, path)
        parent.send(
            {
                "kind": "ready",
                "path": path,
                "vocab_size": config.vocab_size,
                "max_position": most,
                "eos_ids": sorted(config.eos_ids),
                "num_blocks": self.kv.num_blocks,
                "block_size": self.kv.block_size,
                "capacity": self.kv.num_blocks - self.kv.watermark,
                "dtype": str(cache.dtype).removeprefix("torch."),
                "token_bytes": token_bytes(config, cache.dtype, cache.form),
            }
        )

    def close(self) -> None:
        """Neither lend nor borrow any more."""
        self.lender.close()
        if self.engine is not None:
            self.engine.close()

    def run(self) -> None:
        """Answer messages until the parent goes away.

        Raises:
            EOFError: it did.
        """
        pause: float = self.part.beat_s
        while True:
            for message in self.parent.receive(pause):
                self.handle(message)
            engine = self.engine
            pause = self.part.beat_s
            if engine is not None and engine.busy:
                outputs = engine.step()
                drain_events = engine.drain_events()
                pause = 0.0 if engine.last_chunks else _PAUSE_S
                if outputs or drain_events:
                    self._tell(engine, outputs, drain_events)
            if engine is not None and not engine.busy and self.lending.settle():
                pause = _PAUSE_S
            self._beat()

    def _tell(self, engine: Engine, outputs: list[Any], events: list[Any]) -> None:
        self.parent.send(
            {
                "kind": "outputs",
                "outputs": [pack_output(output) for output in outputs],
                "told": [one for one in events if one["kind"] != "began"],
                "stats": engine.stats(),
            }
        )

    def _beat(self) -> None:
        """Say how this instance is, if that has changed or it is time."""
        now = time.monotonic()
        if self.engine is not None:
            beat = self.lending.beat()
        else:
            with self._lock:
                beat = InstanceStatus(instance=self.number, lendable=self.kv.num_lendable)
        # Contexts grow in every step, and that is no news.
        news = (beat.lendable, beat.short, beat.ahead, beat.borrowed, len(beat.contexts))
        old = self._told
        known = (old.lendable, old.short, old.ahead, old.borrowed, len(old.contexts))
        wanting = bool(beat.short or beat.ahead) and now - self._spoke > 10 * _PAUSE_S
        if news != known or wanting or now - self._spoke >= self.part.beat_s:
            message = {**asdict(beat), "borrowed": sorted(beat.borrowed.items())}
            self.parent.send({"kind": "beat", "beat": message})
            self._told, self._spoke = beat, now

    def _add(self, engine: Engine, request: Request) -> None:
        """Queue a request; an instance may have been lost since it was let in."""
        try:
            with self._lock:
                engine.scheduler.add(request)
            self.parent.send({"kind": "taken", "id": request.id})
        except ServeError as cause:
            self._tell(engine, [], [{"kind": "refused", "id": request.id, "message": str(cause)}])

    def handle(self, message: Mapping[str, Any]) -> None:
        """Do what a message says.

        Raises:
            ServeError: it says something else.
        """
        kind = message.get("kind")
        if kind == "room":
            with self._lock:
                self.kv.lendable = message["blocks"]
            return
        if kind == "lost" and self.engine is None:
            with self._lock:
                self.kv.lost(message["instance"])
            return
        engine = self.engine
        if engine is None:
            raise ServeError(f"message to a lender = {kind!r}: expected room or lost")
        if kind == "add":
            self._add(engine, unpack_request(message))
        elif kind == "abort":
            engine.abort(message["id"])
        elif kind == "loans":
            for creditor, blocks in message["loans"]:
                self.lending.borrow(creditor, blocks)
        elif kind == "recall":
            self.lending.recall(message["creditor"], message["blocks"])
        elif kind == "lost":
            self.lending.lose(message["instance"])
        elif kind == "peers":
            paths = {int(one): path for one, path in message["paths"]}
            self.lending.meet(paths, self.form, timeout_s=self.part.timeout_s)
            self.parent.send({"kind": "mapped"})
        else:
            raise ServeError(
                f"message to an instance = {kind!r}: expected add, abort, loans, recall or lost"
            )


def main(arguments: list[str] | None = None) -> int:
    """See :func:`~shoal.serve.cluster.instance.main_of`."""
    sys.setswitchinterval(_SWITCH_S)
    return main_of(
        lambda start, parent: DistKVInstance(start, parent).run(),
        "shoal.serve.cluster.distkv_instance",
        __doc__,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
