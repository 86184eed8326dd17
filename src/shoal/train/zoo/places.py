"""Where what the zoo trained lies: one directory by recipe, made by the process that asks first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shoal.core.errors import CheckpointError, ConfigError, RankError, ShoalError
from shoal.core.files import locked
from shoal.ir import Machine


def stored_directory(
    place: Path,
    mark: str,
    make: Callable[[Path, Machine, bool], Path],
    say: Callable[[str], None] | None = None,
) -> Path:
    """A directory; it is made if it is not there yet, by one process at a time.

    It is planned for the saved probe of this machine; without one, a fast probe runs and is not
    saved. An interrupted training is resumed from its last checkpoint, or restarted if that is not
    possible.

    Args:
        place: the directory.
        mark: a file in it, by which one that is whole is known.
        make: makes it, in a directory for a run, which lies there already if the last argument says
            so; returns where.
        say: receives how long it took.

    Raises:
        ShoalError: it could not be made, or not be written.
    """
    from shoal.machine.described import load
    from shoal.machine.probing import probe, saved_path

    if (place / mark).is_file():
        return place
    run_dir = place.parent / f".{place.name}.run"
    with locked(place.parent / f".{place.name}.lock", lambda: None):
        if (place / mark).is_file():  # another process was first
            return place
        machine = load("local") if saved_path().is_file() else probe(fast=True)
        begun = time.perf_counter()
        left = run_dir.is_dir()
        try:
            try:
                made = make(run_dir, machine, left)
            except (CheckpointError, ConfigError, RankError):
                if not left:
                    raise
                shutil.rmtree(run_dir)
                made = make(run_dir, machine, False)
            if say is not None:
                since = " since it was interrupted" if left else ""
                say(f"{place.name}: made in {time.perf_counter() - begun:.0f} s{since}")
            made.rename(place)
        except OSError as cause:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise ShoalError(
                f"{place}: cannot be written ({cause.strerror or cause}); free some space or set "
                "SHOAL_HOME to another place"
            ) from cause
        shutil.rmtree(run_dir, ignore_errors=True)
    return place
