"""What rules share: the walk down a tree by tokens that are already chosen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.ir import Request
from shoal.serve.decode.protocols import Path, TokenTree
from shoal.serve.engine.sampler import pick_tokens


def rows_of(trees: Sequence[TokenTree]) -> list[slice]:
    """Where the rows of each tree lie, one tree after the other."""
    rows, first = [], 0
    for tree in trees:
        rows.append(slice(first, first + len(tree.shape)))
        first += len(tree.shape)
    return rows


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


def greedy_paths(
    trees: Sequence[TokenTree], requests: Sequence[Request], logits_NV: Tensor
) -> list[Path | None]:
    """The path of the best tokens for each greedy request; None for those that sample."""
    greedy_paths: list[Path | None] = [None] * len(trees)
    rows = rows_of(trees)
    greedy = [at for at, one in enumerate(requests) if one.params.temperature == 0]
    if greedy:
        which = [row for at in greedy for row in range(rows[at].start, rows[at].stop)]
        scores = logits_NV if len(which) == len(logits_NV) else logits_NV[which]
        chosen = pick_tokens(scores, [requests[at] for at in greedy for _ in trees[at].tokens])
        first = 0
        for at in greedy:
            stop = first + len(trees[at].tokens)
            greedy_paths[at] = descend(trees[at], chosen[first:stop])
            first = stop
    return greedy_paths
