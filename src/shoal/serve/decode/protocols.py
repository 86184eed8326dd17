"""What ways to decode promise."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

__all__ = ["DecodePart"]


@runtime_checkable
class DecodePart(Protocol):
    """A part of kind ``decode``.

    Attributes:
        factory: ``module:function`` that builds the engine of a job that decodes so; None for
            the engine of any other job.
    """

    factory: ClassVar[str | None]
