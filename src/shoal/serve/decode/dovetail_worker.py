"""The drafter's process: a feature net with copies of the target's embedding and head.

It is told what is certain, and asked for trees. With ``overlap`` it goes on from its own best path
while the target verifies, and throws that away where the target says something else.

Shapes: T new places, W nodes of a level, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.memory.mover import EmulatedLink
from shoal.model.attention import KVCache
from shoal.model.drafters import files
from shoal.model.drafters.fusion import FusionDrafter
from shoal.model.parameters import Parameters
from shoal.serve.decode.dovetail_wire import Channel, Head, Kind
from shoal.serve.decode.growing import Growing
from shoal.serve.decode.protocols import TokenTree

__all__ = ["FeatureTrees", "load_trees", "main"]


@dataclass
class _Ahead:
    """What was drafted for a continuation that is not certain yet."""

    tokens: list[int]
    grown: _Grown


@dataclass
class _Grown:
    """A tree, and the features behind the root and behind its computed nodes."""

    growing: Growing
    features: list[Tensor]


@dataclass
class _State:
    """Of one request: tokens that are certain, and features that the net has not read."""

    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None  # the net's feature behind the last token
    grown: _Grown | None = None
    ahead: _Ahead | None = None


class FeatureTrees:
    """Grows trees by a net that makes the target's next feature of its last ones.

    Args:
        net: of features.
        embed_VD: the target's.
        head_VD: the target's output matrix.
        depth: tokens looked ahead.
        breadth: nodes that each level goes on from.
        limit: most tokens of a request.
    """

    def __init__(
        self,
        net: FusionDrafter,
        embed_VD: Tensor,
        head_VD: Tensor,
        *,
        depth: int,
        breadth: int,
        limit: int,
    ) -> None:
        self._net, self._embed, self._head = net, embed_VD, head_VD
        self._depth, self._breadth, self._limit = depth, breadth, limit
        self._states: dict[int, _State] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the net and of both copies."""
        parts = {id(one): one for one in (*self._net.parameters(), self._embed, self._head)}
        return sum(one.numel() * one.element_size() for one in parts.values())

    def certain(
        self, request: int, start: int, tokens: list[int], hidden_TD: Tensor, root: int | None
    ) -> None:
        """These tokens are certain, and these are their features."""
        state = self._states.get(request)
        if state is None or start == 0:
            # Trees take room behind the last token, twice with what is drafted ahead.
            room = self._limit + 2 * (self._breadth + 1) * (self._depth + 2)
            like = self._embed
            cache = KVCache(self._net.config, 1, room, dtype=like.dtype, device=like.device)
            state = self._states[request] = _State(cache)
        state.tokens[start:] = tokens if root is None else [*tokens, root]
        state.pending.append(hidden_TD.to(self._embed.device))

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._states.pop(request, None)

    def tree(self, request: int, place: int, nodes: int) -> TokenTree | None:
        """Guesses behind the last certain token; None where something is missing."""
        state = self._states.get(request)
        if state is None or len(state.tokens) != place:
            return None
        ahead, state.ahead = state.ahead, None
        if ahead is not None and state.tokens[-len(ahead.tokens) :] == ahead.tokens:
            state.grown = ahead.grown
        else:
            self._read(state)
            if state.last is None:
                return None
            state.grown = self._grow(state.cache, state.tokens[-1], state.last)
        assert state.grown is not None
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

    def _read(self, state: _State) -> None:
        """Let the net read the features that came."""
        if not state.pending:
            return
        features_TD = torch.cat(state.pending)
        first = state.cache.length
        count = min(len(features_TD), len(state.tokens) - 1 - first)
        state.pending = [features_TD[count:]] if count < len(features_TD) else []
        if count:
            tokens = state.tokens[first + 1 : first + 1 + count]
            out_TD = self._pass(
                state.cache, features_TD[:count], tokens, range(first, first + count)
            )
            state.last = out_TD[-1]

    def _pass(
        self,
        cache: KVCache,
        features_TD: Tensor,
        tokens: Sequence[int],
        places: Sequence[int],
        seen: np.ndarray | None = None,
        base: int = 0,
    ) -> Tensor:
        """Features [T, D] one place further.

        Args:
            cache: of the net; grows.
            features_TD: the target's, or the net's own.
            tokens: that come behind them.
            places: of the features.
            seen: where these are nodes of a tree, which rows of it each sees, a bit each.
            base: rows of the cache that all of them see; row 0 of the tree is the last of them.
        """
        count, mask = len(tokens), None
        start = cache.length
        embeds = self._embed[list(tokens)]
        x, _ = self._net.mixed(features_TD[None], embeds[None])
        if seen is not None:
            at = np.arange(start + count) - base + 1
            hidden = (at >= 0) & ((seen[:, None] >> at.clip(0)) & 1 == 0)
            mask = torch.zeros(count, start + count, dtype=x.dtype)
            unseen = torch.from_numpy(hidden & (at > 0)).to(x.device)
            mask = mask.masked_fill_(unseen, float("-inf"))
        elif start and count > 1:
            mask = torch.full((count, start + count), float("-inf"), dtype=x.dtype)
            mask = mask.triu_(start + 1)
        position = torch.tensor(list(places))
        return self._net.seen(x, position, mask, cache)[0]

    def _scores(self, features_WD: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The best tokens behind each feature and the logs of their probabilities [W, K]."""
        logits = torch.nn.functional.linear(features_WD, self._head).float()
        best = logits.log_softmax(-1).topk(self._breadth)
        return best.indices.cpu().numpy(), best.values.cpu().numpy()

    def _grow(
        self, cache: KVCache, root: int, last_D: Tensor, stop: Callable[[], bool] | None = None
    ) -> _Grown | None:
        """A tree behind a root, whose feature the net has made; None where it was stopped.

        The cache is left as it was.
        """
        base = cache.length
        depth = min(self._depth, self._limit - base - 1)
        growing = Growing(root, max(1, depth), self._breadth)
        features = [last_D]
        growing.add(*self._scores(last_D[None]))
        for level in range(1, depth):
            if stop is not None and stop():
                cache.length = base
                return None
            tokens, _, seen = growing.expand()
            places = [base - 1 + level] * len(tokens)
            behind = torch.stack([features[row] for row in growing.above()])
            out_WD = self._pass(cache, behind, tokens, places, seen, base)
            features += out_WD.unbind(0)
            growing.add(*self._scores(out_WD))
        cache.length = base
        return _Grown(growing, features)

    def _onward(self, state: _State, grown: _Grown, stop: Callable[[], bool]) -> _Ahead | None:
        """The next round, should the target accept the best path to its end."""
        cache, growing = state.cache, grown.growing
        base = cache.length
        rows = growing.best_path()
        tokens = [growing.tokens[row] for row in rows]
        if base + len(tokens) + 2 >= self._limit:
            return None
        behind = torch.stack(
            [grown.features[growing.computed[growing.parent[row]]] for row in rows]
        )
        out_TD = self._pass(cache, behind, tokens, range(base, base + len(tokens)))
        found = None
        if not stop():
            root = int(self._scores(out_TD[-1:])[0][0, 0])
            last = self._pass(cache, out_TD[-1:], [root], [cache.length])[0]
            further = self._grow(cache, root, last, stop)
            found = None if further is None else _Ahead([*tokens, root], further)
        cache.length = base
        return found


def load_trees(told: dict[str, Any]) -> FeatureTrees:
    """The net of a drafter's directory with the embedding and head of its target's.

    Raises:
        ShoalError: one of both cannot be read.
    """
    dtype = getattr(torch, told["dtype"])
    device = torch.device(told["device"])
    torch.set_default_device(device)  # of masks, places and rotations
    stored = files.read(Path(told["path"]))
    parameters = Parameters(Path(told["model"]), dtype)
    config = parameters.config
    net = FusionDrafter(config, int(stored.config.options.get("layers", 1)))
    net.load_state_dict(stored.state)
    shape = (config.vocab_size, config.hidden)
    embed = parameters("embed.weight").view(shape).to(device)
    head = embed if config.tied else parameters("output.weight").view(shape).to(device)
    return FeatureTrees(
        net.to(device, dtype).requires_grad_(False),
        embed,
        head,
        depth=told["depth"],
        breadth=told["breadth"],
        limit=told["limit"],
    )


def _serve(channel: Channel, end: socket.socket, trees: FeatureTrees, told: dict[str, Any]) -> None:
    """Answer until the verifier is gone."""
    dtype, hidden, item = getattr(torch, told["dtype"]), told["hidden"], told["itemsize"]

    def wanted() -> bool:
        return bool(select.select([end], [], [], 0)[0])

    drafted: list[int] = []
    while True:
        if drafted and told["overlap"] and not wanted():
            trees.on(drafted.pop(), wanted)
            continue
        head = channel.head()
        if head.kind == Kind.VERDICT:
            tokens = np.frombuffer(channel.body(4 * head.c), dtype=np.uint32).tolist()
            raw = bytearray(channel.body(head.c * hidden * item))
            states = torch.frombuffer(raw, dtype=dtype).view(head.c, hidden)
            trees.certain(head.a, head.b, tokens, states, head.d - 1 if head.d else None)
        elif head.kind == Kind.DROP:
            trees.drop(head.a)
        elif head.kind == Kind.ASK:
            tree = trees.tree(head.a, head.b, head.c)
            if tree is None:
                channel.send(Head(Kind.DRAFT, head.a, 0))
                continue
            body = tree.tokens[1:].astype(np.uint32).tobytes()
            body += np.array(tree.shape.parent[1:], dtype=np.uint8).tobytes()
            channel.send(Head(Kind.DRAFT, head.a, tree.nodes), body)
            drafted = [head.a]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when the verifier has left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--told", required=True)
    given = parser.parse_args(arguments)
    told = json.loads(given.told)
    if told["cores"]:
        os.sched_setaffinity(0, told["cores"])
    torch.set_num_threads(max(1, len(told["cores"])))
    end = socket.socket(fileno=given.fd)
    link = EmulatedLink(*told["link"]) if told["link"] else None
    channel = Channel(end, link)
    try:
        trees = load_trees(told)
    except ShoalError as cause:
        words = str(cause).encode()
        channel.send(Head(Kind.FAILED, len(words)), words)
        return 1
    channel.send(Head(Kind.READY, trees.nbytes & 0xFFFFFFFF, trees.nbytes >> 32))
    with torch.inference_mode():
        try:
            _serve(channel, end, trees, told)
        except (EOFError, BrokenPipeError):
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
