"""Trees that Dovetail's drafter grows: behind what is certain, and ahead of it.

A level is one pass of the net over the nodes that can still be among those that are verified.
While the target verifies, the drafter may go on from the path that it takes for the likeliest; what
it drafts there is used if the target says the same, finished or not, and forgotten otherwise.

Shapes: T new places, D hidden.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.plan.serving.small_device import tree_room
from shoal.serve.decode.dovetail.net import FusionNet, NetInput, NetOutput, NetState
from shoal.serve.decode.draft.growing import GrowingTree
from shoal.serve.decode.protocols import TokenTree

# Most rows of a pass over what came.
_PIECE = 512


@dataclass
class _Grown:
    """A tree, the places before it, and features behind its root and its computed nodes."""

    growing: GrowingTree
    base: int
    nodes: int  # that are wanted of it
    depth: int
    features: Tensor
    levels: int = 1
    rows: int = 1  # that are computed, the root's among them

    @property
    def whole(self) -> bool:
        """There is nothing left to grow."""
        return self.levels >= self.depth


@dataclass
class _Ahead:
    """What was drafted for a continuation that is not certain yet."""

    tokens: list[int]
    grown: _Grown


@dataclass
class _State:
    """Of one request: tokens that are certain, and features that the net has not read."""

    held: NetState
    tokens: list[int] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    last: NetOutput | None = None  # behind the last place
    grown: _Grown | None = None
    ahead: _Ahead | None = None


class FeatureTrees:
    """Grows trees by a net that makes the target's next feature of its last ones.

    Args:
        depth: tokens looked ahead.
        breadth: nodes of each level that are expanded.
        limit: most tokens of a request.

    Attributes:
        guessed: times that something was drafted ahead.
        right: those that the target agreed with.
        passes: of the net.
        pass_s: s of a pass, about.
    """

    def __init__(self, net: FusionNet, *, depth: int, breadth: int, limit: int) -> None:
        self.net, self._depth, self._breadth, self._limit = net, depth, breadth, limit
        self._states: OrderedDict[int, _State] = OrderedDict()
        self.guessed = self.right = self.passes = 0
        self.pass_s = 0.0

    def certain(
        self, request: int, start: int, tokens: list[int], hidden_TD: Tensor, root: int | None
    ) -> None:
        """These tokens are certain, and these are their features."""
        if start == 0:
            self.drop(request)
            self._states[request] = _State(self.net.hold())
        state = self._states.get(request)
        if state is None:
            return  # its room went to others
        state.tokens[start:] = tokens if root is None else [*tokens, root]
        state.pending.append(hidden_TD.to(self.net.like.device))

    def drop(self, request: int) -> None:
        """Forget a request."""
        state = self._states.pop(request, None)
        if state is not None:
            self.net.free(state.held)

    def tree(self, request: int, place: int, nodes: int) -> TokenTree | None:
        """Guesses behind the last certain token; None where something is missing."""
        state = self._states.get(request)
        if state is None or len(state.tokens) != place or not self._reserve(request, state):
            return None
        ahead, state.ahead = state.ahead, None
        if (
            ahead is not None
            and nodes <= ahead.grown.nodes
            and state.tokens[-len(ahead.tokens) :] == ahead.tokens
        ):
            self.right += 1
            state.grown = ahead.grown
        else:
            self._read(state)
            if state.last is None:
                return None
            base = state.held.length
            state.grown = self._begin(state.tokens[-1], state.last, base, nodes)
        self._grow(state.held, state.grown, lambda: False)
        return state.grown.growing.tree(nodes)[0]

    def on(self, request: int, stop: Callable[[], bool]) -> None:
        """Read what is certain and draft behind the best path, until something else is wanted.

        Args:
            request: that was drafted for last.
            stop: asked between levels.
        """
        state = self._states.get(request)
        if state is None or state.grown is None:
            return
        self._read(state)
        if not stop():
            state.ahead = self._onward(state, state.grown, stop)

    def _reserve(self, request: int, state: _State) -> bool:
        """Room for a request and its trees; those that guessed longest ago give theirs."""
        self._states.move_to_end(request)
        places = len(state.tokens) + tree_room(self._depth, self._breadth)
        while not self.net.reserve(state.held, places):
            eldest = next(iter(self._states))
            self.drop(eldest)
            if eldest == request:
                return False
        return True

    def _read(self, state: _State) -> None:
        """Let the net read the features that came."""
        if not state.pending:
            return
        features_TD = state.pending[0] if len(state.pending) == 1 else torch.cat(state.pending)
        first = state.held.length
        count = min(len(features_TD), len(state.tokens) - 1 - first)
        state.pending = [features_TD[count:]] if count < len(features_TD) else []
        for start in range(0, count, _PIECE):
            stop = min(count, start + _PIECE)
            tokens = state.tokens[first + 1 + start : first + 1 + stop]
            places = range(first + start, first + stop)
            rows = NetInput(features_TD[start:stop], tokens, places, last=True)
            state.last = _kept(self._pass(state.held, rows))

    def _pass(self, held: NetState, rows: NetInput) -> NetOutput:
        began = time.perf_counter()
        made = self.net.read(held, rows)
        took = time.perf_counter() - began
        self.pass_s += (took - self.pass_s) / min(16, 1 + self.passes)
        self.passes += 1
        return made

    def _begin(self, root: int, last: NetOutput, base: int, nodes: int) -> _Grown:
        """A tree of one level behind a root, whose feature the net has made."""
        depth = max(1, min(self._depth, self._limit - base - 1))
        growing = GrowingTree(root, depth, self._breadth)
        growing.add(last.tokens, last.values)
        rows = 1 + self._breadth * (depth - 1)
        features = self.net.like.new_empty(rows, self.net.width)
        features[:1] = last.features
        return _Grown(growing, base, nodes, depth, features)

    def _grow(self, held: NetState, grown: _Grown, stop: Callable[[], bool]) -> None:
        """Grow a tree until it is whole, or something else is wanted; what is held stays so long.

        Args:
            held: of the request.
            grown: the tree; what was computed of it still stands behind its base.
            stop: asked between levels.
        """
        before, growing = held.length, grown.growing
        while not grown.whole and not stop():
            tokens, _, seen = growing.expand(grown.nodes)
            if not tokens:
                grown.levels = grown.depth
                break
            held.length = grown.base + grown.rows - 1
            places = [grown.base - 1 + grown.levels] * len(tokens)
            behind = grown.features[growing.above()]
            made = self._pass(held, NetInput(behind, tokens, places, seen, grown.base))
            rows = grown.rows + len(tokens)
            grown.features[grown.rows : rows] = made.features
            growing.add(made.tokens, made.values)
            grown.rows, grown.levels = rows, grown.levels + 1
        held.length = before

    def _onward(self, state: _State, grown: _Grown, stop: Callable[[], bool]) -> _Ahead | None:
        """The next round, should the target accept the best path to its end."""
        held, growing = state.held, grown.growing
        base = held.length
        rows = growing.best_path(grown.nodes)
        tokens = [growing.tokens[row] for row in rows]
        if not rows or base + len(tokens) + 2 >= self._limit:
            return None
        self.guessed += 1
        behind = grown.features[[growing.computed[growing.parent[row]] for row in rows]]
        places = range(base, base + len(tokens))
        made = _kept(self._pass(held, NetInput(behind, tokens, places, last=True)))
        result = None
        if not stop():
            root = int(made.tokens[0, 0])
            made = self._pass(held, NetInput(made.features, [root], [held.length], last=True))
            further = self._begin(root, made, held.length, grown.nodes)
            self._grow(held, further, stop)
            result = _Ahead([*tokens, root], further)
        held.length = base
        return result


def _kept(further: NetOutput) -> NetOutput:
    """The same in memory of its own."""
    return NetOutput(further.features.clone(), further.tokens.copy(), further.values.copy())
