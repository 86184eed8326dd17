"""checkpoint: state that survives: saved in pieces, checksummed, loaded in any other split.

- ``store``: a directory of checkpoints; saving by many ranks, retention.
- ``saved``: one checkpoint, opened; any box of any tensor, verified.
- ``inspect``: what lies in a checkpoint or model directory; verifying and converting it.
- ``formats``: checkpoints of other systems, read and written.
- ``universal``: what every rank dumped, put together by patterns, for any new split.

What a job chooses are numbers. Formats and patterns are parts, listed by their own rooms.
"""
