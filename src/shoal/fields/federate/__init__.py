"""federate: one model from the data of many clients, which stays where it is.

Start reading at ``protocols.py``, then ``coordinator.py``, ``virtual.py`` and ``wire/server.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["join"]


def join(
    url: str,
    *,
    name: str,
    key: str,
    x: np.ndarray,
    y: np.ndarray,
    learner: str | dict[str, Any],
    cafile: str = "",
) -> None:
    """Take part in a federation from this machine, with examples that stay here, until it ends.

    Args:
        url: of the server, such as ``https://server:8443``.
        name: of this client, as in the server's file of keys.
        key: of this client.
        x: examples, float32 [N, ...] or int64 [N, T].
        y: labels, int64 [N] or [N, T].
        learner: the model that is trained; a federation that trains another one is refused.
        cafile: certificates, PEM, by which the server's is held; those of the system without it.

    Raises:
        FederationError: the server refuses, is not reached, or learns from other examples.
    """
    from shoal.core.parts import Choice
    from shoal.fields.federate.wire.joining import join as join_now

    chosen = Choice.model_validate(learner)
    join_now(url, name=name, key=key, x=x, y=y, learner=chosen, cafile=cafile)
