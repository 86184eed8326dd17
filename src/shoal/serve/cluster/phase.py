"""The process of one instance of several: an engine of its own, with its own cache.

``python -m shoal.serve.cluster.phase --fd N`` talks to the process that started it through an
inherited socket. An instance computes prompts (``prefill``), generates (``decode``), or does both
(``both``). A prefill instance says which blocks hold a request that goes on elsewhere, and keeps
them until it receives ``release`` for them. A decode instance fetches a request from there when its
scheduler accepts it, and says how many bytes that moved.

Messages in: ``start`` (job, role, instance, instances, directory, cpus), ``peers`` (caches),
``add`` (a request), ``migrate`` (a request, source, blocks), ``release`` (id), ``abort`` (id),
``profile`` (shapes, seconds), ``record`` (on). Messages out: ``ready`` (what the model and the
cache are), ``mapped``, ``profiled`` (seconds), ``recorded`` (steps), ``outputs`` (with ``stats``,
``told``: vectors and what cannot go on, and ``held``: id -> blocks), ``fetched`` (id, bytes,
seconds), ``dropped`` (id, of a request that was aborted), ``failed`` (why the process ends).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from shoal.core.config import parse
from shoal.core.errors import ServeError
from shoal.core.parts import Choice, table
from shoal.core.traits import traits
from shoal.ir import DecodePhaseScheduler, Output, Phase, PrefillPhaseScheduler, ServeJob
from shoal.serve.cluster.instance import main_of
from shoal.serve.engine.hooks import EngineHook
from shoal.serve.engine.process import EngineConnection
from shoal.serve.engine.wire import pack_output, unpack_request

if TYPE_CHECKING:
    from shoal.serve.cluster.handover import KVTransfer, SharedStores
    from shoal.serve.engine.loop import Engine
    from shoal.serve.engine.runner import LocalRunner


def phase_choice(role: str, phase: Phase | None) -> Choice:
    """The scheduler of a phase: its own, or that of its name.

    Raises:
        ServeError: a scheduler of the other phase.
    """
    phase_choice = phase.scheduler if phase is not None and phase.scheduler else Choice(name=role)
    built = table("phase").load(phase_choice.name)
    made = built.__name__
    other = {"prefill": "phase_decode", "decode": "phase_prefill"}[role]
    if other in traits("phase", phase_choice):
        raise ServeError(
            f"disagg.{role}.scheduler = {phase_choice.name} ({made}): expected a scheduler "
            f"of the {role} phase, such as {role}"
        )
    return phase_choice


class FetchHook(EngineHook):
    """Brings what the scheduler of a decode instance has room for, before it plans.

    Args:
        parent: receives what each request moved.

    Attributes:
        sources: request -> instance that holds it, and its blocks there.
        caches: of the others, once these are known.
    """

    kind: ClassVar[str] = "fetching"

    def __init__(self, parent: EngineConnection) -> None:
        self._parent = parent
        self.sources: dict[str, tuple[int, list[int]]] = {}
        self.caches: KVTransfer | None = None

    def before_plan(self) -> None:
        """Fetch."""
        scheduler = cast(DecodePhaseScheduler, self.engine.scheduler)
        for request in scheduler.accept():
            assert self.caches is not None
            source, blocks = self.sources.pop(request.id)
            began = time.perf_counter()
            moved = self.caches.fetch(source, blocks, request.blocks, request.n_prompt)
            seconds = time.perf_counter() - began
            scheduler.arrived(request.id)
            message = {"kind": "fetched", "id": request.id, "bytes": moved, "seconds": seconds}
            self._parent.send(message)

    def ended(self, request_id: str) -> None:
        """Fetch nothing of an aborted request any more."""
        self.sources.pop(request_id, None)


class PhaseInstance:
    """One engine of several, at the end of a connection."""

    def __init__(self, start: Mapping[str, Any], parent: EngineConnection) -> None:
        from shoal.serve.engine.build import concrete, engine_of, load_model

        job = parse(ServeJob, start["job"], where="job")
        self.role: str = start["role"]
        self.parent = parent
        self.stores: SharedStores | None = None
        model = load_model(job)
        if job.kv_tokens is None:
            whole = concrete(job, model.config, model.embed.weight.dtype).kv_tokens
            assert whole is not None
            job = job.model_copy(update={"kv_tokens": max(1, whole // start["instances"])})
        part = None
        if self.role != "both":
            phase = getattr(job.disagg, self.role) if job.disagg else None
            choice = phase_choice(self.role, phase)
            part = table("phase").build(choice, where=f"disagg.{self.role}.scheduler")
        if self.role == "prefill":
            from shoal.serve.cluster.handover import SharedStores

            self.stores = SharedStores(Path(start["directory"]), f"cache{start['instance']}")
        self.engine: Engine
        self.runner: LocalRunner
        self.engine, limits, self.runner = engine_of(
            job, model, phase=part, zeros=self.stores.zeros if self.stores else None
        )
        if self.role == "decode":
            self.fetches = FetchHook(parent)
            self.engine.register(self.fetches)
        # Steps as they were run, with all that the loop does around them; None: not recorded.
        # With the pause before each.
        self._record: list[tuple[list[tuple[int, int]], float, float]] | None = None
        assert self.engine.kv is not None
        parent.send(
            {
                "kind": "ready",
                "vocab_size": model.config.vocab_size,
                "max_position": limits.max_position,
                "eos_ids": sorted(model.config.eos_ids),
                "num_blocks": self.engine.kv.num_blocks,
                "block_size": self.engine.kv.block_size,
                "token_bytes": _token_bytes(self.runner),
                "stores": [file.pack() for file in self.stores.files] if self.stores else [],
            }
        )

    def run(self) -> None:
        """Answer messages until the parent goes away.

        Raises:
            EOFError: it did.
        """
        engine = self.engine
        ended = time.perf_counter()
        while True:
            working = self._working
            began = time.perf_counter()
            messages = list(self.parent.receive(0.0 if working else None))
            if not working:  # what it waited for belongs to no step
                began = time.perf_counter()
            for message in messages:
                self._handle(message)
            if self._working:
                outputs = engine.step()
                # Not those that began: the process before this one times requests.
                notes = [one for one in engine.drain_events() if one["kind"] != "began"]
                if outputs or notes:
                    self._tell(outputs, notes)
                before, ended = ended, time.perf_counter()
                if self._record is not None:
                    shape = [(chunk.start, chunk.length) for chunk in engine.last_chunks]
                    self._record.append((shape, ended - began, began - before))

    @property
    def _working(self) -> bool:
        """Whether a step would compute something: held requests wait for others."""
        if self.role == "prefill":
            handing = cast(PrefillPhaseScheduler, self.engine.scheduler)
            return handing.num_waiting + handing.num_running > len(handing.held)
        return self.engine.busy

    def _tell(self, outputs: list[Output], events: list[dict[str, Any]]) -> None:
        message: dict[str, Any] = {
            "kind": "outputs",
            "outputs": [pack_output(output) for output in outputs],
            "told": events,
            "stats": self.engine.stats(),
        }
        if self.role == "prefill":
            held = cast(PrefillPhaseScheduler, self.engine.scheduler).held
            message["held"] = {
                output.request_id: held[output.request_id].blocks
                for output in outputs
                if output.request_id in held
            }
        self.parent.send(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "add":
            self.engine.add(unpack_request(message))
        elif kind == "migrate":
            request = unpack_request(message)
            self.fetches.sources[request.id] = message["source"], message["blocks"]
            self.engine.scheduler.add(request)
        elif kind == "release":
            cast(PrefillPhaseScheduler, self.engine.scheduler).release(message["id"])
        elif kind == "abort":
            self.engine.abort(message["id"])
            # Nothing of it is fetched any more: its blocks elsewhere can be given to others.
            self.parent.send({"kind": "dropped", "id": message["id"]})
        elif kind == "record":
            self.parent.send({"kind": "recorded", "steps": self._record or []})
            self._record = [] if message["on"] else None
        elif kind == "profile":
            from shoal.serve.bench.profile import profile

            shapes = [tuple((start, length) for start, length in one) for one in message["shapes"]]
            samples = profile(self.runner, shapes, seconds=message["seconds"])
            self.parent.send({"kind": "profiled", "seconds": [one.seconds for one in samples]})
        elif kind == "peers":
            from shoal.serve.cluster.handover import MappedCaches, StoreFile

            others = [
                ([StoreFile(f["path"], tuple(f["shape"]), f["dtype"]) for f in files], size)
                for files, size in message["caches"]
            ]
            self.fetches.caches = MappedCaches(self.runner.cache, others)
            self.parent.send({"kind": "mapped"})
        else:
            raise ServeError(
                f"message to an instance = {kind!r}: expected add, migrate, release, abort"
            )


def _token_bytes(runner: LocalRunner) -> int:
    return runner.cache.nbytes // (runner.cache.num_blocks * runner.cache.block_size)


def main(arguments: list[str] | None = None) -> int:
    """See :func:`~shoal.serve.cluster.instance.main_of`."""
    return main_of(
        lambda start, parent: PhaseInstance(start, parent).run(),
        "shoal.serve.cluster.phase",
        __doc__,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
