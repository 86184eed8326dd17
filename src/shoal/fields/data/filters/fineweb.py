"""FineWeb's own rules: lists, menus and lines that are repeated.

Source: Penedo et al., The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale,
2024, section 3.6.

Differs: marks that end a line are those of several scripts, and words are what spaces separate.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import (
    FilterBatch,
    FilterVerdict,
    first_broken,
    named,
    ratio,
)
from shoal.fields.data.filters.statistics import LINES, lines, repeated_lines
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
        return filter_estimate(work, machine, 8e-10)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By counts of lines."""
        has = named(LINES, lines(batch.columns(), self.brief))
        full = has["full_lines"]
        rules = [
            full == 0,
            ratio(has["terminal_lines"], full) < self.min_terminal_lines,
            ratio(has["brief_lines"], full) > self.max_brief_lines,
        ]
        # Lines are compared only where that can decide, and until it is decided.
        chars = has["chars"] - has["feeds"]
        enough = (self.max_repeated_chars * chars).astype(np.int64) + 1
        within = batch.columns(first_broken(len(full), rules) < 0)
        rules += [
            ratio(repeated_lines(within, enough), chars) > self.max_repeated_chars,
            ratio(has["feeds"], has["words"]) > self.max_lines_per_word,
        ]
        return FilterVerdict(first_broken(len(full), rules))
