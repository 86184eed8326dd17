"""Where what the zoo trained lies: one directory by recipe, made by whoever asks first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.core.files import locked
from shoal.ir import Machine

__all__ = ["kept"]


def kept(
    place: Path,
    mark: str,
    make: Callable[[Path, Machine], Path],
    say: Callable[[str], None] | None = None,
) -> Path:
    """A directory; it is made if it is not there yet, by one process at a time.

    It is planned for the saved probe of this machine; where there is none, a fast probe is made
    for the purpose, and not saved. What an interruption left is not continued: recipes take
    minutes.

    Args:
        place: the directory.
        mark: a file in it, by which one that is whole is known.
        make: makes it, in a directory for the run that is removed afterwards; returns where.
        say: told how long it took.

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
        try:
            shutil.rmtree(run_dir, ignore_errors=True)
            made = make(run_dir, machine)
            if say is not None:
                say(f"{place.name}: made in {time.perf_counter() - begun:.0f} s")
            made.rename(place)
        except OSError as cause:
            raise ShoalError(
                f"{place}: cannot be written ({cause.strerror or cause}); free some space or set "
                "SHOAL_HOME to another place"
            ) from cause
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
    return place
