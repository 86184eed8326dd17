"""Several engines that lend each other memory, as one: contexts longer than one of them holds.

Every instance is a process with an engine and a cache of its own. This one computes nothing: it
gives each request to an instance, keeps the registry of loans between instances, and advises
loans and recalls. Blocks and queries go from instance to instance. An instance that dies is struck
out: the others compute again what they had there, and its own requests go on elsewhere from the
tokens that they already have.

Source: Lin et al., Infinite-LLM, 2024, section 4.2 (gManager).
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ServeError, require
from shoal.core.parts import table
from shoal.core.scratch import scratch
from shoal.core.traits import traits
from shoal.ir import Output, Request, ServeJob, StepCost
from shoal.plan.batching.cache.distributed import Distributed
from shoal.plan.batching.cache.loans import InstanceStatus, LoanRegistry
from shoal.plan.batching.common import most_cached
from shoal.serve.cluster.disagg import packed
from shoal.serve.engine.child import Child, readable
from shoal.serve.engine.crashes import MOST_DEATHS
from shoal.serve.engine.process import EngineLike
from shoal.serve.engine.wire import unpack_output

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig


class EvenCost:
    """Step time without measurements: weights once, then tokens and contexts."""

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See :class:`~shoal.ir.engine.StepCost`; only ratios matter."""
        return 1.0 + sum(0.02 * length + 2e-5 * start for start, length in chunks)


