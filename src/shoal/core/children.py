"""Child processes that end with this one and import nothing from the working directory.

Every process that Shoal starts to run its own code is started here. A child

- runs a module of this interpreter under ``-P``, and its interpreter starts in the root directory:
  the working directory, in which a user's files or a downloaded model may lie, is not searched for
  modules, by it or by what it starts, and becomes its own only when ``sys.path`` stands;
- leads a session of its own: Ctrl-C and the hang-up of a terminal reach this process alone, which
  decides what they mean, and :func:`kill` reaches whatever the child has started;
- is killed by the kernel when this process ends in any way, SIGKILL included.

The kernel takes the end of the *thread* that started a child for the end of its parent, so one
thread, which lives as long as this process, starts all of them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

SAFE_PATH = "PYTHONSAFEPATH"
"""Variable under which a Python does not search the working directory for modules."""

ROOT = os.sep
"""Directory in which the interpreter of a child starts."""

_T = TypeVar("_T")
# How long the kernel may take to remove a process that was killed.
_LEAVE_S = 10.0


def command(module: str, *arguments: str) -> list[str]:
    """Command line of a child that runs ``module``; it must be started by this process, in ROOT.

    The child goes on in the working directory that this process has now.

    Args:
        module: dotted name, run as ``python -m`` would.
        arguments: what it finds in ``sys.argv[1:]``.
    """
    begin = [sys.executable, "-P", "-m", "shoal.core.child", str(os.getpid()), _working_directory()]
    return [*begin, module, *arguments]


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed
        return ROOT


def environment(changes: Mapping[str, str] = {}, *, without: Iterable[str] = ()) -> dict[str, str]:
    """Variables of a child: those of this process, and a safe path for what it starts.

    Args:
        changes: variables to set.
        without: variables to leave out, such as keys.
    """
    left_out = set(without)
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    variables = {**kept, SAFE_PATH: "1", **changes}
    if "PYTHONPATH" in variables:
        # An empty entry means the working directory, to a safe path too.
        entries = [entry for entry in variables["PYTHONPATH"].split(os.pathsep) if entry]
        variables["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries)
    return variables


def start(
    module: str,
    *arguments: str,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a child that runs ``module``.

    Args:
        module: dotted name.
        arguments: of its command line; no secrets, which every user of the machine could read.
        prefix: program that becomes the child, such as ``ip netns exec NAME``.
        env: all of its variables; :func:`environment` if not given.
        options: further ones of :class:`subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    return start_command([*prefix, *command(module, *arguments)], env=env, **options)


def start_command(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a command line that :func:`command` has made, perhaps behind a prefix."""
    variables = {**(environment() if env is None else env), SAFE_PATH: "1"}
    return from_lasting_thread(
        lambda: subprocess.Popen(words, env=variables, cwd=ROOT, start_new_session=True, **options),
        _discard,
    )


def kill(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Kill children with whatever they have started, and wait for their end."""
    killed = list(processes)
    for process in killed:
        # It leads a group of its own, which may outlive it. The number of one that was waited for
        # may be another's by now, but not while its group is left.
        if process.returncode is None or not _exists(process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # one that was not started here may lead no group
    for process in killed:
        process.wait(_LEAVE_S)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _discard(process: subprocess.Popen[Any]) -> None:
    kill([process])
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def from_lasting_thread(
    make: Callable[[], _T], discard: Callable[[_T], None] = lambda made: None
) -> _T:
    """Call ``make`` in the thread that lives as long as this process.

    A Ctrl-C while it runs ends what it made: no other process knows of it.

    Args:
        make: starts a process.
        discard: ends it.
    """
    made: Future[_T] = Future()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def run() -> None:
        try:
            if cores is not None:  # a child inherits them from the thread that starts it
                os.sched_setaffinity(0, cores)
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    _calls().put(run)
    try:
        return made.result()
    except BaseException:
        if made.exception() is None:
            discard(made.result())
        raise


class _Starter:
    """The queue of the lasting thread, and the process that has it: a fork has no threads."""

    lock = threading.Lock()
    calls: queue.SimpleQueue[Callable[[], None]] | None = None
    process = 0


def _calls() -> queue.SimpleQueue[Callable[[], None]]:
    with _Starter.lock:
        if _Starter.calls is None or _Starter.process != os.getpid():
            calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

            def serve() -> None:
                while True:
                    calls.get()()

            threading.Thread(target=serve, name="starts children", daemon=True).start()
            _Starter.calls, _Starter.process = calls, os.getpid()
        return _Starter.calls
