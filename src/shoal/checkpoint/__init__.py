"""checkpoint: state that survives: saved in pieces, checksummed, loaded in any other split.

- ``store``: a directory of checkpoints; saving by many ranks, retention.
- ``saved``: one checkpoint, opened; any box of any tensor, verified.
- ``inspect``: what lies in a checkpoint or model directory; verifying and converting it.

Nothing here is chosen by a job, so the room has no table of parts.
"""
