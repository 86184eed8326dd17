"""Lets the tests of this room share a module that is no test, and run Triton's programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Without a GPU they are interpreted; Triton decides that once, when it is first imported.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
