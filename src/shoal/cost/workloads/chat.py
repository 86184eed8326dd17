"""Chat: short questions and answers of very different lengths."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw
from shoal.cost.workloads.independent import Independent


@part
class Chat(Independent):
    """Independent questions; median lengths: prompt 400 tokens, output 120 tokens."""

    NAME: ClassVar = "chat"
    PROMPTS: ClassVar = LengthLaw(400, 1.1, 8, 2000)
    OUTPUTS: ClassVar = LengthLaw(120, 1.0, 4, 800)
