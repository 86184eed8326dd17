"""Trees that grow level by level, by what a draft model makes of each node.

A level expands the most probable nodes of the level above; of all nodes the most probable ones
are verified. A node is never more probable than the one above it, so these are a tree.

Where guesses are drawn, which nodes there are must not depend on what was drawn beside them: the
root gets as many children as a level is wide, every other node one.

Shapes: W nodes of a level, V vocabulary.

Source: Li et al., EAGLE-2, 2024, section 4 (growing by confidence); Jeon et al., Recursive
Speculative Decoding, 2024, section 3 (trees drawn without replacement).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.serve.decode.protocols import TokenTree, branches

if TYPE_CHECKING:
    from torch import Tensor


class GrowingTree:
    """The tree of one request while it grows. Row 0 is the root.

    Args:
        root: its last certain token.
        depth: levels.
        width: nodes that a level expands.
    """

    def __init__(self, root: int, depth: int, width: int) -> None:
        self.depth, self._width = depth, width
        self.tokens = [root]
        self.parent = [-1]
        self._value = [0.0]  # log of the product of the probabilities along the path
        self.computed = [0]  # its row in the passes of the draft
        self._level = [0]  # nodes of the newest level
        self._expanded = [0]  # those that are computed next, or were last
        self._passes = 1
        self._seen = [1]  # by row of the draft's passes: the rows that it sees
        self._drawn: dict[int, Tensor] = {}

    def add(self, tokens_WK: np.ndarray, values_WK: np.ndarray) -> None:
        """Guesses below each expanded node, best first, and the logs of their probabilities."""
        self._level = []
        for above, tokens, values in zip(
            self._expanded, tokens_WK.tolist(), values_WK.tolist(), strict=True
        ):
            base = self._value[above]
            for token, value in zip(tokens, values, strict=True):
                self._node(above, token, base + value)

    def draw(self, q_WV: Tensor, source: np.random.Generator) -> None:
        """Children of each expanded node, drawn from these probabilities without replacement."""
        count = self._width if len(self.tokens) == 1 else 1
        self._level = []
        for above, q_V in zip(self._expanded, q_WV, strict=True):
            self._drawn[above] = q_V
            left = q_V.double().cpu().numpy().copy()
            for _ in range(min(count, int(np.count_nonzero(left)))):
                cumulative = left.cumsum()
                token = int(cumulative.searchsorted(source.random() * cumulative[-1], "right"))
                if token == len(left):  # by rounding
                    token = int(left.nonzero()[0][-1])
                left[token] = 0.0
                self._node(above, token, 0.0)

    def _node(self, above: int, token: int, value: float) -> None:
        self._level.append(len(self.tokens))
        self.tokens.append(token)
        self.parent.append(above)
        self._value.append(value)
        self.computed.append(-1)

    def expand(self, nodes: int = 0) -> tuple[list[int], int, np.ndarray]:
        """Tokens of the nodes to compute next, their first row, and what they see.

        Args:
            nodes: so many are wanted in the end, see :meth:`tree`; what cannot be among them is not
                computed. 0 where that is not known.
        """
        if self._drawn:
            chosen = self._level
        else:
            chosen = sorted(self._level, key=self._value.__getitem__, reverse=True)[: self._width]
            if 0 < nodes < len(self.tokens):
                # Nodes below come after all that are as probable as the one above them.
                bar = sorted(self._value[1:], reverse=True)[nodes - 1]
                chosen = [node for node in chosen if self._value[node] > bar]
        first = self._passes
        self._expanded = chosen
        for node in chosen:
            self.computed[node] = self._passes
            self._seen.append(self._seen[self.computed[self.parent[node]]] | 1 << self._passes)
            self._passes += 1
        seen = np.array(self._seen[first:], dtype=np.uint64).view(np.int64)
        return [self.tokens[node] for node in chosen], first, seen

    def above(self) -> list[int]:
        """Of each node that :meth:`expand` chose, the row of the one above in the passes."""
        return [self.computed[self.parent[node]] for node in self._expanded]

    def best_path(self, nodes: int) -> list[int]:
        """The most probable child of each node from the root on, as far as :meth:`tree` has one."""
        best: dict[int, int] = {}
        for row in self._kept(nodes):
            above = self.parent[row]
            if above not in best or self._value[row] > self._value[best[above]]:
                best[above] = row
        path, row = [], 0
        while row in best:
            row = best[row]
            path.append(row)
        return path

    def tree(self, nodes: int) -> tuple[TokenTree, Sequence[int]]:
        """At most so many nodes, the best; and of each row its row in the draft's passes."""
        kept = self._kept(nodes)
        rows = [0, *kept]
        place = {row: at for at, row in enumerate(rows)}
        parent = (-1, *(place[self.parent[row]] for row in kept))
        tokens = np.array([self.tokens[row] for row in rows])
        q = {place[row]: q_V for row, q_V in self._drawn.items() if row in place}
        computed = [self.computed[row] for row in rows]
        return TokenTree(tokens, branches(parent), q or None), computed

    def _kept(self, nodes: int) -> list[int]:
        """Rows of the best nodes, at most so many, rising."""
        every = range(1, len(self.tokens))
        if self._drawn:
            return list(every)[:nodes]
        # Sorting is stable, and a node comes after the one above it.
        return sorted(sorted(every, key=lambda row: -self._value[row])[:nodes])
