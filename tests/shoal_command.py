"""``shoal`` in the process of the tests: the same entry point, output and status, no start."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from shoal.app.cli import main


def shoal(*words: object, without: tuple[str, ...] = (), **environment: str) -> Completed:
    """Run the command; what it wrote and the status it left with.

    Args:
        words: of the command line, after ``shoal``.
        without: variables of the environment that are taken away.
        environment: variables that are added.
    """
    out, err = io.StringIO(), io.StringIO()
    line = ["shoal", *map(str, words)]
    kept = {key: value for key, value in os.environ.items() if key not in without}
    status = 0
    with (
        mock.patch.dict(os.environ, {**kept, **environment}, clear=True),
        mock.patch.object(sys, "argv", line),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Completed(line, status, out.getvalue(), err.getvalue())


Completed = subprocess.CompletedProcess[str]
