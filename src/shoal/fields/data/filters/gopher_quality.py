"""Gopher's rules of quality: is this document prose at all?

Source: Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
2021, appendix A.1.1.

Differs: words are what spaces separate, and those of signs alone do not count for the length of a
document or its mean word; bullet points are ``•`` and ``-``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

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
from shoal.fields.data.filters.statistics import QUALITY, quality
from shoal.ir import Estimate, Machine


@part
class GopherQuality:
    """Drop documents that are too short or too long, or are not made of words and sentences.

    Args:
        min_words: least words of a document.
        max_words: most words.
        min_mean_word: least mean characters of a word.
        max_mean_word: most.
        max_hashes: most ``#`` for each word.
        max_ellipses: most ``...`` or ``…`` for each word.
        max_bullet_lines: most of the lines, as a share, that begin with a bullet point.
        max_ellipsis_lines: most that end with an ellipsis.
        min_alpha_words: least of the words, as a share, that have a letter.
        min_stop_words: how many different ones of the, be, to, of, and, that, have, with.
    """

    reasons: ClassVar = (
        "too few words",
        "too many words",
        "words too short",
        "words too long",
        "too many hashes",
        "too many ellipses",
        "lines are bullet points",
        "lines end with an ellipsis",
        "words without a letter",
        "too few stop words",
    )

    min_words: Annotated[int, Ge(0)] = 50
    max_words: Annotated[int, Ge(1)] = 100_000
    min_mean_word: Annotated[float, Ge(0)] = 3.0
    max_mean_word: Annotated[float, Ge(1)] = 10.0
    max_hashes: Annotated[float, Ge(0)] = 0.1
    max_ellipses: Annotated[float, Ge(0)] = 0.1
    max_bullet_lines: Annotated[float, Ge(0), Le(1)] = 0.9
    max_ellipsis_lines: Annotated[float, Ge(0), Le(1)] = 0.3
    min_alpha_words: Annotated[float, Ge(0), Le(1)] = 0.8
    min_stop_words: Annotated[int, Ge(0), Le(8)] = 2

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text."""
        return filter_estimate(work, machine, 6e-10)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By counts of words and lines."""
        has = named(QUALITY, quality(batch.columns(), self.min_stop_words))
        words, lines = has["words"], has["lines"]
        mean = ratio(has["solid_chars"], has["solid_words"])
        rules = [
            has["solid_words"] < self.min_words,
            has["solid_words"] > self.max_words,
            mean < self.min_mean_word,
            mean > self.max_mean_word,
            ratio(has["hashes"], words) > self.max_hashes,
            ratio(has["ellipses"], words) > self.max_ellipses,
            ratio(has["bullet_lines"], lines) > self.max_bullet_lines,
            ratio(has["ellipsis_lines"], lines) > self.max_ellipsis_lines,
            ratio(has["alpha_words"], words) < self.min_alpha_words,
            has["stop_words"] < self.min_stop_words,
        ]
        return FilterVerdict(first_broken(len(words), rules))
