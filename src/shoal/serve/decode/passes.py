"""Which nodes of a tree each pass of a drafter gives, and what the next pass reads of them.

Pass 0 gives the first k levels. A node of level k - 1, 2k - 1, ... below which the tree goes on is
read by the next pass with the k nodes of its path that the pass before gave.

Source: Gao et al., Falcon, 2025, section 3.3.
Shapes: E nodes that a pass reads, k levels of a pass, W guesses of a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.ir import TreeSpec
from shoal.serve.decode.protocols import TokenTree, branches


@dataclass(frozen=True, slots=True, eq=False)
class DecodePass:
    """One pass.

    Args:
        nodes: predicted nodes; for each the position that was read, its level in the pass and its
            rank.
        chains: [E, k] nodes whose tokens it reads; empty for the first pass, which reads what is
            certain.
        parents: [E] the place of each in what the pass before read.
        before: rows of the passes before that read nodes.
        seen: [E k] which rows of this pass and of those before each row of it sees, a bit each.
    """

    nodes: np.ndarray
    place: np.ndarray
    level: np.ndarray
    rank: np.ndarray
    chains: np.ndarray
    parents: np.ndarray
    before: int
    seen: np.ndarray


class TreePasses:
    """The passes that a tree takes.

    Args:
        spec: the tree.
        k: levels of a pass.

    Attributes:
        passes: in order.
    """

    def __init__(self, spec: TreeSpec, k: int) -> None:
        self._shape = branches((-1, *(above + 1 for above in spec.parent)))
        self._rows = len(spec) + 1
        level, rank = np.array(spec.level), np.array(spec.rank)
        has_more = set(spec.parent)
        paths = [_path(spec, node) for node in range(len(spec))]
        # The node that was read by the pass of each node; -1 for what is certain.
        read = [path[own // k * k - 1] if own >= k else -1
                for path, own in zip(paths, spec.level, strict=True)]  # fmt: skip
        self.passes: list[DecodePass] = []
        places: dict[int, int] = {-1: 0}
        before: list[int] = []  # of every row of passes that read: the node it ends in
        for turn in range(-(-spec.depth // k)):
            ends: list[int] = []
            parents: list[int] = []
            if turn:
                ends = [node for node in range(len(spec))
                        if spec.level[node] == turn * k - 1 and node in has_more]  # fmt: skip
                parents = [places[read[node]] for node in ends]
                places = {node: place for place, node in enumerate(ends)}
            chains = np.array([paths[node][-k:] for node in ends], dtype=int).reshape(-1, k)
            own = [node for node in range(len(spec)) if spec.level[node] // k == turn]
            start = len(before)
            before += [node for node in ends for _ in range(k)]
            bits = [
                sum(1 << row for row, end in enumerate(before) if end in paths[node])
                for node in ends for _ in range(k)
            ]  # fmt: skip
            self.passes.append(
                DecodePass(
                    nodes=np.array(own),
                    place=np.array([places[read[node]] for node in own]),
                    level=level[own] % k,
                    rank=rank[own],
                    chains=chains,
                    parents=np.array(parents, dtype=int),
                    before=start,
                    seen=np.array(bits, dtype=object).astype(np.uint64).view(np.int64),
                )
            )
        self.rows = len(before)

    def begin(self, root: int) -> np.ndarray:
        """Tokens of root and nodes, of which the root is known."""
        tokens = np.zeros(self._rows, dtype=np.int64)
        tokens[0] = root
        return tokens

    def fill(self, turn: int, tokens: np.ndarray, best_EkW: np.ndarray) -> None:
        """The tokens that a pass gives.

        Args:
            turn: which pass.
            tokens: of root and nodes; filled in place.
            best_EkW: its guesses, best first.
        """
        if turn < len(self.passes):
            one = self.passes[turn]
            tokens[one.nodes + 1] = best_EkW[one.place, one.level, one.rank]

    def tree(self, tokens: np.ndarray) -> TokenTree:
        """The tree with these tokens."""
        return TokenTree(tokens, self._shape)


def _path(spec: TreeSpec, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = spec.parent[node]
    return path[::-1]
