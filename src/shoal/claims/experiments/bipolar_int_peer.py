"""A process of its own in which oneDNN may use VNNI, but no matrix tiles.

oneDNN reads once, when it is loaded, which instructions it may use; so the peer of the int8
engine is run beside the claim, not in it. A line in: so many products; a line out: done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from shoal.core import children

_ISA = "AVX512_CORE_VNNI"


class IntMatmulPeer:
    """``torch._int_mm`` in another process, over ``buffers`` weights in turn."""

    def __init__(self, m: int, n: int, k: int, buffers: int, threads: int) -> None:
        from shoal.core.version import PACKAGE

        root = str(PACKAGE.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        self._process = children.start(
            __name__,
            *map(str, (m, n, k, buffers, threads)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=children.environment({"PYTHONPATH": path, "ONEDNN_MAX_CPU_ISA": _ISA}),
        )

    def __call__(self, products: int = 1) -> str:
        """Compute, wait; "done", or why it cannot."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{products}\n")
            return self._process.stdout.readline().strip() or "it ended"
        except BrokenPipeError:
            return "it ended"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def main() -> None:
    """Serve products until the input ends."""
    import torch

    m, n, k, buffers, threads = map(int, sys.argv[1:6])
    torch.set_num_threads(threads)
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(buffers)]
    turn = 0
    for line in sys.stdin:
        try:
            for _ in range(int(line)):
                torch._int_mm(x, weights[turn % buffers].T)
                turn += 1
        except RuntimeError as cause:
            print(" ".join(str(cause).split())[:200], flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
