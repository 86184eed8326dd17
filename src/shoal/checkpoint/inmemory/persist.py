"""From memory to the disk: ``python -m shoal.checkpoint.inmemory.persist STORE KEEP``.

A process of its own reads the recovered version from the snapshot processes and saves it as any
checkpoint is saved. The trainers have no part in it, and need not live.
"""

from __future__ import annotations

import sys

from shoal.checkpoint.inmemory.recovery import InMemory
from shoal.checkpoint.inmemory.snapshot import members
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ShoalError


def persist(version: InMemory, store: Store) -> None:
    """Save a version.

    Raises:
        CheckpointError: it cannot be read or saved.
    """
    tensors = {name: version.tensor(name) for name in version.names()}
    store.save(version.step, tensors, version.meta)


def main() -> int:
    """Save what the environment's snapshot processes hold."""
    result = members()
    try:
        if result is None or result[0].restore is None:
            raise CheckpointError("there is no version in memory to save")
        root, keep = sys.argv[1:]
        persist(InMemory(*result, result[0].restore), Store(root, keep=int(keep)))
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
