"""Commands from the controller to its ranks: which tokens to compute, and never what they gave.

A command has a ticket, which is its place in the order in which every rank computes. Of a request
it brings what the ranks do not know yet: at first all of its tokens and how to sample, later the
new tokens and blocks. No hidden state is in it.

Source: Du et al., EnergonAI, 2022, section 4.1 (hierarchy-controller architecture).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import RankError, ShoalError
from shoal.ir import Chunk, Copy, Request, Step, StepResult, Transfer
from shoal.serve.engine.wire import pack_infos, pack_params, unpack_infos, unpack_params


class _Known:
    """What the ranks know of a request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = len(request.tokens)
        self.blocks: list[int] = []


class CommandWriter:
    """Turns steps into commands."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._next = 0

    def command(self, step: Step) -> dict[str, Any]:
        """The command of the next step, with its ticket."""
        ticket, self._next = self._next, self._next + 1
        over = [name for name, one in self._known.items() if one.request.state == "finished"]
        for name in over:
            del self._known[name]
        fresh: list[dict[str, Any]] = []
        return {
            "kind": "step",
            "ticket": ticket,
            "over": over,
            # The chunks come first: they show which requests are new.
            "chunks": [self._chunk(chunk, fresh) for chunk in step.chunks],
            "moves": [list(move) for move in step.moves],
            "scrub": list(step.scrub),
            "transfers": [
                [one.id, one.kind, one.request_id, [list(copy) for copy in one.copies], one.after]
                for one in step.transfers
            ],
            "requests": fresh,
        }

    def _chunk(self, chunk: Chunk, fresh: list[dict[str, Any]]) -> list[Any]:
        request = chunk.request
        known = self._known.get(request.id)
        if known is None or known.request is not request:
            known = self._known[request.id] = _Known(request)
            fresh.append(
                {
                    "id": request.id,
                    "n_prompt": request.n_prompt,
                    "tokens": list(request.tokens),
                    "params": pack_params(request.params),
                }
            )
        tokens = request.tokens[known.tokens :]
        # Blocks are added at the end; a preempted request has others.
        held = len(known.blocks)
        start = held if request.blocks[:held] == known.blocks else 0
        blocks = request.blocks[start:]
        known.tokens, known.blocks = len(request.tokens), list(request.blocks)
        return [request.id, chunk.start, chunk.length, tokens, start, blocks]


class CommandReader:
    """Turns commands into steps again, on a rank."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def step(self, command: Mapping[str, Any]) -> Step:
        """The step of a command; commands come in the order of their tickets."""
        for name in command["over"]:
            self._requests.pop(name, None)
        for one in command["requests"]:
            self._requests[one["id"]] = Request(
                one["id"], list(one["tokens"]), one["n_prompt"], unpack_params(one["params"])
            )
        chunks = []
        for name, start, length, tokens, first, blocks in command["chunks"]:
            request = self._requests[name]
            request.tokens += tokens
            request.blocks[first:] = blocks
            chunks.append(Chunk(request, start, length))
        transfers = tuple(
            Transfer(number, kind, name, tuple(Copy(*copy) for copy in copies), tuple(after))
            for number, kind, name, copies, after in command["transfers"]
        )
        moves = tuple(Copy(*move) for move in command["moves"])
        scrub = tuple(command["scrub"])
        return Step(tuple(chunks), transfers=transfers, moves=moves, scrub=scrub)


class CommandQueue:
    """A queue that returns received commands in the order of their tickets.

    Args:
        capacity: most commands that wait here.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._error: ShoalError | None = None
        self._changed = threading.Condition()

    def put(self, command: dict[str, Any]) -> None:
        """A command has come.

        Raises:
            RankError: it came before, or there is no room for it.
        """
        ticket = command["ticket"]
        with self._changed:
            if ticket < self._next or ticket in self._waiting:
                raise RankError(f"command {ticket} came twice; the next one is {self._next}")
            if len(self._waiting) >= self._capacity:
                raise RankError(
                    f"command {ticket}: {len(self._waiting)} others wait, and the inbox holds "
                    f"{self._capacity}; the controller must wait for results"
                )
            self._waiting[ticket] = command
            self._changed.notify_all()

    def close(self, error: ShoalError) -> None:
        """No more will come, for this reason."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self) -> dict[str, Any] | None:
        """The next command, once it is here; None behind the last.

        Raises:
            ShoalError: no more will come, for this reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._waiting or self._error is not None)
            command = self._waiting.pop(self._next, None)
            if command is None:
                assert self._error is not None
                raise self._error
            self._next += 1
            return command if command["kind"] == "step" else None

    def following(self) -> dict[str, Any] | None:
        """The command after the one last taken, if it is here."""
        with self._changed:
            command = self._waiting.get(self._next)
        return command if command is not None and command["kind"] == "step" else None


def pack_result(ticket: int, result: StepResult) -> dict[str, Any]:
    """What a step gave, as plain values."""
    return {
        "kind": "result",
        "ticket": ticket,
        "tokens": {name: list(tokens) for name, tokens in result.tokens.items()},
        "infos": {name: pack_infos(infos) for name, infos in result.infos.items()},
        "vectors": {name: list(values) for name, values in result.vectors.items()},
        "prompts": {n: [first, pack_infos(infos)] for n, (first, infos) in result.prompts.items()},
        "failed": dict(result.failed),
        "errors": dict(result.errors),
        "seconds": result.seconds,
        "done": sorted(result.done),
    }


def unpack_result(raw: Mapping[str, Any]) -> StepResult:
    """The inverse of :func:`pack_result`."""
    return StepResult(
        tokens={name: tuple(tokens) for name, tokens in raw["tokens"].items()},
        infos={name: unpack_infos(infos) for name, infos in raw["infos"].items()},
        vectors=raw["vectors"],
        prompts={n: (first, unpack_infos(infos)) for n, (first, infos) in raw["prompts"].items()},
        failed=raw["failed"],
        errors=raw["errors"],
        seconds=raw["seconds"],
        done=frozenset(raw["done"]),
    )
