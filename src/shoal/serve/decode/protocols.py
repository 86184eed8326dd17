"""What the ways to decode promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

__all__ = ["DecodePart"]


class DecodePart(Protocol):
    """A part of kind ``decode``."""

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that cannot be decoded in this way.

        Raises:
            ServeError: names the way that can.
        """
        ...
