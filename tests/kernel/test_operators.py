"""Modes that see operators: where tensors lie, and what they import."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from shoal.kernel.operators import tensors_in  # noqa: E402


def test_tensors_lie_in_tuples_lists_and_dicts() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    given = ((one, [two, None, 1.0], "text"), {"out": (three,), "dim": 0})
    assert [len(tensor) for tensor in tensors_in(given)] == [1, 2, 3]
    assert list(tensors_in((1, "text", None, [], {}))) == []


@pytest.mark.slow
def test_no_mode_imports_the_compiler() -> None:
    """Importing it takes as long as importing the rest of PyTorch, in every process."""
    code = (
        "import sys, torch\n"
        "from shoal.kernel.operators import OperatorMode\n"
        "class Seen(OperatorMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        seen.append(func)\n"
        "        return func(*args, **(kwargs or {}))\n"
        "seen = []\n"
        "with Seen():\n    torch.zeros(2) + 1\n"
        "assert seen and 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
