"""One token after the other, each request on its own: what every other engine does."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part

__all__ = ["Autoregressive"]


@part
class Autoregressive:
    """A step gives every request its next token."""

    factory: ClassVar[str | None] = None
