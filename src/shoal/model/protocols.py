"""What a family is: the correspondence between one Hugging Face architecture and ours.

A family keeps no state and needs no torch. It is called when a directory is read or
written, and when fresh weights are drawn: their streams are keyed by the stored names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from shoal.model.config import ModelConfig
from shoal.model.families.common import Names

__all__ = ["Family"]


@runtime_checkable
class Family(Protocol):
    """One architecture of Hugging Face.

    Reading what was written gives the same configuration, but for its name.
    """

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        ...

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes; ``where`` names it in errors.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        ...

    def names(self, config: ModelConfig) -> Names:
        """Our parameter -> the stored tensors that make it up, in memory order."""
        ...
