"""Work for shards that dies once, in a module that other processes can import."""

from __future__ import annotations

import os
import signal
from typing import Any


def dying(texts: Any, options: Any) -> tuple[Any, Any]:
    """Keys of texts; the first process that is asked is killed."""
    from shoal.fields.data.dedupe import minhash_lsh

    marker, inner = options
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        with (marker.parent / "calls").open("a") as file:
            file.write("x")
        return minhash_lsh._keys(texts, inner)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
