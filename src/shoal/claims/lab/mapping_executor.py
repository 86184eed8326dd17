"""A traced model in two real memories, every tensor where a mapping puts it.

Fast memory is an arena of just the bytes that there are, and tensors lie at the addresses of the
mapping. Slow memory is behind a link that is held to its rate; reading an operand there takes link
time, and so do the copies, which a thread of their own makes while operators run. The operators
are the model's own, so the result must be the model's, to the last bit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shoal.core.errors import PlanError, require
from shoal.memory.mapping.trace import TracedProgram, is_item, is_view
from shoal.memory.tiers.mover import EmulatedLink, Mover, Ticket
from shoal.memory.tiers.tier import BudgetedTier, TierBlock
from shoal.plan.mapping.layout import DROP, CopyTime, Mapping, Rectangle, verify


@dataclass(frozen=True)
class ExecutionResult:
    """Seconds, outputs, bytes that instructions had of slow memory, bytes that were copied."""

    seconds: float
    outputs: tuple[Tensor, ...]
    read: int
    copied: int


def execute(traced: TracedProgram, mapping: Mapping) -> ExecutionResult:
    """Run a program as it is mapped; slow memory has the bandwidth of the mapping's tiers.

    Args:
        traced: model, weights and inputs.
        mapping: of its program.

    Raises:
        PlanError: a mapping of another program, one that breaks its promises, or a model without
            weights.
    """
    require(
        mapping.compiled.program == traced.program,
        "mapping",
        mapping.compiled.program.name,
        expected=f"one of the program {traced.program.name}",
        error=PlanError,
    )
    if any(value.device.type == "meta" for value in traced.arguments):
        raise PlanError(f"{traced.program.name}: its weights are on the meta device; it cannot run")
    verify(mapping)
    with torch.no_grad(), Mover("slow-fast", link=None, depth=1024) as mover:
        return _Run(traced, mapping, mover).run()


class _Run:
    def __init__(self, traced: TracedProgram, mapping: Mapping, mover: Mover) -> None:
        c = mapping.compiled
        self.traced, self.mapping, self.c, self.mover = traced, mapping, c, mover
        self.nodes = {node.name: node for node in traced.graph.graph.nodes}
        self.place = {name: b for b, name in enumerate(c.names)}
        self.fast = BudgetedTier("fast", max(256, c.tiers.fast_bytes))
        self.slow: dict[int, Tensor] = {}
        self.link = EmulatedLink(c.tiers.slow_bandwidth)
        self.read = self.copied = 0
        # What of every buffer has been copied: chunks of one copy follow each other.
        self.done: dict[int, int] = defaultdict(int)
        self.at = {(int(c.slot[k]), int(c.buffer[k])): k for k in range(c.decisions)}
        self.pieces: dict[int, list[CopyTime]] = defaultdict(list)
        for piece in sorted(mapping.moved, key=lambda one: one.slot):
            self.pieces[piece.slot].append(piece)
        self.last = {piece.decision: piece for piece in sorted(mapping.moved, key=_slot)}
        self.stays: dict[int, Rectangle] = {one.decision: one for one in mapping.rectangles}
        self.values: dict[str, Any] = {}
        holders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
        for node, value in zip(holders, traced.arguments, strict=True):
            self.values[node.name] = value
            if node.name in self.place:
                self.slow[self.place[node.name]] = _like(value).copy_(value)

    def run(self) -> ExecutionResult:
        steps = self.traced.program.instructions
        begin = time.perf_counter()
        for slot, step in enumerate(steps):
            self._step(slot, self.nodes[step.name])
        waiting = [self._copy(piece) for piece in self.pieces[len(steps)]]
        for ticket in waiting:
            ticket.wait()
        seconds = time.perf_counter() - begin
        result = tuple(self._resolve(self.nodes[name], -1) for name in self.traced.outputs)
        return ExecutionResult(seconds, result, self.read, self.copied)

    def _step(self, slot: int, node: Node) -> None:
        """One instruction and the copies beside it; it ends when all are done."""
        c, actions = self.c, self.mapping.actions
        missed = [k for (at, _), k in self._here(slot) if actions[k] == DROP]
        nbytes = round(sum(int(c.slow[k]) for k in missed) * 1e-12 * c.tiers.slow_bandwidth)
        self.read += nbytes
        # Instructions come first; copies have what the link has left.
        through = self.link.book(nbytes) if nbytes else 0.0
        waiting = [self._copy(piece) for piece in self.pieces[slot]]
        arguments = torch.fx.map_arg(node.args, lambda one: self._resolve(one, slot))
        words = torch.fx.map_arg(node.kwargs, lambda one: self._resolve(one, slot))
        assert callable(node.target)
        self._keep(slot, node, node.target(*arguments, **words))
        time.sleep(max(0.0, through - time.perf_counter()))
        for ticket in waiting:
            ticket.wait()

    def _here(self, slot: int) -> list[tuple[tuple[int, int], int]]:
        c = self.c
        first = int(c.slot.searchsorted(slot))
        last = int(c.slot.searchsorted(slot, side="right"))
        return [((slot, int(c.buffer[k])), k) for k in range(first, last)]

    def _arena(self, stay: Rectangle, nbytes: int) -> Tensor:
        """The bytes of a stay in fast memory."""
        start = stay.address * self.c.tiers.alignment
        name = self.c.names[stay.buffer]
        return self.fast.view(TierBlock(start, nbytes, name), torch.uint8, (nbytes,))

    def _stay(self, b: int, slot: int) -> Rectangle:
        return next(
            one
            for one in reversed(self.mapping.rectangles)
            if one.buffer == b and one.start <= slot <= one.end and self._filled(one, slot)
        )

    def _filled(self, one: Rectangle, slot: int) -> bool:
        return bool(self.c.write[one.decision]) or self.last[one.decision].slot < slot

    def _root(self, b: int, slot: int) -> Tensor:
        """A buffer where the mapping has it in a slot; in slow memory after the end."""
        k = self.at.get((slot, b))
        if k is None or self.mapping.actions[k] == DROP:
            return self.slow[b]
        like = self.slow[b]
        raw = self._arena(self._stay(b, slot), like.nbytes)
        return raw.view(like.dtype).as_strided(like.shape, like.stride())

    def _resolve(self, node: Node, slot: int) -> Any:
        """The value of a node: a buffer, or a view of one."""
        if node.name in self.place:
            return self._root(self.place[node.name], slot)
        if is_item(node):
            source, index = node.args[0], node.args[1]
            assert isinstance(source, Node)
            key = f"{source.name}.{index}"
            if key in self.place:
                return self._root(self.place[key], slot)
        if is_view(node) or is_item(node):
            arguments = torch.fx.map_arg(node.args, lambda one: self._resolve(one, slot))
            words = torch.fx.map_arg(node.kwargs, lambda one: self._resolve(one, slot))
            assert callable(node.target)
            return node.target(*arguments, **words)
        return self.values[node.name]

    def _keep(self, slot: int, node: Node, value: Any) -> None:
        """Put results where they belong."""
        self.values[node.name] = value if not isinstance(value, Tensor) else None
        several = isinstance(value, (list, tuple))
        for index, one in enumerate(value if several else [value]):
            b = self.place.get(f"{node.name}.{index}" if several else node.name)
            if b is None or not isinstance(one, Tensor):
                continue
            self.slow[b] = _like(one)
            self._root(b, slot).copy_(one)

    def _copy(self, piece: CopyTime) -> Ticket:
        """A chunk of a copy, on the mover's thread."""
        c, b = self.c, piece.buffer
        slow = self.slow[b]
        raw = slow.as_strided((slow.numel(),), (1,)).view(torch.uint8)
        arena = self._arena(self.stays[piece.decision], raw.numel())
        start = self.done[piece.decision]
        last = piece is self.last[piece.decision]
        many = raw.numel() - start if last else int(piece.ticks / int(c.copy[b]) * raw.numel())
        self.done[piece.decision] += many
        self.copied += many
        chunk = slice(start, start + many)
        through = self.link.book(many)
        source, target = (arena, raw) if c.write[piece.decision] else (raw, arena)

        def move() -> None:
            target[chunk].copy_(source[chunk])
            time.sleep(max(0.0, through - time.perf_counter()))

        return self.mover.submit(move, many)


def _like(value: Tensor) -> Tensor:
    """Room for a tensor in slow memory, dense, in the order of its elements."""
    return torch.empty_like(value, memory_format=torch.preserve_format)


def _slot(piece: CopyTime) -> int:
    return piece.slot
