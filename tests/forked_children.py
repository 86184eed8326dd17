"""Ranks and servers that tests start are forks of a process that has made their imports already.

A rank's interpreter needs two seconds to import PyTorch and Shoal, one of a server half a second,
and the tests start hundreds. Here the interpreter of such a child is forked instead of executed:
from a process of one thread, started as the child would be, that has imported what its modules
import and nothing else.
Everything else is as :class:`subprocess.Popen` does it: the child is a child of this process, which
waits for it by its number, with a session, variables, streams and descriptors of its own.

It is executed, as outside of tests, where it has several threads, and where what it runs is not in
:data:`MODULES`: a test that looks at command lines takes them away. For each set of variables that
an interpreter and its libraries read when they start there is a process of its own to fork from,
and for ranks of even and of odd number: strings hash differently in neighbours.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_RANK = (
    "torch",
    "torch.distributed",
    "shoal.checkpoint.inmemory",
    "shoal.corpora.tokens",
    "shoal.model.transformer",
    "shoal.parallel.comm.collectives",
    "shoal.parallel.engine",
    "shoal.train.build",
    "shoal.train.evaluate",
    "shoal.train.loop",
    "shoal.train.replan",
    "shoal.train.saving",
)
_ENGINE = (
    "torch",
    "shoal.model.transformer",
    "shoal.serve.decode.protocols",
    "shoal.serve.engine.build",
    "shoal.serve.engine.failure",
    "shoal.serve.engine.wire",
)

MODULES = {
    "shoal.checkpoint.inmemory.process": (
        "shoal.checkpoint.checksum",
        "shoal.checkpoint.inmemory.field",
        "shoal.checkpoint.inmemory.stripes",
        "shoal.checkpoint.inmemory.wire",
        "shoal.core.janitor",
        "shoal.machine.host",
    ),
    "shoal.claims.check.worker": _RANK,
    "shoal.memory.fuyou.optimizer_process": _RANK,
    "shoal.parallel.comm.processes": _RANK,
    "shoal.serve.cluster.phase": _RANK,
    "shoal.serve.cluster.replica": ("shoal.serve.cluster.hosting", "shoal.serve.http.server"),
    "shoal.serve.decode.dovetail.worker": _RANK,
    "shoal.serve.decode.draft.ranked_worker": _RANK,
    "shoal.serve.engine.process": _ENGINE,
    # They limit their address space, so that each has what it imports itself and no more.
    "shoal.serve.text.grammar_worker": ("shoal.serve.text.confined", "shoal.serve.text.grammar"),
    "shoal.serve.text.template_worker": (
        "shoal.corpora.chat.template",
        "shoal.serve.text.confined",
    ),
    "shoal.train.worker": _RANK,
}
"""What a fork can become, which is not imported before, and what is."""

# What is read when an interpreter or a library starts.
_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH_")
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_LIMIT = 1 << 20
_FREE = 512  # descriptors from here on are used by nothing else
_PARENTS: set[int] = set()
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def install() -> None:
    """Let children of this process be forked from now on."""
    if sys.platform == "linux" and platform.machine() in _CLONE:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def descendants() -> set[Any]:
    """Processes that this one has started and those have, as psutil has them, but for parents."""
    import psutil

    started = psutil.Process().children(recursive=True)
    return {one for one in started if one.pid not in _PARENTS}


@functools.wraps(_execute)
def _execute_child(self: Any, *given: Any, **named: Any) -> None:
    bound = inspect.signature(_execute).bind(self, *given, **named).arguments
    words, variables = bound["args"], bound["env"]
    begin = [sys.executable, "-P", "-m", "shoal.core.child", str(os.getpid())]
    if (
        isinstance(words, str | bytes | os.PathLike)
        or variables is None
        or (words := list(words))[:5] != begin
        or words[6] not in MODULES
        or bound["preexec_fn"] is not None
        or not bound["start_new_session"]
        # Libraries of more threads start them when they are imported; a fork has one.
        or variables.get("OMP_NUM_THREADS") != "1"
    ):
        return _execute(self, *given, **named)
    at_start = {k: v for k, v in variables.items() if k.startswith(_AT_START) and k != "PYTHONPATH"}
    odd = int(variables.get("RANK", "0")) % 2
    parent = _parent(os.getpid(), odd, json.dumps(at_start, sort_keys=True), MODULES[words[6]])
    pairs = [
        (bound[ours] if bound[ours] != -1 else number, number)
        for number, ours in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    pairs += [(number, number) for number in sorted(bound["pass_fds"])]
    task = {
        "words": words[4:],
        "variables": dict(variables),
        "cwd": str(bound["cwd"] or Path.cwd()),
        "places": [place for _, place in pairs],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    try:
        self.pid = parent.fork(task, [number for number, _ in pairs])
    except OSError:  # such as where the kernel allows no child for another process
        return _execute(self, *given, **named)
    self._child_created = True
    self._close_pipe_fds(*(bound[name] for name in _PIPES))
    return None


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


@functools.cache
def _starter(process: int) -> ThreadPoolExecutor:
    """A thread that lasts: the kernel takes its end for that of the parent of all forks."""
    return ThreadPoolExecutor(1, "starts parents of forks")


@functools.cache
def _parent(process: int, odd: int, at_start: str, imported: tuple[str, ...]) -> _Parent:
    """The process that children with these variables and modules are forked from; one each."""
    return _starter(process).submit(_Parent, json.loads(at_start), imported).result()


class _Parent:
    """A process that forks children when it is asked, started at once.

    Args:
        at_start: the variables that its interpreter and libraries read.
        imported: the modules that it imports.
    """

    def __init__(self, at_start: Mapping[str, str], imported: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # With its path, so that it imports the package that this process does.
        outside = (k for k in os.environ if not k.startswith(_AT_START) or k == "PYTHONPATH")
        kept = {k: os.environ[k] for k in outside}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                *map(str, (Path(__file__), os.getpid(), theirs.fileno())),
                *imported,
            ],
            env={**kept, **at_start},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        _PARENTS.add(self._process.pid)
        self._socket, self._lock = ours, threading.Lock()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def fork(self, task: dict[str, Any], descriptors: list[int]) -> int:
        """The number of a new child that has begun to be what ``task`` says."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(task).encode()], descriptors)
            answer = int(self._socket.recv(64) or -1)
        if answer < 0:
            raise OSError("the process that ranks are forked from cannot fork this one")
        return answer


