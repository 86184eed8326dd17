"""Several serving instances on one virtual clock, colocated or with a phase each.

Each instance has a scheduler of its own, the very object that an engine drives, and a cost of
its steps. A dispatcher sends prompts to instances. Where the phases are apart, a decode instance
fetches the keys and values of a prompt when its scheduler accepts the request, over a link that
moves one request after the other; the prefill instance holds them until they are there. What a
request waits for that counts as time between its first and its last token.

Instances on one host may slow each other: with ``crowding`` c, each of k that are in a step goes
on at 1 / (1 + c (k - 1)) of its speed. 0 are devices of their own; 1 is one core for all.

Source: Zhong et al., DistServe, 2024, sections 4 and 5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shoal.core.errors import require
from shoal.cost.serving.simulator import ServedRequest, SimulatedRunner, quantities, request_of
from shoal.cost.step_cost.cooling import Cooling, Warmth
from shoal.ir import Arrival, Request, Scheduler, Step, StepCost, StepResult
from shoal.ir.phases import DecodePhaseScheduler, Dispatcher, PrefillPhaseScheduler


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """A scheduler without requests, and what its steps take.

    Args:
        scheduler: decides what runs.
        stages: devices that share the layers one after the other; a step begins while others are
            in later stages, if the scheduler plans it. Schedulers that wait for the tokens of a
            step have 1.
        cooling: how much longer steps take after a pause, if they do.
    """

    scheduler: Scheduler
    cost: StepCost
    stages: int = 1
    cooling: Cooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferLink:
    """How keys and values come to a decode instance.

    Args:
        bandwidth: byte/s of the link of one instance.
        token_bytes: bytes of the keys and values of a token, ``2 L n_kv d dtype``.
        latency_s: s before the first byte.
        layers: layers of the model.
        overlap: a layer is sent as soon as it was computed, where the decode instance has room
            already; else everything is sent after the prompt.
    """

    bandwidth: float
    token_bytes: float
    latency_s: float = 0.0
    layers: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("bandwidth", "token_bytes"):
            value = getattr(self, name)
            require(
                value > 0 and not math.isnan(value), f"wire.{name}", value, expected="more than 0"
            )
        require(self.latency_s >= 0, "wire.latency_s", self.latency_s, expected="0 or more")
        require(self.layers >= 1, "wire.layers", self.layers, expected="1 or more")


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """One request on its way to a decode instance.

    Args:
        request_id: whose.
        tokens: of the prompt.
        nbytes: of their keys and values.
        ready: s at which the first token was there.
        begun: s at which the first byte was sent.
        done: s at which the last one arrived.
    """

    request_id: str
    tokens: int
    nbytes: float
    ready: float
    begun: float
    done: float


@dataclass
class FleetSimulation:
    """What a simulation saw.

    Args:
        served: every request, in the order of arrival.
        moves: every transfer of keys and values, in the order in which they ended.
        busy_s: s in which each instance was in a step, prefill instances first.
    """

    served: list[ServedRequest] = field(default_factory=list)
    moves: list[SimulatedTransfer] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)

    def quantities(self) -> dict[str, float]:
        """See :func:`~shoal.cost.serving.simulator.quantities`."""
        return quantities(self.served)


# Times at which something happens, by which a simulation is advanced.
_MOMENTS = 128


def attainment(served: Sequence[ServedRequest], *, ttft: float, tpot: float) -> float:
    """Share of requests that meet both targets; one that did not finish meets none.

    Args:
        served: requests, simulated or measured.
        ttft: most s to the first token.
        tpot: most s a token after it, on average over the request, its migration included.
    """
    require(bool(served), "served", 0, expected="at least one request")
    good = sum(
        one.ttft <= ttft and not math.isnan(one.finish) and not one.tpot > tpot for one in served
    )
    return good / len(served)


def simulate_fleet(
    prefill: Sequence[SimulatedInstance],
    decode: Sequence[SimulatedInstance],
    dispatcher: Dispatcher,
    arrivals: Sequence[Arrival],
    *,
    wire: KVTransferLink | None = None,
    crowding: float = 0.0,
) -> FleetSimulation:
    """Serve ``arrivals`` in virtual time, all of them; see :class:`SimulatedFleet`."""
    return SimulatedFleet(
        prefill, decode, dispatcher, arrivals, wire=wire, crowding=crowding
    ).finish()


class _Running:
    """An instance at work."""

    def __init__(self, instance: SimulatedInstance, phase: str) -> None:
        self.scheduler = instance.scheduler
        self.phase = phase
        self.accept: Callable[[], list[Request]] | None = None
        if phase == "decode":
            self.accept = cast(DecodePhaseScheduler, instance.scheduler).accept
        self.requests: dict[str, Request] = {}
        self.runner = SimulatedRunner(instance.cost)
        self.runner.let_count(instance.scheduler)
        # When each stage has done what was begun; the next step begins when the first is free.
        self.stages = [0.0] * instance.stages
        self.warmth = Warmth(instance.cooling) if instance.cooling else None
        self.link_free = 0.0
        self.busy_s = 0.0
        # Of the step that it is in, where instances slow each other: s of it alone that are
        # left, and how often its end was predicted.
        self.left = 0.0
        self.predicted = 0


# What happens to whom at a time: those that may go on then.
_Event = Callable[[float, Any], list[_Running]]


class SimulatedFleet:
    """Instances that serve ``arrivals`` in virtual time, as far as they are advanced.

    Args:
        prefill: where prompts go: schedulers of the prefill phase, or of both phases if
            ``decode`` is empty.
        decode: schedulers of the decode phase.
        dispatcher: a dispatcher for this number of instances, without requests.
        arrivals: what comes, in the order of time.
        wire: how keys and values come to decode instances.
        crowding: slowdown of a step per other instance that runs a step, as a share of its time
            alone.

    Attributes:
        now: s up to which everything is known.
        seen: what happened until then.

    Raises:
        ServeError: a request that can never run.
        ConfigError: arrivals that are not in the order of time, or no wire.
    """

    def __init__(
        self,
        prefill: Sequence[SimulatedInstance],
        decode: Sequence[SimulatedInstance],
        dispatcher: Dispatcher,
        arrivals: Sequence[Arrival],
        *,
        wire: KVTransferLink | None = None,
        crowding: float = 0.0,
    ) -> None:
        require(
            crowding >= 0
            and (crowding == 0 or all(one.stages == 1 for one in (*prefill, *decode))),
            "crowding",
            crowding,
            expected="0 or more, and 0 for instances of several stages",
        )
        require(bool(prefill), "instances", 0, expected="at least one that computes prompts")
        require(
            bool(decode) == (wire is not None),
            "wire",
            wire,
            expected="one where there are decode instances, and none elsewhere",
        )
        for index in range(1, len(arrivals)):
            require(
                arrivals[index].at >= arrivals[index - 1].at,
                f"arrivals[{index}].at",
                arrivals[index].at,
                expected=f"at least {arrivals[index - 1].at}, the time of the one before",
                hint="sort the trace by time",
            )
        phase = "prefill" if decode else "both"
        self.fronts = [_Running(one, phase) for one in prefill]
        self.backs = [_Running(one, "decode") for one in decode]
        self.dispatcher = dispatcher
        self.wire = wire
        self.crowding = crowding
        # Those in a step, where instances slow each other, with the step; and since when at
        # the same speed.
        self._crowd: dict[int, tuple[_Running, Step, StepResult]] = {}
        self._steady_since = 0.0
        self.now, self.seen = 0.0, FleetSimulation()
        # A heap, as what is sorted is one.
        self._events: list[tuple[float, int, _Event, Any]] = [
            (arrival.at, index, self._came, (str(index), arrival))
            for index, arrival in enumerate(arrivals)
        ]
        self._number = len(arrivals)
        self._served: dict[str, ServedRequest] = {}
        self._begun: set[str] = set()  # those with a first token and without a last one
        # Request -> (where its prompt is computed, when that began, when it ended or will end).
        self._prompt: dict[str, tuple[_Running, float, float]] = {}

    def advance(self) -> bool:
        """Go on for some time; whether there is more to come."""
        events = self._events
        for _ in range(_MOMENTS):
            if not events:
                break
            self.now = now = events[0][0]
            touched: dict[int, _Running] = {}
            while events and events[0][0] <= now:
                _, _, happens, what = heapq.heappop(events)
                for running in happens(now, what):
                    touched[id(running)] = running
            for running in touched.values():
                self._go_on(running, now)
        assert events or not self._served, f"requests {list(self._served)[:3]} never ended"
        self.seen.busy_s = [one.busy_s for one in (*self.fronts, *self.backs)]
        return bool(events)

    def finish(self) -> FleetSimulation:
        """Go on to the end."""
        while self.advance():
            pass
        return self.seen

    def _push(self, at: float, happens: _Event, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, happens, what))

    def _came(self, now: float, what: tuple[str, Arrival]) -> list[_Running]:
        name, arrival = what
        front = self.fronts[self.dispatcher.prompt(name, len(arrival.prompt))]
        request = request_of(name, arrival)
        front.scheduler.add(request)
        front.requests[name] = request
        served = ServedRequest(name, arrival.at, request.n_prompt)
        self.seen.served.append(served)
        self._served[name] = served
        return [front]

    def _ended(self, now: float, what: tuple[_Running, Step, StepResult]) -> list[_Running]:
        running, step, result = what
        touched = [running]
        served_of, requests = self._served, running.requests
        for name, _, _, finish, _ in running.scheduler.commit(step, result, now):
            # All that comes between the first token and the last one is counted at the end.
            if finish is None and name in self._begun:
                continue
            served, request = served_of[name], requests[name]
            if not served.n_output:
                self._begun.add(name)
                served.n_output = 1
                served.first, served.n_cached = now, request.n_cached
                self.dispatcher.prompted(name)
                if running.phase == "prefill":
                    _, began, _ = self._prompt.get(name, (running, now, now))
                    self._prompt[name] = running, began, now
                if running.phase == "prefill" and finish is None and not self._overlaps:
                    touched.append(self._announce(request))
            if finish is not None:
                self._begun.remove(name)
                served.n_output = request.n_generated
                served.finish, served.preemptions = now, request.preemptions
                self.dispatcher.ended(name)
                del served_of[name], requests[name]
                self._prompt.pop(name, None)
        return touched

    def _predicted(self, now: float, what: tuple[_Running, int]) -> list[_Running]:
        """A step ends, unless its end was predicted anew meanwhile."""
        running, number = what
        if running.predicted != number:
            return []
        _, step, result = self._crowd[id(running)]
        self._predict(now, leaves=running)
        running.stages[0] = now
        return self._ended(now, (running, step, result))

    def _predict(
        self,
        now: float,
        *,
        joins: tuple[_Running, Step, StepResult] | None = None,
        leaves: _Running | None = None,
    ) -> None:
        """A request joins or leaves those in a step: all others are done at another time."""
        passed = now - self._steady_since
        slowness = 1.0 + self.crowding * max(0, len(self._crowd) - 1)
        for running, _, _ in self._crowd.values():
            running.left -= passed / slowness
            running.busy_s += passed
        self._steady_since = now
        if leaves is not None:
            del self._crowd[id(leaves)]
        if joins is not None:
            joins[0].left = joins[2].seconds
            self._crowd[id(joins[0])] = joins
        slowness = 1.0 + self.crowding * max(0, len(self._crowd) - 1)
        for running, _, _ in self._crowd.values():
            running.predicted += 1
            at = now + max(0.0, running.left) * slowness
            self._push(at, self._predicted, (running, running.predicted))

    def _free(self, now: float, what: _Running) -> list[_Running]:
        return [what]

    def _fetched(self, now: float, what: tuple[_Running, SimulatedTransfer]) -> list[_Running]:
        back, move = what
        front, _, _ = self._prompt[move.request_id]
        del front.requests[move.request_id]
        cast(PrefillPhaseScheduler, front.scheduler).release(move.request_id)
        cast(DecodePhaseScheduler, back.scheduler).arrived(move.request_id)
        self.seen.moves.append(move)
        return [front, back]

    @property
    def _overlaps(self) -> bool:
        return self.wire is not None and self.wire.overlap

    def _announce(self, request: Request) -> _Running:
        """Announce to a decode instance a request whose first token is there, or will soon be."""
        tokens = request.tokens[: request.n_prompt]
        tokens.append(0)
        place = self.dispatcher.decode(request.id, len(tokens))
        back = self.backs[place]
        there = Request(
            request.id,
            tokens,
            request.n_prompt,
            request.params,
            arrival=request.arrival,
            prompt=request.prompt,
        )
        back.scheduler.add(there)
        back.requests[request.id] = there
        return back

    def _go_on(self, running: _Running, now: float) -> None:
        if running.accept is not None:
            for request in running.accept():
                self._fetch(running, request, now)
        if running.stages[0] > now:
            return
        step = running.scheduler.plan(now)
        if not step:
            return
        result = running.runner.execute(step)
        if running.warmth is not None:
            longer = running.warmth.step(max(0.0, now - running.stages[-1]))
            result = replace(result, seconds=result.seconds + longer)
        if self.crowding:
            running.stages[0] = math.inf  # until it is over
            self._predict(now, joins=(running, step, result))
            return
        share = result.seconds / len(running.stages)
        end = now
        for stage, free in enumerate(running.stages):
            end = max(end, free) + share
            running.stages[stage] = end
        running.busy_s += share
        self._push(end, self._ended, (running, step, result))
        if len(running.stages) > 1:
            self._push(running.stages[0], self._free, running)
        if running.phase == "prefill":
            for chunk in step.chunks:
                request = chunk.request
                self._prompt[request.id] = running, now, end
                if self._overlaps and chunk.yields and request.params.max_tokens > 1:
                    back = self._announce(request)
                    for one in cast(DecodePhaseScheduler, back.scheduler).accept():
                        self._fetch(back, one, now)

    def _fetch(self, back: _Running, request: Request, now: float) -> None:
        """Move the keys and values of a prompt; its layers follow each other."""
        assert self.wire is not None
        wire = self.wire
        _, began, ready = self._prompt[request.id]
        nbytes = request.n_prompt * wire.token_bytes
        seconds = wire.latency_s + nbytes / wire.bandwidth
        # The first layer is there after its share of the prompt's time, the last one at its end.
        first = began + (ready - began) / wire.layers if wire.overlap else ready
        begun = max(now, back.link_free, first)
        done = max(begun + seconds, ready + seconds / wire.layers)
        back.link_free = done
        move = SimulatedTransfer(request.id, request.n_prompt, nbytes, ready, begun, done)
        self._push(done, self._fetched, (back, move))
