"""One engine made of several processes: prompts on some, generation on others.

Every instance is a process with an engine and a cache of its own. This one computes nothing: it
sends a prompt to a prefill instance, passes its first token on, offers the request to a decode
instance, and lets the prefill instance forget it when the decode instance has fetched its keys
and values. Which instance it is, a dispatcher says, the one that the simulator asks too. Without
decode instances each instance does both, and only the dispatching is left.

An instance that dies or is silent for too long ends all: nothing waits for what will not come.

Source: Zhong et al., DistServe, 2024, section 4.3.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import ServeError, require
from shoal.core.scratch import SHARED_MEMORY, scratch
from shoal.cost.serving.simulator import ServedRequest, request_of
from shoal.cost.step_cost.fitted import StepSample
from shoal.ir import Arrival, Output, Request, SchedulerLimits, ServeJob
from shoal.plan.batching.cache.paged import PagedBlocks
from shoal.plan.batching.common import Queues
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.serve.cluster.phase import phase_choice
from shoal.serve.engine.child import Child, readable
from shoal.serve.engine.process import EngineLike
from shoal.serve.engine.wire import pack_request, unpack_output

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.serve.bench.profile import Shape

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True)
class MigratedRequest:
    """One request whose keys and values went to a decode instance.

    Args:
        request_id: whose.
        tokens: of its prompt.
        nbytes: that were copied.
        seconds: that copying took.
    """

    request_id: str
    tokens: int
    nbytes: int
    seconds: float


@dataclass
class _Open:
    """A request that has not ended."""

    request: Request
    front: int
    back: int | None = None
    held: bool = False


class DisaggEngine(EngineLike):
    """Requests in, tokens out, by several processes; see the module.

    Args:
        job: the serving job; ``disagg`` has the number of instances, unless ``colocated`` is given.
        colocated: instances that each do both phases, in the place of ``disagg``.
        pin: pin each instance to as many cores as it has threads.
        hang_s: s of silence of an instance with open requests that end everything.
        recording: keep what each request moved in ``moved``, which grows.

    Raises:
        ServeError: an instance cannot be started or cannot load the model, or the job has options
            that only planning supports.
    """

    def __init__(
        self,
        job: ServeJob,
        *,
        colocated: int = 0,
        pin: bool = False,
        hang_s: float = 120.0,
        recording: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check(job, colocated)
        disagg = job.disagg
        fronts = colocated or (disagg.prefill.count if disagg else 1)
        backs = 0 if colocated or disagg is None else disagg.decode.count
        self.clock, self._hang_s = clock, hang_s
        self.moved: list[MigratedRequest] = []
        self._dispatch = LeastLoadedDispatcher(fronts, backs)
        self._open: dict[str, _Open] = {}
        # Aborted while a decode instance may be fetching them -> their holder.
        self._dropping: dict[str, int] = {}
        self._recording = recording
        self._told: list[dict[str, Any]] = []
        self._counts = {"prompt": 0, "new": 0, "moved_bytes": 0}
        self._children: list[Child] = []
        in_memory = os.access(SHARED_MEMORY, os.W_OK)
        self._directory = scratch("handover", SHARED_MEMORY if in_memory else None)
        front: Role = "prefill" if backs else "both"
        back: Role = "decode"
        roles = [front] * fronts + [back] * backs
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        threads = job.threads or max(1, len(cores) // len(roles))
        try:
            for place, role in enumerate(roles):
                own = cores[place * threads : (place + 1) * threads] if pin else []
                number = place - fronts if role == "decode" else place
                self._children.append(
                    Child(
                        f"{role} instance {number}",
                        {
                            "kind": "start",
                            "job": job.model_copy(update={"threads": threads}).model_dump(
                                mode="json", exclude_none=True
                            ),
                            "role": role,
                            "instance": number,
                            "instances": len(roles),
                            "directory": str(self._directory),
                            "cpus": own,
                        },
                        role=role,
                    )
                )
            self._meet(fronts)
        except BaseException:
            self.close()
            raise
        shutil.rmtree(self._directory, ignore_errors=True)  # its users have mapped it

    @staticmethod
    def _check(job: ServeJob, colocated: int) -> None:
        if colocated or job.disagg is None:
            return
        for role, phase in (("prefill", job.disagg.prefill), ("decode", job.disagg.decode)):
            phase_choice(role, phase)
            require(
                phase.tp == phase.pp == 1,
                f"disagg.{role}: tp, pp",
                (phase.tp, phase.pp),
                expected="1 and 1: an instance is one process here",
                hint="shoal plan serve --emit vllm or sglang writes files for engines that split "
                "instances",
                error=ServeError,
            )

    def _meet(self, fronts: int) -> None:
        """Wait until all have loaded, and let decode instances map the caches of the others."""
        self._wait(lambda child: child.ready, "ready")
        self._fronts, self._backs = self._children[:fronts], self._children[fronts:]
        caches = [[one.ready["stores"], one.ready["block_size"]] for one in self._fronts]
        for child in self._backs:
            child.send({"kind": "peers", "caches": caches})
        self._wait(lambda child: child.role != "decode" or child.ready.get("mapped"), "mapped")
        # The books of an instance, empty: a request that cannot run there is refused here.
        self._refusing: list[Queues] = []
        for child in self._children:
            size = child.ready["block_size"]
            kv = PagedBlocks(child.ready["num_blocks"], size, prefix_reuse=False)
            most = child.ready["max_position"]
            limits = SchedulerLimits(max_running=1, max_step_tokens=1, max_position=most)
            self._refusing.append(Queues(kv, limits))

    def _wait(self, done: Callable[[Child], object], kind: str) -> None:
        while waiting := [child for child in self._children if not done(child)]:
            for child in readable(waiting):
                for message in child.receive():
                    if kind == "ready":
                        child.ready = dict(message)
                    child.ready[kind] = True

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, ``2 L n_kv d dtype``."""
        return int(self._children[0].ready["token_bytes"])

    @property
    def sockets(self) -> list[socket.socket]:
        """What to wait for: an instance has something to say."""
        return [child.socket for child in self._children]

    @property
    def pids(self) -> dict[str, int]:
        """Name of an instance -> its process."""
        return {child.name: child.process.pid for child in self._children}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether an instance has sent something that was not read yet."""
        return bool(self._readable(0.0))

    def profile(
        self, shapes: Sequence[Shape], *, seconds: float, together: bool
    ) -> list[tuple[StepSample, ...]]:
        """Time steps of these shapes in the instances; no request may be open.

        Args:
            shapes: of the steps.
            seconds: about how long to measure.
            together: in all instances at once, each in the others' company; else in the first.

        Returns:
            The samples of each instance that measured.
        """
        require(not self._open, "open requests", len(self._open), expected="none", error=ServeError)
        chosen = self._children if together else self._children[:1]
        for child in chosen:
            child.send({"kind": "profile", "shapes": shapes, "seconds": seconds})
        results = []
        for child in chosen:
            taken = child.answer("profiled")["seconds"]
            results.append(
                tuple(StepSample(chunks=c, seconds=s) for c, s in zip(shapes, taken, strict=True))
            )
        return results

    def record(self, *, on: bool) -> list[tuple[StepSample, ...]]:
        """The steps of each instance since the start of the recording, which is restarted or ended.

        Their seconds are those of the whole turn of its loop. No request may be open.
        """
        require(not self._open, "open requests", len(self._open), expected="none", error=ServeError)
        results = []
        for child in self._children:
            child.send({"kind": "record", "on": on})
            steps = child.answer("recorded")["steps"]
            results.append(
                tuple(StepSample(chunks=c, seconds=s, pause_s=p) for c, s, p in steps if c)
            )
        return results

    def _readable(self, timeout_s: float | None) -> list[socket.socket]:
        return select.select(self.sockets, [], [], timeout_s)[0]

    def add(self, request: Request) -> None:
        """Send a request to the instance that computes its prompt.

        Raises:
            ServeError: its parameters or tokens are wrong, or it can never run.
        """
        from shoal.serve.engine.params import check_params, check_tokens

        check_params(request.params)
        check_tokens(request, self._children[0].ready["vocab_size"])
        require(
            request.id not in self._open and request.id not in self._dropping,
            "request.id",
            request.id,
            expected="an id that no running request has",
            error=ServeError,
        )
        for books in self._refusing:
            books.add(request)
            books.abort(request.id)
        request.state, request.arrival = "waiting", self.clock()
        place = self._dispatch.prompt(request.id, request.n_prompt)
        self._open[request.id] = _Open(request, place)
        self._counts["prompt"] += request.n_prompt
        self._send(self._fronts[place], {**packed(request), "kind": "add"})

    def _send(self, child: Child, message: Mapping[str, Any]) -> None:
        if child.open == 0:
            child.heard = time.monotonic()
        child.open += 1
        child.send(message)

    def abort(self, request_id: str) -> Output | None:
        """Forget a request; None if there is none of that id (any more)."""
        result = self._end(request_id)
        if result is None:
            return None
        message = {"kind": "abort", "id": request_id}
        if result.back is None:
            self._fronts[result.front].send(message)
        else:
            self._backs[result.back].send(message)
            if result.held:
                self._dropping[request_id] = result.front
        return Output(request_id, (), finish="abort")

    def step(self, timeout_s: float = 0.0) -> list[Output]:
        """What the instances have said; waits for the first of them if there is time.

        Raises:
            ServeError: an instance died, failed, hangs or moved other bytes than it must.
        """
        outputs: list[Output] = []
        readable = self._readable(timeout_s)
        for child in self._children:
            if child.socket in readable:
                for message in child.receive():
                    outputs += self._heard(child, message)
            elif child.open and time.monotonic() - child.heard > self._hang_s:
                raise ServeError(
                    f"the {child.name} (process {child.process.pid}) hangs: it has open "
                    f"requests and has not responded for {self._hang_s:g} s"
                )
        return outputs

    def _heard(self, child: Child, message: Mapping[str, Any]) -> list[Output]:
        if message["kind"] == "fetched":
            self._fetched(message)
            return []
        if message["kind"] == "dropped" and message["id"] in self._dropping:
            front = self._fronts[self._dropping.pop(message["id"])]
            front.send({"kind": "abort", "id": message["id"]})
        if message["kind"] != "outputs":
            return []
        child.stats = message["stats"]
        for result in message["told"]:
            if result["id"] in self._open:
                self._told.append(result)
                if result["kind"] in ("refused", "error"):
                    self._end(result["id"])
        held = message.get("held", {})
        outputs = []
        for raw in message["outputs"]:
            output = unpack_output(raw)
            value = self._open.get(output.request_id)
            if value is None:
                continue  # aborted while this was under way
            value.request.tokens += output.tokens
            self._counts["new"] += len(output.tokens)
            self._dispatch.prompted(output.request_id)
            if output.finish is not None:
                self._end(output.request_id)
                value.request.state = "finished"
            elif output.request_id in held:
                self._migrate(value, held[output.request_id])
            outputs.append(output)
        return outputs

    def _migrate(self, found: _Open, blocks: Sequence[int]) -> None:
        request = found.request
        found.back = self._dispatch.decode(request.id, len(request.tokens))
        found.held = True
        self._send(
            self._backs[found.back],
            {
                **packed(request),
                "kind": "migrate",
                "source": found.front,
                "blocks": blocks,
            },
        )

    def _fetched(self, message: Mapping[str, Any]) -> None:
        value = self._open.get(message["id"])
        if value is None:
            return  # aborted meanwhile: dropped, as the decode instance will say
        request = value.request
        due = self.token_bytes * request.n_prompt
        if message["bytes"] != due:
            raise ServeError(
                f"request {request.id}: {message['bytes']} bytes of keys and values were moved, "
                f"and {request.n_prompt} tokens have {due}"
            )
        self._counts["moved_bytes"] += due
        if self._recording:
            self.moved.append(
                MigratedRequest(request.id, request.n_prompt, due, message["seconds"])
            )
        value.held = False
        front = self._fronts[value.front]
        front.open -= 1
        front.send({"kind": "release", "id": request.id})

    def _end(self, request_id: str) -> _Open | None:
        value = self._open.pop(request_id, None)
        if value is None:
            return None
        self._dispatch.ended(request_id)
        if value.back is not None:
            self._backs[value.back].open -= 1
        if value.back is None or value.held:
            self._fronts[value.front].open -= 1
        return value

    def drain_events(self) -> list[dict[str, Any]]:
        """What instances gave besides tokens; see :class:`~shoal.serve.engine.loop.Engine`."""
        drain_events, self._told = self._told, []
        return drain_events

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        waiting = sum(found.request.n_generated == 0 for found in self._open.values())
        names = {name for child in self._children for name in child.stats}
        return {
            **{name: sum(child.stats.get(name, 0.0) for child in self._children) for name in names},
            "requests_running": len(self._open) - waiting,
            "requests_waiting": waiting,
            "tokens_prompt_total": self._counts["prompt"],
            "tokens_generated_total": self._counts["new"],
            "blocks_total": sum(child.ready["num_blocks"] for child in self._children),
            "moved_bytes_total": self._counts["moved_bytes"],
        }

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> DisaggEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def packed(request: Request) -> dict[str, Any]:
    """The form in which a request is sent to an instance, without another instance's cache."""
    return {**pack_request(request), "fork_of": None}


