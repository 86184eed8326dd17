"""The door of a server: whether requests are let in, and how many are inside."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Door"]


@dataclass
class Door:
    """Whether requests are let in, and how many are inside.

    Args:
        closed: the server drains: those inside end, and others get 503.
        inside: requests that were let in and have not ended.
    """

    closed: bool = False
    inside: int = 0
