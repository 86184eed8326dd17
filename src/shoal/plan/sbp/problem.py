"""A graph of operations, and what every choice of placements for it costs.

What is counted:

- a tensor is brought into each placement that its users want once, however many want it;
- time = boxing bytes / (ranks x ``bytes_per_s``) + collectives x ``latency_s`` + operations of
  the rank that has most to do / ``flops_per_s`` + bytes of leaves that it reads, once, /
  ``read_bytes_per_s``;
- memory per rank: every tensor as it was made or given, and every copy that boxing made;
  all of them stay, as they do for a backward pass. Results of another shape or order are
  views of what they are made of.

Source: Yuan et al., OneFlow, 2021, sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import PlanError, nearest, require
from shoal.cost.price.boxing import Boxing, boxing, is_view
from shoal.ir.placement import (
    Mesh,
    Placement,
    Reduction,
    check_placement,
    largest_part,
    local_box,
    parse_placement,
    show_placement,
)
from shoal.ir.signatures import MeshSignature, legal, operation, result_shape

# What makes no copy of what it takes.
VIEWS = ("permute", "reshape", "narrow")

Choice = dict[str, MeshSignature]
Given = dict[str, Placement]


class Leaf(Value):
    """A tensor that is given: an input, or a weight.

    Args:
        shape: sizes.
        itemsize: bytes of an element.
    """

    name: str
    shape: tuple[PositiveInt, ...]
    itemsize: PositiveInt = 4


class OpNode(Value):
    """An operation; its result has its name.

    Args:
        name: of the operation and of its result.
        kind: a row of :data:`~shoal.ir.signatures.OPERATIONS`.
        inputs: names of leaves and of operations before this one.
        attributes: options of the operation, such as ``dim``.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    attributes: dict[str, JsonValue] = {}


