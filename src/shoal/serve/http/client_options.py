"""How patient the HTTP process is with its engine."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import ServeError, require


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How patient the client is.

    Args:
        start_s: s that the engine may take to load its model.
        ping_s: s between two questions whether it is alive.
        hang_s: s without an answer, or within one step, after which it is killed.
        backoff_s: s before the first restart; twice as long after each failure in a row.
        max_backoff_s: longest wait before a restart.
        max_queued: outputs that a stream keeps for its reader before it is aborted.
    """

    start_s: float = 600.0
    ping_s: float = 1.0
    hang_s: float = 120.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_queued: int = 1024

    def __post_init__(self) -> None:
        for name in ("start_s", "ping_s", "hang_s", "backoff_s", "max_backoff_s", "max_queued"):
            value = getattr(self, name)
            require(value > 0, f"engine.{name}", value, expected="more than 0", error=ServeError)
