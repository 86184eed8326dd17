"""Spell: the template with which a line has the longest common subsequence.

Source: Du, Li, Spell: Streaming Parsing of System Event Logs, 2016. A line joins the template that
shares most of its tokens in order, if that is at least ``share`` of them; what they do not share
becomes ``<*>``.

Differs: candidates are first bounded by how many tokens they share in any order, in the place of
the paper's prefix tree and inverted index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.data.logs.protocols import LogWork, Longs
from shoal.fields.data.logs.templates import DistinctLines
from shoal.ir import Estimate, Interval, Machine

# Templates with which a line is compared token by token, about.
_COMPARED = 3.0
_LINE_BYTES = 400.0


@part
class SpellParser:
    """Spell: lines of different lengths can be of one template.

    Args:
        share: of a line's tokens that it must have in common with a template.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.5

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """A table of tokens against tokens for some templates, for each distinct line."""
        lines = work.lines * work.distinct
        seconds = lines * _COMPARED * work.tokens**2 * work.rates.python_s
        return Estimate(
            step_s=Interval.around(seconds, 2 * work.rates.spread),
            terms_s={"subsequences": seconds},
            memory_bytes={"distinct lines": lines * _LINE_BYTES},
        )

    def accuracy(self) -> Interval:
        """0.75 over sixteen systems; 0.46 of the worst."""
        return Interval(value=0.751, low=0.46, high=1.0)

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
        templates: list[list[bytes]] = []
        bags: list[Counter[bytes]] = []
        groups = []
        for tokens in lines:
            constant = [token for token in tokens if token != b"<*>"]
            least, bag = self.share * len(constant), Counter(constant)
            best, most = -1, max(least, 0.5) - 1e-9
            for at, known in enumerate(bags):
                if (bag & known).total() <= most:
                    continue
                length = len(common(constant, [one for one in templates[at] if one != b"<*>"]))
                if length > most or (
                    length == most and best >= 0 and len(templates[at]) < len(templates[best])
                ):
                    best, most = at, length
            if best < 0:
                best = len(templates)
                templates.append(tokens)
                bags.append(bag)
            elif templates[best] != tokens:
                templates[best] = merged(templates[best], tokens)
                bags[best] = Counter(one for one in templates[best] if one != b"<*>")
            groups.append(best)
        return [b" ".join(templates[group]) for group in groups]


def common(a: Sequence[bytes], b: Sequence[bytes]) -> list[bytes]:
    """The longest common subsequence of two lists of tokens."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        row, above = table[i + 1], table[i]
        for j, other in enumerate(b):
            row[j + 1] = above[j] + 1 if one == other else max(above[j + 1], row[j])
    result: list[bytes] = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            result.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] >= table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return result[::-1]


def merged(template: Sequence[bytes], tokens: Sequence[bytes]) -> list[bytes]:
    """What both have in common, ``<*>`` between that for what only one of them has."""
    kept = common(
        [one for one in template if one != b"<*>"], [one for one in tokens if one != b"<*>"]
    )
    result: list[bytes] = []
    i = j = 0
    for token in [*kept, None]:
        begin = i, j
        i = len(template) if token is None else template.index(token, i)
        j = len(tokens) if token is None else tokens.index(token, j)
        if (i, j) != begin:
            result.append(b"<*>")
        if token is not None:
            result.append(token)
            i, j = i + 1, j + 1
    return result
