"""What rules share: the walk down a tree by tokens that are already chosen."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.serve.decode.protocols import Path, TokenTree

__all__ = ["descend", "rows_of"]


def rows_of(trees: Sequence[TokenTree]) -> list[slice]:
    """Where the rows of each tree lie, one tree after the other."""
    found, first = [], 0
    for tree in trees:
        found.append(slice(first, first + len(tree.shape)))
        first += len(tree.shape)
    return found


def descend(tree: TokenTree, chosen: Sequence[int]) -> Path:
    """From the root on to the child that is the chosen token, as long as there is one.

    Args:
        tree: the guesses.
        chosen: what comes after each row.
    """
    guessed = tree.tokens
    row, tokens = 0, [chosen[0]]
    rows: list[int] = []
    while True:
        for child in tree.shape.children[row]:
            if guessed[child] == tokens[-1]:
                break
        else:
            return Path(tuple(rows), tuple(tokens))
        row = child
        rows.append(row)
        tokens.append(chosen[row])