def _serve(parent: int, number: int, imported: Sequence[str]) -> dict[str, Any] | None:
    """Fork children until nobody asks any more; in a child, returns what it is to be."""
    from shoal.core.child import die_with_parent

    die_with_parent(parent)
    for name in imported:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    with socket.socket(fileno=number) as asked:
        while True:
            text, descriptors, _, _ = socket.recv_fds(asked, _LIMIT, 64)
            if not text:
                return None
            python.PyOS_BeforeFork()
            # The child of the process that asks, not of this one.
            flags = _CLONE_PARENT | signal.SIGCHLD
            child = libc.syscall(_CLONE[platform.machine()], flags, 0, 0, 0, 0)
            if child == 0:
                python.PyOS_AfterFork_Child()
                try:
                    return _become(json.loads(text), descriptors, asked)
                except BaseException:
                    asked.send(b"-1")
                    raise
            python.PyOS_AfterFork_Parent()
            for one in descriptors:
                os.close(one)
            if child < 0:
                asked.send(b"-1")


def _become(task: dict[str, Any], descriptors: list[int], asked: socket.socket) -> dict[str, Any]:
    """What :class:`subprocess.Popen` does between fork and exec."""
    os.setsid()
    os.sched_setaffinity(0, task["cores"])
    os.environ.clear()
    os.environ.update(task["variables"])
    os.chdir(task["cwd"])
    paths = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:0] = [one for one in paths if one not in sys.path]
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, _FREE) for one in [*descriptors, asked.detach()]]
    os.closerange(3, _FREE)
    for one, place in zip(high[:-1], task["places"], strict=True):
        os.dup2(one, place)
    os.write(high[-1], str(os.getpid()).encode())
    os.closerange(_FREE, max(high) + 1)
    return task


if __name__ == "__main__":
    becomes = _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    if becomes is not None:
        from shoal.core import child

        sys.argv = ["shoal.core.child", *becomes["words"]]
        child.main()
