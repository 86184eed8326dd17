"""What becomes of unexpected exceptions: one request ends, with these words."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core.errors import ServeError
from shoal.ir import Chunk

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shoal.serve")


class RequestFailedError(ServeError):
    """A request that is in order and that the engine failed on."""


class EngineDownError(ServeError):
    """The engine is starting, has died or hangs.

    Args:
        message: what happened.
        retry_after_s: s after which to try again.
        met: names the death, where it died while it answered this request.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0, *, met: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.met = met


class RefusedError(ServeError):
    """A request that the engine can never run."""


class SlowReaderError(ServeError):
    """A stream whose reader does not keep up; its request was aborted."""


# Kind of an engine's message that ends a request -> the error.
ENDS: dict[str, type[ServeError]] = {"refused": RefusedError, "error": RequestFailedError}


def failure(cause: BaseException) -> str:
    """The message to a client about such an exception; the log of the server has the rest."""
    return f"the engine failed on this request ({type(cause).__name__}: {cause})"


def errors_of_step(
    chunks: Sequence[Chunk], cause: Exception, device: torch.device
) -> dict[str, str]:
    """The end of all requests of a step that raised; the engine goes on where its device works.

    Args:
        chunks: of the step.
        cause: what it raised.
        device: that it was computed on.

    Returns:
        Identity of the request -> the message to its client.

    Raises:
        RuntimeError: the device is lost.
    """
    log.exception("a step of %d requests failed", len(chunks), exc_info=cause)
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return dict.fromkeys((chunk.request.id for chunk in chunks), failure(cause))
