"""What locators are given and what they say."""

from __future__ import annotations

from typing import Literal, Protocol

from shoal.core.config import Value
from shoal.train.watch.evidence import Evidence

FaultKind = Literal[
    "communication_hang", "non_communication_hang", "communication_slow", "non_communication_slow"
]
"""Did it stop or slow down, and inside of communication or outside of it?"""

Place = Literal["rank", "link", "sender", "receiver", "communicator"]
"""A whole rank; the way from one rank to another; what a rank sends with, what it receives
with; or some ranks of a communicator that the records cannot distinguish."""


class Fault(Value):
    """One fault that was found.

    Args:
        kind: the syndrome.
        place: what the fault lies in.
        ranks: the rank; of a link, source and target; of a communicator, its suspects.
        communicator: where it was seen: the ranks, as text.
        op: the operation in which it was seen.
        seq: number of that operation.
        score: robust z of the deviation; 0 for a hang.
        ratio: how many times slower than usual; 0 for a hang.
        seconds: waiting that it has caused, or how long the hang lasts.
        phase: what the rank computes where it hangs or is slow: forward, backward, load, update,
            checkpoint or evaluate; empty where that is unknown.
        text: a sentence for people.
    """

    kind: FaultKind
    place: Place
    ranks: tuple[int, ...]
    communicator: str = ""
    op: str = ""
    seq: int = 0
    score: float = 0.0
    ratio: float = 0.0
    seconds: float = 0.0
    phase: str = ""
    text: str = ""


class FaultVerdict(Value):
    """What a locator says of a run.

    Args:
        faults: the worst first; none if all is well.
        notes: what could not be decided, and why.
    """

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


class FaultLocator(Protocol):
    """A part of kind ``locator``: finds faults in the records of all ranks, and in nothing else."""

    def locate(self, evidence: Evidence) -> FaultVerdict:
        """Name what hangs or is slow."""
