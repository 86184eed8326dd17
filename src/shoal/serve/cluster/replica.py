"""A replica's own process: a server with its engine, on a socket that it inherits.

``python -m shoal.serve.cluster.replica --fd N --folder DIR`` reads what to serve from its standard
input, one message ``start`` (job, options). It ends when its parent does, and removes its folder
then. It writes why it could not start to the file ``failed`` there.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.config import parse
from shoal.core.errors import ShoalError
from shoal.core.files import write_atomic
from shoal.core.logs import log_to_stderr
from shoal.ir.serve_job import ServeJob
from shoal.serve.cluster.hosting import FAILED
from shoal.serve.engine.client import ClientOptions
from shoal.serve.engine.frames import Decoder
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.server import ServerOptions, serve_at


def start_message(job: ServeJob, options: ServerOptions) -> dict[str, Any]:
    """What a replica receives when it starts; it runs in a directory of its own."""
    job = job.model_copy(update={"model": str(Path(job.model).resolve())})
    fields = {
        "name": options.name,
        "factory": options.factory,
        "grace_s": options.grace_s,
        "traces": options.traces,
        "limits": dataclasses.asdict(options.limits),
        "client": dataclasses.asdict(options.client),
    }
    raw = job.model_dump(mode="json", exclude_none=True)
    return {"kind": "start", "job": raw, "options": fields}


def _options(raw: Mapping[str, Any]) -> ServerOptions:
    # One with a key listens for another machine, which knows it by no name.
    return ServerOptions(
        **{
            **raw,
            "hosts": ("*",) if raw.get("key") else (),
            "limits": HttpLimits(**raw["limits"]),
            "client": ClientOptions(**raw["client"]),
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Serve on the inherited socket until SIGTERM."""
    parser = argparse.ArgumentParser(prog="shoal.serve.cluster.replica", description=__doc__)
    parser.add_argument("--fd", required=True, type=int, help="the inherited socket")
    parser.add_argument("--folder", required=True, type=Path, help="a directory of its own")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    log_to_stderr(form=f"%(asctime)s %(levelname)s {folder.name}: %(message)s")
    (start,) = Decoder().feed(sys.stdin.buffer.read())
    with socket.socket(fileno=given.fd) as listener:
        try:
            job = parse(ServeJob, start["job"], where="job")
            serve_at(job, _options(start["options"]), listener)
        except (ShoalError, OSError) as cause:
            write_atomic(folder / FAILED, str(cause))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