class DistKVEngine(EngineLike):
    """Requests in, tokens out, by several processes; see the module.

    Args:
        cost: seconds of a step of an instance, for the placement of loans.
        pin: pin each instance to as many cores as it has threads.
        lend: False for instances that do not lend: each on its own.

    Raises:
        ServeError: an instance cannot be started or cannot load the model.
    """

    def __init__(
        self,
        job: ServeJob,
        *,
        cost: StepCost | None = None,
        pin: bool = False,
        lend: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        part = table("kv").build(job.kv, where="kv")
        assert isinstance(part, Distributed)
        require(
            job.parallel.world == job.parallel.depth == 1 and job.disagg is None,
            "kv.distributed",
            f"tp={job.parallel.tp}, pp={job.parallel.pp}",
            expected="tp = pp = 1 and no disagg: an instance is one process",
            error=ServeError,
        )
        require(
            not job.host_tokens and "swaps_cache" not in traits("preempt", job.preempt),
            "preempt",
            job.preempt.name,
            expected="recompute, and no host_tokens: kv.distributed.host_tokens is a lender",
            error=ServeError,
        )
        require(
            not job.exact,
            "exact",
            job.exact,
            expected="false: what is summed in parts has other last bits than what is not",
            error=ServeError,
        )
        self.part, self.clock, self._lending = part, clock, lend
        self._open: dict[str, tuple[Request, int]] = {}
        self._counts = {"prompt": 0, "new": 0}
        # Instances that are gone, and how that was noticed.
        self.losses: list[str] = []
        self._told: list[dict[str, Any]] = []
        # Request -> instances that died with it; requests that their instance has taken in.
        self._met: dict[str, int] = {}
        self._taken: set[str] = set()
        self._children: dict[int, Child] = {}
        self._directory = scratch("distkv", sockets=True)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        threads = job.threads or max(1, len(cores) // part.instances)
        job = job.model_copy(update={"threads": threads})
        try:
            for number in range(part.instances):
                own = cores[number * threads : (number + 1) * threads] if pin else []
                self._start(job, number, own)
            self._wait("ready")
            if part.host_tokens:
                dtypes = {"float32": "fp32", "bfloat16": "bf16"}
                self._start(job, part.instances, [], dtypes[self._children[0].ready["dtype"]])
                self._wait("ready")
            paths = [[number, one.ready["path"]] for number, one in self._children.items()]
            for number, child in self._children.items():
                if number < part.instances:
                    others = [pair for pair in paths if pair[0] != number]
                    child.send({"kind": "peers", "paths": others if lend else []})
            self._wait("mapped", below=part.instances)
        except BaseException:
            self.close()
            raise
        self.block_size: int = self._children[0].ready["block_size"]
        self.registry = LoanRegistry(
            part.lenders,
            self.block_size,
            cost or EvenCost(),
            timeout_s=part.timeout_s,
            max_lenders=part.max_lenders,
        )
        self._tell_room()

    def _start(self, job: ServeJob, number: int, cpus: list[int], dtype: str = "") -> None:
        name = f"instance {number}" if number < self.part.instances else "host lender"
        self._children[number] = Child(
            name,
            {
                "kind": "start",
                "job": job.model_dump(mode="json", exclude_none=True),
                "instance": number,
                "directory": str(self._directory),
                "cpus": cpus,
                "dtype": dtype,
            },
            module="shoal.serve.cluster.distkv_instance",
        )

    def _wait(self, kind: str, *, below: int = 1 << 30) -> None:
        """Until all have said so; one that ends before that ends all."""
        while waiting := [
            one for n, one in self._children.items() if n < below and not one.ready.get(kind)
        ]:
            for child in readable(waiting):
                for message in child.receive():
                    if message["kind"] == "ready":
                        child.ready = dict(message)
                    child.ready[message["kind"]] = True

    def _tell_room(self) -> None:
        for number, child in self._children.items():
            child.send({"kind": "room", "blocks": self._capacity(number)})

    def _capacity(self, instance: int) -> int:
        """Blocks that others would lend an instance if none had requests."""
        if not self._lending:
            return 0
        others = [c.ready["capacity"] for n, c in self._children.items() if n != instance]
        return sum(sorted(others, reverse=True)[: self.part.max_lenders])

    def capacity(self, instance: int) -> tuple[int, int]:
        """Blocks of an instance, and blocks that others would lend it if none had requests."""
        return self._children[instance].ready["num_blocks"], self._capacity(instance)

    @property
    def sockets(self) -> list[socket.socket]:
        """What to wait for: an instance has something to say."""
        return [child.socket for child in self._children.values()]

    @property
    def pids(self) -> dict[str, int]:
        """Name of an instance -> its process."""
        return {child.name: child.process.pid for child in self._children.values()}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether an instance has sent something that was not read yet."""
        return bool(select.select(self.sockets, [], [], 0.0)[0])

    def add(self, request: Request) -> None:
        """Send a request to the instance with the fewest tokens of open requests.

        Raises:
            ServeError: its parameters or tokens are wrong, or all memory together is too small.
        """
        from shoal.serve.engine.params import check_params, check_tokens

        check_params(request.params)
        first = self._children[min(self._children)].ready
        for name, wanted in (
            ("a grammar", request.params.grammar),
            ("a vector", request.params.pooling),
            ("log probabilities of the prompt", request.params.prompt_logprobs),
        ):
            if wanted is not None:
                raise ServeError(
                    f"request {request.id}: {name}: instances that may compute a request again "
                    "elsewhere do not give that; serve with another kv"
                )
        check_tokens(request, first["vocab_size"])
        longest = first["max_position"]
        require(
            len(request.tokens) < longest,
            f"request {request.id}: prompt tokens",
            len(request.tokens),
            expected=f"at most {longest - 1}, one less than max_position",
            error=ServeError,
        )
        require(
            request.id not in self._open,
            "request.id",
            request.id,
            expected="an id that no running request has",
            error=ServeError,
        )
        place = self._place()
        self.registry.require_room(request.id, most_cached(request, longest), *self.capacity(place))
        request.state, request.arrival = "waiting", self.clock()
        self._counts["prompt"] += request.n_prompt
        self._send(request, place)

    def _place(self) -> int:
        """The instance with the fewest tokens to do."""
        loads = {number: 0 for number in self._children if number < self.part.instances}
        if not loads:
            raise ServeError("all instances have ended; restart the server")
        for request, place in self._open.values():
            loads[place] += len(request.tokens)
        return min(loads, key=lambda one: (loads[one], one))

    def _send(self, request: Request, place: int) -> None:
        self._open[request.id] = request, place
        self._taken = {name for name in self._taken if name in self._open and name != request.id}
        self._children[place].send({**packed(request), "kind": "add"})

    def abort(self, request_id: str) -> Output | None:
        """Forget a request; None if there is none of that id (any more)."""
        value = self._open.pop(request_id, None)
        if value is None:
            return None
        self._children[value[1]].send({"kind": "abort", "id": request_id})
        return Output(request_id, (), finish="abort")

    def step(self, timeout_s: float = 0.0) -> list[Output]:
        """What the instances have said; waits for the first of them if there is time."""
        outputs: list[Output] = []
        readable = select.select(self.sockets, [], [], timeout_s)[0]
        for number, child in list(self._children.items()):
            if child.socket not in readable:
                continue
            try:
                for message in child.receive():
                    outputs += self._heard(number, child, message)
            except ServeError as cause:
                self._lose(number, str(cause))
        for number in self.registry.silent(self.clock()):
            self._lose(number, "it did not respond for too long")
        return outputs

    def _heard(self, number: int, child: Child, message: Mapping[str, Any]) -> list[Output]:
        if message["kind"] == "beat":
            raw = dict(message["beat"])
            raw["borrowed"] = dict(raw["borrowed"])
            raw["contexts"] = tuple(raw["contexts"])
            self.registry.beat(InstanceStatus(**raw), self.clock())
            self._advise()
            return []
        if message["kind"] == "taken" and message["id"] in self._open:
            self._taken.add(message["id"])
        if message["kind"] != "outputs":
            return []
        child.stats = message["stats"]
        self._told += message["told"]
        for one in message["told"]:
            if one["kind"] in ("refused", "error"):
                self._open.pop(one["id"], None)
        outputs = []
        for packed_output in message["outputs"]:
            output = unpack_output(packed_output)
            value = self._open.get(output.request_id)
            if value is None or value[1] != number:
                continue  # aborted while this was under way
            value[0].tokens += output.tokens
            self._counts["new"] += len(output.tokens)
            if output.finish is not None:
                del self._open[output.request_id]
                value[0].state = "finished"
            outputs.append(output)
        return outputs

    def _advise(self) -> None:
        """Send instances what the registry proposes; they may do otherwise."""
        if not self._lending:
            return
        for debt in self.registry.recalls():
            words = {"kind": "recall", "creditor": debt.creditor, "blocks": debt.blocks}
            self._tell(debt.debtor, words)
        loans: dict[int, list[list[int]]] = {}
        for debt in self.registry.loans():
            loans.setdefault(debt.debtor, []).append([debt.creditor, debt.blocks])
        for debtor, some in loans.items():
            self.registry.proposed(debtor)
            self._tell(debtor, {"kind": "loans", "loans": some})

    def _tell(self, number: int, message: Mapping[str, Any]) -> None:
        child = self._children.get(number)
        if child is None:
            return
        try:
            child.send(message)
        except ServeError as cause:
            self._lose(number, str(cause))

    def _lose(self, number: int, reason: str) -> None:
        """Strike an instance out; what it did goes on elsewhere.

        Raises:
            ServeError: it was the last one.
        """
        child = self._children.pop(number, None)
        if child is None:
            return
        child.close()
        homeless = [request for request, place in self._open.values() if place == number]
        for request in homeless:
            del self._open[request.id]
            if request.id in self._taken:
                self._met[request.id] = self._met.get(request.id, 0) + 1
        known = {*self._open, *(request.id for request in homeless)}
        self._met = {name: met for name, met in self._met.items() if name in known}
        self.registry.lose(number)
        self.losses.append(f"{child.name}: {reason}")
        if not any(one < self.part.instances for one in self._children):
            raise ServeError(f"the last instance has ended ({reason}); restart the server")
        for other in list(self._children):
            self._tell(other, {"kind": "lost", "instance": number})
            self._tell(other, {"kind": "room", "blocks": self._capacity(other)})
        for request in homeless:
            if self._met.get(request.id, 0) >= MOST_DEATHS:
                words = (
                    f"{MOST_DEATHS} instances died while they answered this request, so it is not "
                    "tried again; change it, or report it with the server's log"
                )
                self._told.append({"kind": "error", "id": request.id, "message": words})
                continue
            place = self._place()
            try:
                longest = self._children[place].ready["max_position"]
                most = most_cached(request, longest)
                self.registry.require_room(request.id, most, *self.capacity(place))
            except ServeError as cause:
                refused = {"kind": "refused", "id": request.id, "message": str(cause)}
                self._told.append(refused)
                continue
            try:
                self._send(request, place)
            except ServeError as cause:  # it is gone, too, and what it has got goes on elsewhere
                self._lose(place, str(cause))

    def drain_events(self) -> list[dict[str, Any]]:
        """Requests that cannot go on, once: ``refused`` and ``error`` (id, message)."""
        drain_events, self._told = self._told, []
        return drain_events

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        children = self._children.values()
        names = {name for child in children for name in child.stats}
        waiting = sum(request.n_generated == 0 for request, _ in self._open.values())
        ledger = {
            f"debt_blocks_{debt.debtor}_{debt.creditor}": debt.blocks
            for debt in self.registry.debts
        }
        return {
            **{name: sum(child.stats.get(name, 0.0) for child in children) for name in names},
            "requests_running": len(self._open) - waiting,
            "requests_waiting": waiting,
            "tokens_prompt_total": self._counts["prompt"],
            "tokens_generated_total": self._counts["new"],
            "instances": len(self._children),
            "instances_lost_total": len(self.losses),
            "blocks_total": sum(child.ready["num_blocks"] for child in children),
            **ledger,
        }

    def close(self) -> None:
        """End all processes."""
        for child in self._children.values():
            child.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> DistKVEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_engine(job: ServeJob) -> tuple[DistKVEngine, ModelConfig]:
    """The engine of a job with a distributed cache, for the process that serves it.

    Raises:
        ShoalError: an instance does not start.
    """
    from shoal.model import huggingface

    return DistKVEngine(job), huggingface.read_config(Path(job.model))
