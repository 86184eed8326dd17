"""What a child process runs first: ``python -P -m shoal.core.child PARENT PLACE MODULE ARG...``.

It asks for its end with the process that started it, and becomes ``python -m MODULE`` in the
directory PLACE, from which nothing is imported: the paths of modules are known by then. Only the
standard library is imported before that, so the window in which the parent can end unnoticed is
that of the interpreter's own start, and it is closed by comparing the parent's number.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, however that ends.

    On Linux the kernel does it, even in the middle of a computation. Elsewhere a thread looks for
    it twice a second.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    """Become the module that the command line names."""
    parent, directory, module = int(sys.argv[1]), *sys.argv[2:4]
    die_with_parent(parent)
    os.chdir(directory)
    sys.argv = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
