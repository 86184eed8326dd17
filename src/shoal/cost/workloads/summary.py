"""Summaries: long documents in, short texts out."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw
from shoal.cost.workloads.independent import Independent


@part
class SummaryWorkload(Independent):
    """Independent documents of 6000 tokens in the median, summaries of 150."""

    traits: ClassVar[frozenset[str]] = frozenset({"quotes_prompts"})
    NAME: ClassVar = "summary"
    PROMPTS: ClassVar = LengthLaw(6000, 0.5, 64, 60000)
    OUTPUTS: ClassVar = LengthLaw(150, 0.6, 8, 2000)
