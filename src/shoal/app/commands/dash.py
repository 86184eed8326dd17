"""``shoal dash``: machine, runs, plans, score, server and claims in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import socket


def dash(
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="A directory of runs, besides those in the score; repeatable."),
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(help="A plan file to show; repeatable.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Directory of claim results. [default: those of the clone]"),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a running `shoal serve`; its key is SHOAL_API_KEY.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)
    ] = 8642,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Show machine, runs, plans, score, server and claims in a browser, until Ctrl-C.

    Only who has the address that is printed can see it. Nothing is asked of another machine.

    **Examples**

        shoal dash

        shoal dash --runs runs --server http://127.0.0.1:8000

        shoal dash --no-open --port 0
    """
    import os

    from shoal.core.errors import require
    from shoal.core.extras import import_extra

    uvicorn = import_extra("uvicorn", extra="run", purpose="the dashboard")
    import_extra("fastapi", extra="run", purpose="the dashboard")
    from shoal.serve.watch.upstream import Upstream

    for folder in runs or ():
        require(folder.is_dir(), "--runs", str(folder), expected="a directory that exists")
    for file in plan or ():
        require(file.is_file(), "--plan", str(file), expected="a file that exists")
    upstream = None
    if server is not None:
        upstream = Upstream(server.rstrip("/"), os.environ.get("SHOAL_API_KEY", ""))
    listening = _listen(host, port)
    # The pages take a second to import, which an address in use does not wait for.
    from shoal.app.dash.app import DashboardSettings, create_app
    from shoal.app.dash.guard import DashboardAccess, host_names
    from shoal.claims.shipped import results_directory
    from shoal.core.logs import log_to_stderr
    from shoal.serve.http.accept import BoundedServer
    from shoal.serve.http.limits import HttpLimits

    port = int(listening.getsockname()[1])
    access = DashboardAccess(hosts=host_names(host), name=f"shoal-dash-{port}")
    app = create_app(
        DashboardSettings(
            runs=tuple(runs or ()),
            plans=tuple(plan or ()),
            results=results or results_directory(),
            server=upstream,
            access=access,
        )
    )
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host  # noqa: S104
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    typer.echo(f"{address}?token={access.token}")
    typer.echo("The dashboard opens at this address only. Ctrl-C stops it.", err=True)
    opened = _open(f"{address}?token={access.token}") if open_ else None
    limits = HttpLimits()
    # No access log: the first address has the token.
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        log_config=None,
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_graceful_shutdown=2,
    )
    log_to_stderr()
    try:
        # A page may ask the server, which takes another connection.
        BoundedServer(config, limits=limits, descriptors=2).run(sockets=[listening])
    finally:
        listening.close()
        if opened is not None:
            opened.unlink(missing_ok=True)


def _listen(host: str, port: int) -> socket.socket:
    import socket

    from shoal.core.errors import ConfigError

    try:
        result = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol, or asyncio would leave Nagle's algorithm on.
        listening = socket.socket(*result[:3])
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(result[4])
        listening.listen(128)
    except OSError as cause:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen ({cause.strerror}); give another port, "
            f"or --port 0 for a free one"
        ) from cause
    return listening


def _open(address: str) -> Path | None:
    """Open a browser by a file: a command line, which others can list, would show the token."""
    import os
    import tempfile
    import webbrowser
    from html import escape

    from shoal.core.scratch import scratch_name

    # For this user only.
    handle, name = tempfile.mkstemp(prefix=scratch_name("dash"), suffix=".html")
    there = escape(address, quote=True)
    with os.fdopen(handle, "w") as file:
        file.write(
            f'<!doctype html><meta charset="utf-8"><title>Shoal</title>'
            f'<meta http-equiv="refresh" content="0; url={there}"><a href="{there}">Shoal</a>'
        )
    path = Path(name)
    if not webbrowser.open(path.as_uri()):
        path.unlink()
        return None
    return path
