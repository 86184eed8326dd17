"""checkpoint: state that survives: saved in pieces, checksummed, loaded in any other split.

- ``store``: the checkpoints of a run; saving by many ranks, retention.
- ``saved``: one checkpoint, opened; any box of any tensor, verified.
- ``modes``: how training and saving share the time: blocking, snapshot or lazy.
- ``inspect``: what lies in a checkpoint or model directory; verifying and converting it.
"""

from shoal.core.parts import PartTable

__all__ = ["SAVE_MODES"]

SAVE_MODES = PartTable(
    "save_mode",
    {
        "blocking": "shoal.checkpoint.modes.blocking:Blocking",
        "snapshot": "shoal.checkpoint.modes.snapshot:Snapshot",
        "lazy": "shoal.checkpoint.modes.lazy:Lazy",
    },
)