def build_engine(job: ServeJob) -> tuple[DisaggEngine, ModelConfig]:
    """The engine of a job with ``disagg``, for the process that serves it.

    Raises:
        ShoalError: an instance does not start.
    """
    from shoal.model import huggingface

    config = huggingface.read_config(Path(job.model))
    return DisaggEngine(job, recording=False), config


def replay(engine: DisaggEngine, arrivals: Sequence[Arrival]) -> list[ServedRequest]:
    """Serve ``arrivals`` in real time; a token is there when it has come back to this process.

    Args:
        engine: one without requests.
        arrivals: what comes, in the order of time.

    Raises:
        ServeError: a request that can never run, or an instance that died.
    """
    requests = [request_of(str(number), arrival) for number, arrival in enumerate(arrivals)]
    seen = [
        ServedRequest(one.id, at.at, one.n_prompt)
        for one, at in zip(requests, arrivals, strict=True)
    ]
    place, began = 0, engine.clock()
    while place < len(arrivals) or engine.num_open:
        now = engine.clock() - began
        while place < len(arrivals) and arrivals[place].at <= now:
            engine.add(requests[place])
            place += 1
        wait = 1.0 if place == len(arrivals) else max(0.0, arrivals[place].at - now)
        outputs = engine.step(min(wait, 1.0))
        now = engine.clock() - began
        for output in outputs:
            served = seen[int(output.request_id)]
            if served.n_output == 0:
                served.first = now
            served.n_output += len(output.tokens)
            if output.finish is not None:
                served.finish = now
    return seen
