"""Gopher's rules of repetition: does a document say the same again and again?

Source: Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
2021, appendix A.1.1, table A1.

Differs: words are what spaces separate; characters of an n-gram that is repeated are those of its
words, those of the most frequent n-gram count the spaces between them too.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le, Len

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
from shoal.fields.data.filters.statistics import REPEATS, repeats
from shoal.ir import Estimate, Machine

_Share = Annotated[float, Ge(0), Le(1)]


@part
class GopherRepetition:
    """Drop documents whose lines, paragraphs or runs of words are repeated.

    Args:
        max_lines: most of the lines, as a share, that came before.
        max_paragraphs: most of the paragraphs.
        max_line_chars: most of the characters that are in such lines.
        max_paragraph_chars: most that are in such paragraphs.
        max_top_grams: most of the characters that are in the most frequent 2-, 3- and 4-gram.
        max_repeated_grams: most that are in repeated 5-, 6-, 7-, 8-, 9- and 10-grams.
    """

    reasons: ClassVar = (
        "repeated paragraphs",
        "characters in repeated paragraphs",
        "repeated lines",
        "characters in repeated lines",
        *(f"one {n}-gram is most of it" for n in range(2, 5)),
        *(f"repeated {n}-grams" for n in range(5, 11)),
    )

    max_lines: _Share = 0.30
    max_paragraphs: _Share = 0.30
    max_line_chars: _Share = 0.20
    max_paragraph_chars: _Share = 0.20
    max_top_grams: Annotated[tuple[_Share, ...], Len(3, 3)] = (0.20, 0.18, 0.16)
    max_repeated_grams: Annotated[tuple[_Share, ...], Len(6, 6)] = (
        0.15,
        0.14,
        0.13,
        0.12,
        0.11,
        0.10,
    )

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text, and a look-up for each word."""
        return filter_estimate(work, machine, 1.6e-9)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By what is repeated."""
        limits = (
            self.max_paragraphs,
            self.max_paragraph_chars,
            self.max_lines,
            self.max_line_chars,
            *self.max_top_grams,
            *self.max_repeated_grams,
        )
        has = named(REPEATS, repeats(batch.columns(), limits))
        chars = has["chars"]
        shares = [
            ratio(has["repeated_paragraphs"], has["paragraphs"]),
            ratio(has["repeated_paragraph_chars"], chars),
            ratio(has["repeated_lines"], has["lines"]),
            ratio(has["repeated_line_chars"], chars),
            *(ratio(has[name], chars) for name in REPEATS[-9:]),
        ]
        rules = [share > most for share, most in zip(shares, limits, strict=True)]
        return FilterVerdict(first_broken(len(chars), rules))
