"""FineWeb's own rules: lists, menus and lines that are repeated.

Source: Penedo et al., The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale,
2024, section 3.6.

Differs: marks that end a line are those of several scripts, and words are what spaces separate.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict, first_broken, ratio
from shoal.ir import Estimate, Machine


@part
class FineWeb:
    """Drop documents of lines that are short, repeated, or do not end like sentences.

    Args:
        min_terminal_lines: least of the lines, as a share, that end with a terminal mark.
        max_brief_lines: most of the lines, as a share, that are brief.
        brief: most characters of a brief line.
        max_repeated_chars: most of the characters, as a share, that are in repeated lines.
        max_lines_per_word: most line feeds for each word.
    """

    reasons: ClassVar = (
        "empty",
        "lines without a terminal mark",
        "brief lines",
        "characters in repeated lines",
        "a list",
    )

    min_terminal_lines: Annotated[float, Ge(0), Le(1)] = 0.12
    max_brief_lines: Annotated[float, Ge(0), Le(1)] = 0.67
    brief: Annotated[int, Ge(0)] = 30
    max_repeated_chars: Annotated[float, Ge(0), Le(1)] = 0.01
    max_lines_per_word: Annotated[float, Ge(0)] = 0.3

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text."""
        return filter_estimate(work, machine, 2e-9)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By counts of lines."""
        has = batch.counts(self.brief)
        lines = has["full_lines"]
        rules = [
            lines == 0,
            ratio(has["terminal_lines"], lines) < self.min_terminal_lines,
            ratio(has["brief_lines"], lines) > self.max_brief_lines,
            ratio(has["repeated_line_chars"], has["chars"] - has["feeds"])
            > self.max_repeated_chars,
            ratio(has["feeds"], has["words"]) > self.max_lines_per_word,
        ]
        return FilterVerdict(first_broken(len(lines), rules))
