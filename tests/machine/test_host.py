"""What the operating system says about this process."""

from __future__ import annotations

import subprocess
import sys

from shoal.machine.host import peak_memory


def test_a_small_process_of_a_large_one_is_small() -> None:
    """Its peak is its own, not that of the process that started it."""
    large = bytearray(300 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    assert peak_memory() > 300 * 2**20
    code = "from shoal.machine.host import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < 150 * 2**20
