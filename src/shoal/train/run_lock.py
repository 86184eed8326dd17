"""One process at a time runs in the directory of a run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from shoal.core.errors import ConfigError
from shoal.ir import Plan
from shoal.train.layout import RunDir

_P = ParamSpec("_P")
_J = TypeVar("_J", bound="Plan[Any]")
_R = TypeVar("_R")


def alone(
    run: Callable[Concatenate[_J, Path, _P], _R],
) -> Callable[Concatenate[_J, Path, _P], _R]:
    """Let ``run(plan, directory, ...)`` begin only where no other process runs.

    The lock belongs to the open file and ends with the process, however that ends.

    Raises:
        ConfigError: another process runs in the directory, which is named, or it cannot be made.
    """

    def locked(plan: _J, run_dir: Path, /, *args: _P.args, **options: _P.kwargs) -> _R:
        path = RunDir(run_dir).lock
        new = [place for place in (path.parent, *path.parent.parents) if not place.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)
        except OSError as cause:
            raise ConfigError(
                f"{path.parent}: cannot be written ({cause.strerror}); choose another directory"
            ) from cause
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                file.seek(0)
                other = file.read(200).decode(errors="replace").strip() or "its pid is not known"
                raise ConfigError(
                    f"{run_dir}: another process runs here ({other}); wait for it, stop it, or "
                    "choose another name with --set name=..."
                ) from cause
            file.truncate(0)
            file.write(f"pid {os.getpid()}, host {socket.gethostname()}".encode())
            try:
                return run(plan, run_dir, *args, **options)
            finally:
                if [one.name for one in path.parent.iterdir()] == [path.name]:
                    # Nothing is left of a run that could not start.
                    path.unlink()
                    with contextlib.suppress(OSError):  # another run lies there by now
                        for place in new or [path.parent]:
                            place.rmdir()

    functools.update_wrapper(locked, run)
    return locked
