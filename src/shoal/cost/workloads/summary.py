"""Summaries: long documents in, short texts out."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw
from shoal.cost.workloads.independent import Independent


@part
class SummaryWorkload(Independent):
    """Independent documents to summarize; median lengths: prompt 6000 tokens, output 150 tokens."""

    traits: ClassVar[frozenset[str]] = frozenset({"quotes_prompts"})
    NAME: ClassVar = "summary"
    PROMPTS: ClassVar = LengthLaw(6000, 0.5, 64, 60000)
    OUTPUTS: ClassVar = LengthLaw(150, 0.6, 8, 2000)
