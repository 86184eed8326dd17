"""Length: documents that are too short or too long, whatever they say."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict, first_broken
from shoal.fields.data.filters.statistics import sizes
from shoal.ir import Estimate, Machine


@part
class TextLength:
    """Drop documents by their characters and words.

    Args:
        min_chars: least characters.
        max_chars: most characters.
        min_words: least words, as spaces separate them.
        max_words: most words.
    """

    reasons: ClassVar = (
        "too few characters",
        "too many characters",
        "too few words",
        "too many words",
    )

    min_chars: Annotated[int, Ge(0)] = 200
    max_chars: Annotated[int, Ge(1)] = 1_000_000
    min_words: Annotated[int, Ge(0)] = 0
    max_words: Annotated[int, Ge(1)] = 10_000_000

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text."""
        return filter_estimate(work, machine, 2e-10)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By counts."""
        chars, words = sizes(batch.columns()).T
        rules = [
            chars < self.min_chars,
            chars > self.max_chars,
            words < self.min_words,
            words > self.max_words,
        ]
        return FilterVerdict(first_broken(len(chars), rules))
