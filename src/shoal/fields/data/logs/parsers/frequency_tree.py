"""Frequency tree: words from the most frequent down; where a node has too many children, it ends.

Source: Zhang et al., Syslog Processing for Switch Failure Diagnosis and Prediction in Datacenter
Networks, 2017 (FT-tree). Each line is a path of its words, the most frequent of the log first. A
node with more than ``max_children`` children has words of parameters below it, and they are cut
off; what is left of a line's path are the words of its template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.logs.protocols import LogWork, Longs
from shoal.fields.data.logs.templates import DistinctLines
from shoal.ir import Estimate, Interval, Machine

_LOOKS = 5.0
_LINE_BYTES = 1500.0


@part
class FrequencyTree:
    """FT-tree: quick, without a threshold of similarity; needs all lines before it begins.

    Args:
        max_children: of a node; with more, what is below it are parameters.
    """

    max_children: Annotated[int, Ge(1)] = 8

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Each distinct line sorted, and walked down the tree twice."""
        lines = work.lines * work.distinct
        seconds = lines * _LOOKS * work.tokens * work.rates.python_s
        return Estimate(
            step_s=Interval.around(seconds, 2 * work.rates.spread),
            terms_s={"paths": seconds},
            memory_bytes={"distinct lines": lines * _LINE_BYTES},
        )

    def accuracy(self) -> Interval:
        """No published number on these systems: that of a parser by word frequency (LFA)."""
        return Interval(value=0.652, low=0.17, high=1.0)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def suited(self, depth: int, similarity: float) -> Self:
        """As it is."""
        return self

    def open(self) -> DistinctLines:
        """Begin a log."""
        return DistinctLines(self._found)

    def _found(self, lines: list[list[bytes]], counts: Longs) -> list[bytes]:
        frequency: Counter[bytes] = Counter()
        for tokens, count in zip(lines, counts.tolist(), strict=True):
            for token in set(tokens):
                frequency[token] += count
        root: dict[bytes, Any] = {}
        paths = []
        for tokens in lines:
            words = sorted(set(tokens) - {b"<*>"}, key=lambda word: (-frequency[word], word))
            paths.append(words)
            node = root
            for word in words:
                node = node.setdefault(word, {})
        result = []
        for tokens, words in zip(lines, paths, strict=True):
            kept: set[bytes] = set()
            node = root
            for word in words:
                if len(node) > self.max_children and node is not root:
                    break
                kept.add(word)
                node = node[word]
            result.append(b" ".join(token if token in kept else b"<*>" for token in tokens))
        return result
