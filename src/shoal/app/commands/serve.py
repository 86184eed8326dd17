"""``shoal serve``: answer requests with a model, over HTTP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.serve.engine.launch import EngineProcess
    from shoal.serve.http.server import RunningServer

_MAX_KEY_BYTES = 4096


def serve(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model directory, a run, ORG/NAME of the hub, or a job in YAML; or status.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The same, as a flag; or over that of the YAML.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but localhost needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Model name in requests. [default: name of the run, folder or id]"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the API key that clients must send; only you may be able to read it."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Additional host name of this server.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call, as http://host:port."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Scheduler: which requests run next.")
    ] = None,
    disagg: Annotated[
        str | None,
        typer.Option(help="Separate processes for prefill and decode: prefill=1,decode=1."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Number of engines behind one address.", min=1)
    ] = None,
    balancer: Annotated[
        str | None, typer.Option(help="How requests are assigned to replicas.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="Where replicas run: local processes, or ray.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.", min=1)] = None,
    kv: Annotated[
        str | None, typer.Option(help="Cache manager: which request holds which block.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Cache size in tokens. [default: what fits in memory]")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Maximum number of requests in a step.")
    ] = None,
    max_position: Annotated[
        int | None, typer.Option(help="Maximum tokens of a request, prompt and answer.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Serve an adapter under a model name: NAME=DIRECTORY."),
    ] = None,
    max_adapters: Annotated[
        int | None, typer.Option(help="Maximum number of adapters in memory.", min=0)
    ] = None,
    adapter_routes: Annotated[
        bool,
        typer.Option(
            "--adapter-routes",
            help="Allow clients with the key to load, unload and merge adapters.",
        ),
    ] = False,
    adapter_root: Annotated[
        Path | None,
        typer.Option(
            help="Allow clients to load adapters below this directory. [default: only "
            "those of --adapter]"
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads; 0 for all cores but one.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path=value; overrides everything else.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds allowed for loading the engine.", min=1)
    ] = 600.0,
    engine_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a heartbeat after which the engine is ended.", min=1),
    ] = 120.0,
    traces: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector for traces: http://HOST:4318."),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for open answers to finish after SIGTERM.", min=0)
    ] = 30.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the configuration without starting.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the address only.")] = False,
    output: Output = Format.text,
) -> None:
    """Serve a model to OpenAI's clients until Ctrl-C.

    The key can also be in the environment variable SHOAL_API_KEY. With status in the place of
    a model: what the server at host and port does now, and which instance owes which how many
    blocks of cache.

    **Examples**

        shoal serve runs/run/export

        shoal serve ORG/NAME@main

        SHOAL_API_KEY=$(openssl rand -hex 16) shoal serve MODEL --host 0.0.0.0

        shoal serve MODEL --port 0 --scheduler fcfs --max-running 16

        shoal serve MODEL --disagg prefill=1,decode=1

        shoal serve MODEL --replicas 2

        shoal serve MODEL --replicas 4 --launcher ray --set launcher.address=auto

        shoal serve MODEL --tp 2 --pp 2

        shoal serve MODEL --adapter sql=runs/sql/adapter --adapter chat=runs/chat/adapter

        shoal serve MODEL --kv distributed --set kv.instances=3

        shoal serve status --port 8000
    """
    if subject == "status" and not Path(subject).exists():
        from shoal.app.status import status

        status(host, port, _key(api_key_file), output)
        return
    alone = not (dry_run or disagg or replicas or launcher or tp or pp or kv or set_)
    with _begun(model or subject if alone else None) as begun:
        from shoal.api.serving import local_job, serve_until_stopped, served_job
        from shoal.app.show import say_if_slower, show_values
        from shoal.core.logs import log_to_stderr

        resolved = served_job(
            subject,
            model=model,
            sets=set_ or [],
            environment=os.environ,
            disagg=disagg,
            adapters=adapter,
            scheduler=scheduler,
            replicas=replicas,
            balancer=balancer,
            launcher=launcher,
            parallel__tp=tp,
            parallel__pp=pp,
            kv=kv,
            kv_tokens=kv_tokens,
            max_running=max_running,
            max_position=max_position,
            precision=precision,
            max_adapters=16 if max_adapters is None and adapter_routes else max_adapters,
            threads=threads,
        )
        if dry_run:
            show_values(resolved, output)
            return
        job = local_job(resolved.value)
        from shoal.serve.engine.client import ClientOptions
        from shoal.serve.http.server import ServerOptions

        options = ServerOptions(
            host=host,
            port=port,
            name=name,
            key=_key(api_key_file),
            hosts=tuple(allow_host or ()),
            origins=tuple(allow_origin or ()),
            grace_s=drain_timeout,
            traces=traces,
            client=ClientOptions(start_s=start_timeout, hang_s=engine_timeout),
            adapter_routes=adapter_routes,
            adapter_root=None if adapter_root is None else str(adapter_root),
        )

        def ready(server: RunningServer) -> None:
            typer.echo(server.url if quiet else _welcome(server, with_key=options.key is not None))

        log_to_stderr()
        say_if_slower()
        if not quiet:
            typer.echo(f"loading {resolved.value.model} ...", err=True)
        stopped = serve_until_stopped(job, options, ready=ready, begun=begun)
        if stopped is not None:
            raise typer.Exit(128 + stopped)


@contextlib.contextmanager
def _begun(model: str | None) -> Iterator[EngineProcess | None]:
    """A process that imports what an engine needs, while this one finds out what that is to load.

    None for what is no directory of a model, or may need several processes.
    """
    if model is None or not Path(model).is_dir():
        yield None
        return
    from shoal.serve.engine.launch import begin

    begun = begin()
    try:
        yield begun
    finally:
        begun.discard()


def _key(file: Path | None) -> str | None:
    """The API key of the file or the environment; a command line is public."""
    from shoal.core.errors import ServeError, require

    if file is not None:
        try:
            mode = file.stat().st_mode & 0o777
            text = file.read_bytes()[:_MAX_KEY_BYTES].decode()
        except (OSError, UnicodeDecodeError) as cause:
            raise ServeError(f"--api-key-file {file}: cannot be read ({cause})") from cause
        require(
            mode & 0o077 == 0,
            f"--api-key-file {file}: mode",
            f"{mode:04o}",
            expected="0600",
            hint=f"others can read the key; run chmod 600 {file}",
            error=ServeError,
        )
        return text.strip()
    return os.environ.get("SHOAL_API_KEY") or None


def _welcome(server: RunningServer, *, with_key: bool) -> str:
    header = ' -H "Authorization: Bearer $SHOAL_API_KEY"' if with_key else ""
    key = "os.environ['SHOAL_API_KEY']" if with_key else "'none'"
    return f"""\
{server.model} answers at {server.url} (Ctrl-C stops it)

  curl {server.url}/v1/completions{header} \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{server.model}", "prompt": "Once upon a time", "max_tokens": 32}}'

  from openai import OpenAI
  client = OpenAI(base_url="{server.url}/v1", api_key={key})
  client.chat.completions.create(
      model="{server.model}", messages=[{{"role": "user", "content": "Hello"}}])
"""
