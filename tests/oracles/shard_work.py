"""Functions that workers of a pool run on shards."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from shoal.fields.data.sources import SourceShard


def counted(shard: SourceShard, place: Path, shared: Path) -> dict[str, Any]:
    """Rows and sum of ids of a shard; the third dies at its first try."""
    if shard.number == 2 and not shared.exists():
        shared.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ids = [at for batch in shard.batches() for at in batch.column(0).to_pylist()]
    with place.with_suffix(".calls").open("a") as calls:
        calls.write("x")
    return {"rows": len(ids), "ids": sum(ids)}


def dies(shard: SourceShard, place: Path, shared: None) -> dict[str, Any]:
    """A worker that is killed each time."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def full(shard: SourceShard, place: Path, shared: None) -> dict[str, Any]:
    """A disk without space."""
    raise OSError(28, "No space left on device")


def of_process(shard: SourceShard, place: Path, shared: None) -> dict[str, Any]:
    """Which process it was."""
    return {"process": os.getpid()}
