"""The Triton recurrence, interpreted: the same as the loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.errors import KernelError
from shoal.kernel.dispatch import dispatch
from shoal.kernel.rnn.call import Recurrence

_CODE = """
import sys
sys.path.insert(0, {place!r})
from test_rnn import gradients, inputs, worst
for name, B, D, options in (
    ("lstm", 3, 16, {{}}),
    ("gru", 1, 20, {{"clip": 0.1}}),
    ("elman", 18, 5, {{}}),
    ("slstm", 2, 16, {{"recompute": True}}),
):
    given = inputs(name, B, 3, 2, D)
    kept = {{key: value for key, value in options.items() if key != "recompute"}}
    wanted = gradients(given, name, "reference", **kept)
    off = worst(gradients(given, name, "triton", **options), wanted)
    assert off < 1e-4, (name, off)
print("equal")
"""


def test_interpreted_it_is_the_loop() -> None:
    pytest.importorskip("triton")
    # The interpreter is chosen when the kernels are first imported.
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(place=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_refuses_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = Recurrence("lstm", 1, 8, 1, 32)
    with pytest.raises(KernelError, match=r"needs the package triton|runs on GPUs"):
        dispatch(call, wanted="triton")
    with pytest.raises(KernelError, match=r"takes fp32, bf16"):
        dispatch(Recurrence("lstm", 1, 8, 1, 32, "fp64"), wanted="triton")
