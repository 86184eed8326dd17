"""A replica's own process: a server with its engine, on a Unix socket.

``python -m shoal.serve.replica`` reads what to serve from its standard input, one message
``start`` (job, options), and answers on the socket that it is told, which lies in a directory
that only its user can enter. So it needs no key. It ends when its parent does, and removes that
directory then. It writes why it could not start to the file ``failed`` beside the socket.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.config import parse
from shoal.core.errors import ShoalError
from shoal.core.files import write_atomic
from shoal.ir.job import ServeJob
from shoal.parallel.processes import end_with_parent
from shoal.serve.client import ClientOptions
from shoal.serve.limits import HttpLimits
from shoal.serve.server import ServerOptions, serve_at
from shoal.serve.wire import Decoder, encode

__all__ = ["FAILED", "main", "start_message"]

FAILED = "failed"


def start_message(job: ServeJob, options: ServerOptions) -> bytes:
    """What a replica is told when it starts."""
    told = {
        "name": options.name,
        "factory": options.factory,
        "grace_s": options.grace_s,
        "traces": options.traces,
        "limits": dataclasses.asdict(options.limits),
        "client": dataclasses.asdict(options.client),
    }
    raw = job.model_dump(mode="json", exclude_none=True)
    return encode({"kind": "start", "job": raw, "options": told})


def _options(raw: Mapping[str, Any]) -> ServerOptions:
    return ServerOptions(
        **{
            **raw,
            "limits": HttpLimits(**raw["limits"]),
            "client": ClientOptions(**raw["client"]),
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Serve on the socket that the command line names until SIGTERM."""
    parser = argparse.ArgumentParser(prog="shoal.serve.replica", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="where to listen")
    path: Path = parser.parse_args(arguments).socket
    end_with_parent(path.parent)
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {path.parent.name}: %(message)s", level=logging.WARNING
    )
    (start,) = Decoder().feed(sys.stdin.buffer.read())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(path))
            serve_at(
                parse(ServeJob, start["job"], where="job"), _options(start["options"]), listener
            )
        except (ShoalError, OSError) as cause:
            write_atomic(path.with_name(FAILED), str(cause))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
