"""Drain: a tree of fixed depth, then the most similar group of its leaf.

Source: He et al., Drain: An Online Log Parsing Approach with Fixed Depth Tree, 2017. A line goes by
its number of tokens and its first tokens to a leaf; tokens with digits, and what is more than
``max_children``, go to ``<*>``. It joins the group with the largest share of equal tokens, if that
is at least ``similarity``, and tokens that differ become ``<*>``.

Differs: lines with fewer tokens than the tree routes have a leaf too, as in the package drain3; the
authors' program makes a group of each. Results of the search are cached for lines that return, for
as long as nothing has changed among lines of their length, so each line has the group that it would
have without a cache. A token that a template does not know is not stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Self

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.logs.formats import GENERAL
from shoal.fields.data.logs.native import TemplateTree
from shoal.fields.data.logs.protocols import Ints, LogWork, MinedTemplates
from shoal.fields.data.logs.templates import parsed_table, unified
from shoal.ir import Estimate, Interval, Machine

# Of a tree: tokens, nodes and groups of a template, about.
_TEMPLATE_BYTES, _TEMPLATES = 4e3, 1e3
# Root, length and leaf take no token.
_LEVELS = 3


@part
class DrainParser:
    """Drain, in compiled code; also line by line without an end.

    Args:
        depth: of the tree; 4 goes by the first token, 5 by two. None for the format's own, or 4.
        similarity: share of equal tokens from which a line joins a group. None for the format's
            own, or 0.4.
        max_children: of a node.
        merge_runs: count masked tokens in a row as one, so that lists of any length are of one
            template.
    """

    depth: Annotated[int, Ge(3), Le(32)] | None = None
    similarity: Annotated[float, Ge(0), Le(1)] | None = None
    max_children: Annotated[int, Ge(2)] = 100
    merge_runs: bool = True

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """One look at each line."""
        seconds = work.lines * work.rates.tree_s
        return Estimate(
            step_s=Interval.around(seconds, work.rates.spread),
            terms_s={"tree": seconds},
            memory_bytes={"templates": _TEMPLATES * _TEMPLATE_BYTES},
        )

    def accuracy(self) -> Interval:
        """0.87 over sixteen systems; 0.53 of the worst."""
        return Interval(value=0.865, low=0.53, high=1.0)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def suited(self, depth: int, similarity: float) -> Self:
        """With a format's settings where none were given."""
        return dataclasses.replace(
            self,
            depth=depth if self.depth is None else self.depth,
            similarity=similarity if self.similarity is None else self.similarity,
        )

    def open(self) -> DrainMiner:
        """A tree without a template."""
        return DrainMiner(self)

    def parse(self, lines: Iterable[bytes | str], masks: Sequence[str] = GENERAL) -> Any:
        """Parse lines without headers.

        Args:
            lines: text or bytes.
            masks: regular expressions of RE2, replaced by ``<*>`` before.

        Returns:
            Arrow table with a row for each line: ``template_id`` int32, ``template`` text,
            ``parameters`` list of text.

        Raises:
            ConfigError: a mask cannot be read.
            DataError: a line is neither text nor bytes.
        """
        return parsed_table(self, list(lines), masks)


class DrainMiner:
    """The tree of one log.

    Args:
        options: of the parser.
    """

    def __init__(self, options: DrainParser) -> None:
        self._tree = TemplateTree(
            (4 if options.depth is None else options.depth) - _LEVELS,
            0.4 if options.similarity is None else options.similarity,
            options.max_children,
            runs=options.merge_runs,
        )

    def add(self, masked: Any) -> Ints:
        """The group of each line."""
        return self._tree.add(masked)

    def finish(self) -> MinedTemplates:
        """Groups whose templates have become one and the same are one."""
        return unified(self._tree.templates())
