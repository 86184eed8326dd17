"""C4's rules: keep the lines that are sentences, and the documents with enough of them.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer, 2020, section 2.2; citations, policies and long words are in its code only.

Differs: no list of bad words; a sentence ends with ``.``, ``?`` or ``!`` before a space, by rule
and not by a learned splitter.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters import statistics
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict
from shoal.ir import Estimate, Machine

_LINES = ("long words", "no terminal mark", "too few words", "javascript", "policies")


@part
class CleanCrawl:
    """Remove lines that are not sentences, then documents with few of them or with code.

    Args:
        min_words: least words of a line.
        max_word: most characters of a word; a line with a longer one is removed.
        min_sentences: least sentences of a document.
        terminal: remove lines that do not end with ``.``, ``?``, ``!`` or a quote, or end with
            ``...``.
        javascript: remove lines with the word.
        curly: drop documents with ``{`` in a line that is kept.
        lorem: drop documents with ``lorem ipsum``.
        policy: remove lines about cookies, privacy policies and terms of use.
        citations: remove ``[1]``, ``[edit]`` and ``[citation needed]``.
    """

    reasons: ClassVar = ("lorem ipsum", "curly bracket", "too few sentences")

    min_words: Annotated[int, Ge(0)] = 3
    max_word: Annotated[int, Ge(1)] = 1000
    min_sentences: Annotated[int, Ge(0)] = 5
    terminal: bool = True
    javascript: bool = True
    curly: bool = True
    lorem: bool = True
    policy: bool = True
    citations: bool = True

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text, which is copied."""
        return filter_estimate(work, machine, 1e-9)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """Line by line."""
        verdicts, texts, lines = statistics.c4(
            batch.columns(),
            (
                self.min_words,
                self.max_word,
                self.min_sentences,
                self.terminal,
                self.javascript,
                self.curly,
                self.lorem,
                self.policy,
                self.citations,
            ),
        )
        removed = {
            f"lines removed: {why}": count
            for why, count in zip(_LINES, lines.tolist(), strict=True)
            if count
        }
        return FilterVerdict(verdicts.astype(np.int64), texts, removed)
