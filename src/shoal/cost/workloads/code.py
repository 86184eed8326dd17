"""Code completion: prompts of similar length, short outputs."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw
from shoal.cost.workloads.independent import Independent


@part
class Code(Independent):
    """Independent code completions; median lengths: prompt 165 tokens, output 55 tokens."""

    traits: ClassVar[frozenset[str]] = frozenset({"quotes_prompts"})
    NAME: ClassVar = "code"
    PROMPTS: ClassVar = LengthLaw(165, 0.45, 30, 600)
    OUTPUTS: ClassVar = LengthLaw(55, 0.7, 8, 400)
