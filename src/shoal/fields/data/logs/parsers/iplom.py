"""IPLoM: lines are parted by length, by the position with the fewest words, and by pairs of words.

Source: Makanju, Zincir-Heywood, Milios, Clustering Event Logs Using Iterative Partitioning, 2009.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Annotated, Self, TypeAlias

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.logs.protocols import LogWork, Longs
from shoal.fields.data.logs.templates import DistinctLines
from shoal.ir import Estimate, Interval, Machine

# Looks at each token: two partitions, and the template.
_LOOKS = 8.0
_LINE_BYTES = 400.0

_Rows: TypeAlias = list[int]


@part
class IPLoM:
    """IPLoM: no similarity, only partitions; needs all lines before it begins.

    Args:
        goodness: share of constant positions above which a partition is not parted further.
        lower: the many words that go with one hold constants, if they are at most this share of
            its lines.
    """

    goodness: Annotated[float, Ge(0), Le(1)] = 0.35
    lower: Annotated[float, Ge(0), Le(1)] = 0.25

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Some looks at each token of the distinct lines."""
        lines = work.lines * work.distinct
        seconds = lines * _LOOKS * work.tokens * work.rates.python_s
        return Estimate(
            step_s=Interval.around(seconds, 2 * work.rates.spread),
            terms_s={"partitions": seconds},
            memory_bytes={"distinct lines": lines * _LINE_BYTES},
        )

    def accuracy(self) -> Interval:
        """0.78 over sixteen systems; 0.34 of the worst."""
        return Interval(value=0.777, low=0.34, high=1.0)

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
        lengths: dict[int, _Rows] = defaultdict(list)
        for row, tokens in enumerate(lines):
            lengths[len(tokens)].append(row)
        result = [b""] * len(lines)
        for length, rows in lengths.items():
            if not length:
                continue
            for partition in _by_position(lines, rows, length):
                for group in self._by_pairs(lines, counts, partition, length):
                    words = [{lines[row][at] for row in group} for at in range(length)]
                    text = b" ".join(one.pop() if len(one) == 1 else b"<*>" for one in words)
                    for row in group:
                        result[row] = text
        return result

    def _by_pairs(
        self, lines: list[list[bytes]], counts: Longs, rows: _Rows, length: int
    ) -> Iterator[_Rows]:
        """Part by how the words of two positions go together."""
        sizes = [len({lines[row][at] for row in rows}) for at in range(length)]
        several = Counter(size for size in sizes if size > 1)
        if sizes.count(1) > self.goodness * length or not several or length < 2:
            yield rows
            return
        # The two first positions with the number of words that occurs most often.
        frequent = max(several, key=lambda size: (several[size], -size))
        places = [at for at, size in enumerate(sizes) if size == frequent]
        if len(places) < 2:
            places += [at for at, size in enumerate(sizes) if size > 1 and at not in places]
        if len(places) < 2:
            yield rows
            return
        first, second = sorted(places[:2])
        forth: dict[bytes, set[bytes]] = defaultdict(set)
        back: dict[bytes, set[bytes]] = defaultdict(set)
        for row in rows:
            forth[lines[row][first]].add(lines[row][second])
            back[lines[row][second]].add(lines[row][first])
        groups: dict[tuple[int, bytes], _Rows] = defaultdict(list)
        weight: Counter[tuple[int, bytes]] = Counter()
        for row in rows:
            a, b = lines[row][first], lines[row][second]
            weight[0, a] += int(counts[row])
            weight[1, b] += int(counts[row])
        for row in rows:
            a, b = lines[row][first], lines[row][second]
            if len(forth[a]) == 1 and len(back[b]) == 1:
                key = 0, a
            elif len(forth[a]) > 1 and all(len(back[other]) == 1 for other in forth[a]):
                key = (1, b) if self._constants(len(forth[a]), weight[0, a]) else (0, a)
            elif len(back[b]) > 1 and all(len(forth[other]) == 1 for other in back[b]):
                key = (0, a) if self._constants(len(back[b]), weight[1, b]) else (1, b)
            else:
                key = 2, b""  # many to many: they stay together
            groups[key].append(row)
        yield from groups.values()

    def _constants(self, words: int, lines: int) -> bool:
        """Whether the many words of a side are constants of many templates."""
        return words / max(lines, 1) <= self.lower


def _by_position(lines: list[list[bytes]], rows: _Rows, length: int) -> Iterator[_Rows]:
    """Part by the words of the position that has the fewest."""
    sizes = [len({lines[row][at] for row in rows}) for at in range(length)]
    place = min(range(length), key=lambda at: (sizes[at], at))
    groups: dict[bytes, _Rows] = defaultdict(list)
    for row in rows:
        groups[lines[row][place]].append(row)
    yield from groups.values()
