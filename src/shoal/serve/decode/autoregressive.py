"""One token after the other, each request on its own: what every other engine does."""

from __future__ import annotations

from shoal.core.parts import part

__all__ = ["Autoregressive"]


@part
class Autoregressive:
    """A step gives every request its next token."""

    def factory(self) -> str | None:
        """See :class:`~shoal.serve.decode.protocols.DecodePart`."""
        return None
