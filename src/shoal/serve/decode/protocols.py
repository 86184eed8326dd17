"""What ways to decode promise."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["DecodePart"]


@runtime_checkable
class DecodePart(Protocol):
    """A part of kind ``decode``."""

    def factory(self) -> str | None:
        """``module:function`` that builds the engine of a job that decodes so.

        Returns:
            None: it is built as the rest of the job says.
        """
        ...
