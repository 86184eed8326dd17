"""Which replicas have seen which beginnings of prompts: a bounded table of chained hashes.

The hash of a block is that of the block before it and of its own characters or tokens, so
that it stands for everything up to its end. This is how the caches themselves name what is
in them (Kwon et al., PagedAttention, 2023), but no replica is asked here: a replica is taken to
have what was sent to it, until the table forgets it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def chain(prompt: str | Sequence[int], size: int, most: int, *, salt: str = "") -> list[int]:
    """Hashes of the whole blocks at the beginning of a prompt.

    Args:
        prompt: text, or tokens.
        size: characters or tokens of a block.
        most: blocks to look at.
        salt: prompts are alike only where it is the same.
    """
    parent = hash((salt, isinstance(prompt, str)))
    results = []
    for end in range(size, min(len(prompt), size * most) + 1, size):
        block = prompt[end - size : end]
        parent = hash((parent, block if isinstance(block, str) else tuple(block)))
        results.append(parent)
    return results


class Prefixes:
    """LRU cache: block hash -> replicas to which the block was sent.

    Args:
        entries: largest number of blocks to remember.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._seen: OrderedDict[int, int] = OrderedDict()  # sets of replicas, as bits

    def __len__(self) -> int:
        return len(self._seen)

    def matches(self, blocks: Sequence[int], replicas: Sequence[int]) -> dict[int, int]:
        """How many of the first blocks each replica has seen."""
        left = sum(1 << replica for replica in replicas)
        matches = dict.fromkeys(replicas, 0)
        for block in blocks:
            left &= self._seen.get(block, 0)
            if not left:
                break
            for replica in replicas:
                matches[replica] += left >> replica & 1
        return matches

    def add(self, blocks: Sequence[int], replica: int) -> None:
        """A replica was sent these blocks."""
        # The last first: the beginnings, which more prompts share, are forgotten last.
        for block in reversed(blocks):
            self._seen[block] = self._seen.pop(block, 0) | 1 << replica
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)

    def forget(self, replica: int) -> None:
        """A replica has nothing any more."""
        for block, replicas in list(self._seen.items()):
            rest = replicas & ~(1 << replica)
            if rest:
                self._seen[block] = rest
            else:
                del self._seen[block]
