"""Draining: whether a server admits requests, and how many are under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DrainState:
    """Whether requests are admitted, and how many are under way.

    Args:
        closed: the server drains: requests under way end, and others get 503.
        inside: requests that were admitted and have not ended.
    """

    closed: bool = False
    inside: int = 0
