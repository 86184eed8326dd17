"""What malicious clients send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import LocalJob


@dataclass(frozen=True, kw_only=True, eq=False)
class Coalition:
    """What a malicious client knows: malicious clients are in one process, and collude.

    Args:
        seed: of the run.
        clients: of the federation, malicious ones included.
        learned: what all malicious clients learn from the model of the job at hand, float32 [F, P];
            it is learned when it is asked for.
    """

    seed: int
    clients: int
    learned: Callable[[], np.ndarray]


@runtime_checkable
class Attack(Protocol):
    """What a malicious client learns from, and what it sends in the place of its update.

    A part that inherits from this class writes only the method that it changes.
    """

    def examples(self, examples: Examples) -> Examples:
        """What the client learns from; ``examples`` is what it has."""
        return examples

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """The change float32 [P] that the client claims.

        Args:
            delta: what it has learned, float32 [P].
            job: that it answers.
            coalition: what it knows of the run and of the other malicious clients.
        """
        return delta
