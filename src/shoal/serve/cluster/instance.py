"""The process of one instance of several: how it starts, and how it reports its end."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.errors import ShoalError
from shoal.serve.engine.process import EngineConnection


def main_of(
    run: Callable[[Mapping[str, Any], EngineConnection], None],
    module: str,
    description: str | None,
    arguments: list[str] | None = None,
) -> int:
    """Take over the socket that the command line names, and run with the first message of it.

    Args:
        run: until the parent goes away, which is an EOFError.
        module: that was started.
        description: of it.
        arguments: of the command line.

    Returns:
        The exit status: 0 where no parent is left to compute for, 2 for what was reported to the
        parent in plain words. Unexpected errors are reported to the parent, and raised.
    """
    parser = argparse.ArgumentParser(prog=module, description=description)
    parser.add_argument("--fd", required=True, type=int, help="the inherited socket")
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.fd) as raw:
        parent = EngineConnection(raw)
        try:
            start: Mapping[str, Any] | None = None
            while start is None:
                start = next(iter(parent.receive(None)), None)
            if start["cpus"]:
                os.sched_setaffinity(0, start["cpus"])
            run(start, parent)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except ShoalError as cause:
            parent.tell_end(str(cause), known=True)
            return 2
        except Exception as cause:
            parent.tell_end(f"{type(cause).__name__}: {cause}", known=False)
            raise
    return 0
