"""checkpoint: state that survives: saved in pieces, checksummed, loaded in any other split.

- ``store``: the checkpoints of a run; saving by many ranks, retention.
- ``saved``: one checkpoint, opened; any box of any tensor, verified.
- ``modes``: how training and saving share the time: blocking, snapshot or lazy.
- ``inspect``: what lies in a checkpoint or model directory; verifying and converting it.
- ``formats``: checkpoints of other systems, read and written.
- ``universal``: what every rank dumped, put together by patterns, for any new split.

- ``simple``: ``save`` and ``load`` of whatever a program trains, in two calls.
- ``loading``: what all ranks want of a checkpoint, read once and passed on.

What a job chooses are numbers. Formats and patterns are parts, listed by their own rooms.
"""

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable

if TYPE_CHECKING:
    from shoal.checkpoint.simple import Checkpoints, load, save

__all__ = ["SAVE_MODES", "Checkpoints", "load", "save"]

SAVE_MODES = PartTable(
    "save_mode",
    {
        "blocking": "shoal.checkpoint.modes.blocking:Blocking",
        "snapshot": "shoal.checkpoint.modes.snapshot:Snapshot",
        "lazy": "shoal.checkpoint.modes.lazy:Lazy",
    },
    about=("How saving overlaps with training. Chosen by the key `checkpoint.mode` of a job."),
    protocol="shoal.checkpoint.protocols:SaveMode",
)


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name in ("Checkpoints", "load", "save"):
        from shoal.checkpoint import simple

        return getattr(simple, name)
    raise AttributeError(f"module 'shoal.checkpoint' has no attribute {name!r}")
