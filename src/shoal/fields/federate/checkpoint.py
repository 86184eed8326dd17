"""The state of a run in one file: it is there whole, or the one before it is.

Tensors are safetensors, everything else JSON in the file's metadata; nothing in it can execute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import write_atomic
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError
from shoal.fields.federate.wire.messages import pack, unpack

# Seconds between states on disk, and the most of the time that writing them may take.
_EVERY_S, _SHARE = 2.0, 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """Where a run stands.

    Args:
        facts: what JSON holds.
        arrays: by name.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


@dataclass
class Checkpoint:
    """The file, and when it is written next.

    Args:
        path: of the file.
    """

    path: Path
    _next: float = field(default_factory=lambda: time.monotonic() + _EVERY_S)

    def due(self) -> bool:
        """Whether it is time for another; it takes at most a twentieth of the time."""
        return time.monotonic() >= self._next

    def write(self, state: RunState) -> None:
        """Replace the state on disk."""
        begun = time.monotonic()
        write_atomic(self.path, pack(state.arrays, state.facts))
        now = time.monotonic()
        self._next = now + max(_EVERY_S, (now - begun) / _SHARE)

    def read(self) -> RunState | None:
        """The state on disk; None if there is none.

        Raises:
            FederationError: it is damaged.
        """
        try:
            arrays, facts = unpack(bytearray(self.path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, UpdateRefusedError) as cause:
            raise FederationError(
                f"{self.path}: cannot be read ({cause}); remove it, and the run begins again"
            ) from cause
        return RunState(facts=facts, arrays=arrays)

    def remove(self) -> None:
        """The run is over."""
        self.path.unlink(missing_ok=True)
