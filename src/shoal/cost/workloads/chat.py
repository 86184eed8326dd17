"""Chat: short questions and answers of very different lengths."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw
from shoal.cost.workloads.independent import Independent


@part
class Chat(Independent):
    """Independent questions: prompts of 400 tokens and answers of 120 in the median."""

    NAME: ClassVar = "chat"
    PROMPTS: ClassVar = LengthLaw(400, 1.1, 8, 2000)
    OUTPUTS: ClassVar = LengthLaw(120, 1.0, 4, 800)
