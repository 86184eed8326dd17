"""Trees of a fixed shape, filled with the best guesses of every level."""

from __future__ import annotations

from functools import cache

import numpy as np

from shoal.ir import TreeSpec
from shoal.serve.decode.protocols import Branches, TokenTree, branches


class Filler:
    """Makes trees of the first nodes of a shape."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec
        self._level, self._rank = np.array(spec.level), np.array(spec.rank)
        self._shape = cache(self._branches)

    def _branches(self, nodes: int) -> Branches:
        return branches((-1, *(above + 1 for above in self.spec.parent[:nodes])))

    def tree(self, root: int, guesses_LW: np.ndarray, nodes: int) -> TokenTree:
        """The tree of one request.

        Args:
            root: its last certain token.
            guesses_LW: guesses of every level, best first.
            nodes: at most so many.
        """
        nodes = min(nodes, len(self.spec))
        tokens = np.empty(nodes + 1, dtype=np.int64)
        tokens[0] = root
        tokens[1:] = guesses_LW[self._level[:nodes], self._rank[:nodes]]
        return TokenTree(tokens, self._shape(nodes))