class OpGraph(Value):
    """Operations in an order in which they can be done.

    Args:
        leaves: inputs and parameters.
        ops: operations, in order.
    """

    leaves: tuple[Leaf, ...]
    ops: tuple[OpNode, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> OpGraph:
        known: set[str] = set()
        items: tuple[Leaf | OpNode, ...] = (*self.leaves, *self.ops)
        for item in items:
            require(
                item.name not in known and ":" not in item.name and bool(item.name),
                "graph: name",
                item.name,
                expected="a name of its own, without ':'",
                error=PlanError,
            )
            for name in item.inputs if isinstance(item, OpNode) else ():
                require(
                    name in known,
                    f"graph: inputs of {item.name}",
                    name,
                    expected="a leaf, or an operation listed before",
                    hint=nearest(name, known),
                    error=PlanError,
                )
            known.add(item.name)
        return self

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor.

        Raises:
            PlanError: an operation does not take what it is given; names it.
        """
        shapes = {leaf.name: tuple(leaf.shape) for leaf in self.leaves}
        for op in self.ops:
            try:
                shapes[op.name] = result_shape(
                    op.kind, [shapes[name] for name in op.inputs], op.attributes
                )
            except PlanError as cause:
                raise PlanError(f"{op.name}: {cause}") from cause
        return shapes

    @cached_property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element of every tensor; a result has that of its widest input."""
        itemsizes = {leaf.name: int(leaf.itemsize) for leaf in self.leaves}
        for op in self.ops:
            # Tokens are wide integers, what is looked up for them is not.
            inputs = op.inputs[1:] if op.kind == "embedding" else op.inputs
            itemsizes[op.name] = max(itemsizes[name] for name in inputs)
        return itemsizes

    @property
    def bytes_alone(self) -> int:
        """Bytes of everything where one rank has it all; a view takes none."""
        views = {op.name for op in self.ops if op.kind in VIEWS}
        return sum(
            self.itemsizes[name] * math.prod(shape)
            for name, shape in self.shapes.items()
            if name not in views
        )

    @cached_property
    def users(self) -> dict[str, tuple[OpNode, ...]]:
        """Operations that take a tensor, each once."""
        return {name: tuple(op for op in self.ops if name in op.inputs) for name in self.shapes}


class MeshRates(Value):
    """How fast the ranks are.

    Args:
        flops_per_s: operations a second that a rank computes.
        bytes_per_s: bytes a second that a rank sends.
        latency_s: seconds of a collective besides its bytes.
        read_bytes_per_s: bytes a second that a rank reads of its memory.
    """

    flops_per_s: PositiveFloat = 4e14
    bytes_per_s: PositiveFloat = 5e10
    latency_s: NonNegativeFloat = 5e-6
    read_bytes_per_s: PositiveFloat = 3e12


class PlacementMove(Value):
    """A tensor brought into another placement.

    Args:
        tensor: its name.
        source: placement that it has.
        target: placement that a user, or a pin, wants.
        steps: pairs of collective and resulting placement, in order.
        bytes: bytes sent between ranks, in total.
        collectives: steps that send; an exchange on two axes is worth three.
    """

    tensor: str
    source: str
    target: str
    steps: tuple[str, ...]
    bytes: int
    collectives: int


class SbpPlan(Value):
    """Placement of a whole graph.

    Args:
        mesh: ranks of each axis.
        inputs: operation -> placement in which it takes each input.
        placements: tensor -> placement in which it is given or made, after its pin.
        results: operation -> placement that its signature makes, before its pin.
        moves: all boxing.
        boxing_bytes: bytes sent between ranks, in total.
        flops: of the rank that computes most.
        memory_bytes: of the rank that holds most.
        seconds: boxing and computing.
        method: how it was found.
    """

    mesh: tuple[int, ...]
    inputs: dict[str, tuple[str, ...]]
    placements: dict[str, str]
    results: dict[str, str]
    moves: tuple[PlacementMove, ...]
    boxing_bytes: int
    flops: float
    memory_bytes: int
    seconds: float
    method: Literal["dynamic programming", "integer program", "given"]


class OpOptions(NamedTuple):
    """What one operation can do.

    Args:
        legal: its signatures.
        seconds: [n], compute time of each, and of boxing its result into its pin.
        output: [n], number of the placement that the result has.
    """

    legal: list[MeshSignature]
    seconds: NDArray[np.float64]
    output: NDArray[np.int64]


class SbpProblem:
    """Costs of every choice of a graph on a mesh.

    Raises:
        PlanError: a pin names nothing, is no placement, or no operation takes it.
    """

    def __init__(
        self, graph: OpGraph, mesh: Mesh, pins: Mapping[str, str], rates: MeshRates
    ) -> None:
        require(
            bool(mesh) and all(size >= 1 for size in mesh),
            "mesh",
            mesh,
            expected="ranks of each axis, at least 1",
            error=PlanError,
        )
        self.graph = graph
        self.mesh = tuple(mesh)
        self.rates = rates
        self.world = math.prod(mesh)
        self.tensors: Given = {}
        self.uses: dict[tuple[str, int], Placement] = {}
        for name, text in pins.items():
            self._pin(name, text)
        written = [*self.tensors.values(), *self.uses.values()]
        maxima = any(op.kind == "amax" for op in graph.ops) or "max" in {
            getattr(axis, "op", "") for placement in written for axis in placement
        }
        self.reductions: tuple[Reduction, ...] = ("sum", "max") if maxima else ("sum",)
        self.views = frozenset(op.name for op in graph.ops if op.kind in VIEWS)
        self.options = {op.name: self._options(op) for op in graph.ops}

    def boxing(self, tensor: str) -> Boxing:
        """Transitions of a tensor."""
        return boxing(self.graph.shapes[tensor], self.mesh, self.reductions)

    def transit_s(self, tensor: str) -> NDArray[np.float64]:
        """[n, n]: seconds from each placement to each other one."""
        size = self.graph.itemsizes[tensor]
        rate = self.world * self.rates.bytes_per_s
        result = self.boxing(tensor)
        return result.elements * (size / rate) + result.sends * self.rates.latency_s

    def read_s(self, leaf: str) -> NDArray[np.float64]:
        """[n]: seconds to read a leaf from memory, in each placement; 0 if it is unused."""
        used = bool(self.graph.users[leaf])
        return self.memory(leaf) * used / self.rates.read_bytes_per_s

    def given(self, leaf: str) -> NDArray[np.int64]:
        """Numbers of the placements that a leaf can be given in."""
        result = self.boxing(leaf)
        if leaf in self.tensors:
            return np.array([result.index[self.tensors[leaf]]])
        return np.arange(len(result.placements))

    def wanted(self, op: OpNode, tensor: str) -> list[tuple[int, ...]]:
        """Numbers of the placements in which each signature takes ``tensor``."""
        index = self.boxing(tensor).index
        places = [i for i, name in enumerate(op.inputs) if name == tensor]
        return [
            tuple(sorted({index[signature.inputs[i]] for i in places}))
            for signature in self.options[op.name].legal
        ]

    def memory(self, tensor: str) -> NDArray[np.float64]:
        """[n]: bytes of the rank that holds most, in each placement."""
        size, shape = self.graph.itemsizes[tensor], self.graph.shapes[tensor]
        placements = self.boxing(tensor).placements
        return np.array([float(size * largest_part(shape, p, self.mesh)) for p in placements])

    def made(self, tensor: str) -> NDArray[np.float64]:
        """[n]: bytes that a tensor takes where it is given or made; a view takes none."""
        return self.memory(tensor) * (tensor not in self.views)

    def copied(self, tensor: str) -> NDArray[np.float64]:
        """[n, n]: bytes of memory that boxing from i to j takes; none where it only slices."""
        placements, memory = self.boxing(tensor).placements, self.memory(tensor)
        views = np.array([[is_view(p, q) for q in placements] for p in placements])
        return np.where(views, 0.0, memory[None, :])

    def plan(
        self,
        chosen: Choice,
        given: Given,
        *,
        method: Literal["dynamic programming", "integer program", "given"] = "given",
    ) -> SbpPlan:
        """What a choice costs, recomputed from the choice alone."""
        graph = self.graph
        held: Given = dict(given)
        for op in graph.ops:
            held[op.name] = self.tensors.get(op.name, chosen[op.name].output)
        moves: dict[tuple[str, Placement, Placement], None] = {}
        for op in graph.ops:
            for name, wanted in zip(op.inputs, chosen[op.name].inputs, strict=True):
                moves[name, held[name], wanted] = None
            moves[op.name, chosen[op.name].output, held[op.name]] = None
        made = [self._move(*key) for key in moves if key[1] != key[2]]
        made_as = {name: signature.output for name, signature in chosen.items()}
        kept = [*given.items(), *((n, p) for n, p in made_as.items() if n not in self.views)]
        kept += [(name, target) for name, old, target in moves if not is_view(old, target)]
        memory = sum(
            graph.itemsizes[name] * largest_part(graph.shapes[name], placement, self.mesh)
            for name, placement in kept
        )
        flops = sum(self._flops(op, chosen[op.name]) for op in graph.ops)
        moved = sum(move.bytes for move in made)
        return SbpPlan(
            mesh=self.mesh,
            inputs={
                name: tuple(show_placement(p) for p in signature.inputs)
                for name, signature in chosen.items()
            },
            placements={name: show_placement(p) for name, p in held.items()},
            results={name: show_placement(s.output) for name, s in chosen.items()},
            moves=tuple(made),
            boxing_bytes=moved,
            flops=flops,
            memory_bytes=memory,
            seconds=moved / (self.world * self.rates.bytes_per_s)
            + sum(move.collectives for move in made) * self.rates.latency_s
            + flops / self.rates.flops_per_s
            + sum(
                float(self.read_s(name)[self.boxing(name).index[p]]) for name, p in given.items()
            ),
            method=method,
        )

    def _move(self, tensor: str, source: Placement, target: Placement) -> PlacementMove:
        table, size = self.boxing(tensor), self.graph.itemsizes[tensor]
        return PlacementMove(
            tensor=tensor,
            source=show_placement(source),
            target=show_placement(target),
            steps=tuple(
                f"{step.name} -> {show_placement(step.target)}"
                for step in table.route(source, target)
            ),
            bytes=table.cost(source, target) * size,
            collectives=int(table.sends[table.index[source], table.index[target]]),
        )

    def _flops(self, op: OpNode, signature: MeshSignature) -> float:
        first = (0,) * len(self.mesh)
        shapes = [
            local_box(self.graph.shapes[name], placement, self.mesh, first).shape
            for name, placement in zip(op.inputs, signature.inputs, strict=True)
        ]
        out = local_box(self.graph.shapes[op.name], signature.output, self.mesh, first).shape
        return operation(op.kind).flops(shapes, out)

    def _pin(self, name: str, text: str) -> None:
        shapes = self.graph.shapes
        owner, colon, place = name.partition(":")
        ops = {op.name: op for op in self.graph.ops}
        known = name in shapes
        if colon and owner in ops and place.isdecimal():
            known = int(place) < len(ops[owner].inputs)
        require(
            known,
            "pins",
            name,
            expected=f"a tensor ({', '.join(shapes)}), or OPERATION:i for its input i",
            hint=nearest(name, shapes),
            error=PlanError,
        )
        where = f"pins: {name}"
        tensor = ops[owner].inputs[int(place)] if colon else name
        placement = check_placement(
            parse_placement(text, where=where), shapes[tensor], self.mesh, where=where
        )
        if colon:
            self.uses[owner, int(place)] = placement
        else:
            self.tensors[name] = placement

    def _options(self, op: OpNode) -> OpOptions:
        shapes = [self.graph.shapes[name] for name in op.inputs]
        everything = [
            signature
            for signature in legal(op.kind, shapes, op.attributes, self.mesh)
            if all(
                p in self.boxing(name).index
                for name, p in zip(
                    (*op.inputs, op.name), (*signature.inputs, signature.output), strict=True
                )
            )
        ]
        result = everything
        for i, name in enumerate(op.inputs):
            pin = self.uses.get((op.name, i))
            if pin is None:
                continue
            result = [signature for signature in result if signature.inputs[i] == pin]
            if not result:
                accepted = sorted({show_placement(s.inputs[i]) for s in everything})
                raise PlanError(
                    f"pins: {op.name}:{i} = {show_placement(pin)!r}: {op.kind} cannot take "
                    f"{name} so (with its other pins); expected one of {', '.join(accepted)}; "
                    f"pin the tensor {name!r} instead, and it is boxed for this operation"
                )
        index = self.boxing(op.name).index
        seconds = np.array([self._flops(op, s) / self.rates.flops_per_s for s in result])
        output = np.array([index[s.output] for s in result])
        if op.name in self.tensors:
            pinned = index[self.tensors[op.name]]
            seconds = seconds + self.transit_s(op.name)[output, pinned]
            output = np.full(len(result), pinned)
        return OpOptions(result, seconds, output)
