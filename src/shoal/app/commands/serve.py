"""``shoal serve``: answer requests with a model, over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.serve.http.server import RunningServer

__all__ = ["serve"]

_MAX_KEY_BYTES = 4096


def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face model directory; or status.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines' need a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; its directory's name.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with the key that callers must send, that only you can read."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name that callers may use for this server.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web page that may call, as http://host:port.")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Who runs now.")] = None,
    disagg: Annotated[
        str | None,
        typer.Option(help="Processes for prompts and for generation: prefill=1,decode=1."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engines of their own behind one address.", min=1)
    ] = None,
    balancer: Annotated[
        str | None, typer.Option(help="Which of the replicas answers a request.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="Where replicas run: local processes, or ray.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share every layer.", min=1)] = None,
    pp: Annotated[
        int | None, typer.Option(help="Stages of layers, each on ranks of its own.", min=1)
    ] = None,
    kv: Annotated[str | None, typer.Option(help="Who holds which block of the cache.")] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the cache holds; what the memory allows.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Most requests in one step.")] = None,
    max_position: Annotated[
        int | None, typer.Option(help="Most tokens of a request, prompt and answer.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter that requests call as a model: NAME=DIRECTORY."),
    ] = None,
    max_adapters: Annotated[
        int | None, typer.Option(help="Adapters that can be in memory at a time.", min=0)
    ] = None,
    adapter_routes: Annotated[
        bool,
        typer.Option(
            "--adapter-routes", help="Let callers with the key load, unload and merge adapters."
        ),
    ] = False,
    adapter_root: Annotated[
        Path | None,
        typer.Option(help="Callers may load adapters below this directory; else --adapter's only."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute; 0 for all cores but one.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, over everything else.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds that the engine may take to load.", min=1)
    ] = 600.0,
    engine_timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life that end the engine.", min=1)
    ] = 120.0,
    traces: Annotated[
        str | None,
        typer.Option(help="Send traces to this collector of OpenTelemetry: http://HOST:4318."),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that open answers get to end after SIGTERM.", min=0)
    ] = 30.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the configuration; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the address only.")] = False,
) -> None:
    """Serve a model to OpenAI's clients until Ctrl-C.

    The key can also be in the environment variable SHOAL_API_KEY. With status in the place of
    a model: what the server at host and port does now, and which instance owes which how many
    blocks of cache.

    **Examples**

        shoal serve runs/run/export

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
    if model == "status" and not Path(model).exists():
        from shoal.app.status import status

        status(host, port, _key(api_key_file))
        return
    from shoal.app.show import say_if_slower, table
    from shoal.core.config import resolve
    from shoal.core.logs import log_to_stderr
    from shoal.ir import ServeJob
    from shoal.serve.engine.client import ClientOptions
    from shoal.serve.engine.process import factory_of
    from shoal.serve.http.server import ServerOptions
    from shoal.serve.http.server import serve as run

    flags: dict[str, object] = {
        "model": model,
        "scheduler": scheduler,
        "disagg": None if disagg is None else _phases(disagg),
        "replicas": replicas,
        "balancer": balancer,
        "launcher": launcher,
        "parallel": _given(tp=tp, pp=pp),
        "kv": kv,
        "kv_tokens": kv_tokens,
        "max_running": max_running,
        "max_position": max_position,
        "precision": precision,
        "adapters": _adapters(adapter),
        "max_adapters": max_adapters if max_adapters is not None or not adapter_routes else 16,
        "threads": threads,
    }
    resolved = resolve(ServeJob, flags=flags, sets=set_ or [])
    if dry_run:
        table("configuration", ("key", "value", "why"), list(resolved.lines()))
        return
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
        factory=factory_of(resolved.value),
        adapter_routes=adapter_routes,
        adapter_root=None if adapter_root is None else str(adapter_root),
    )

    def ready(server: RunningServer) -> None:
        typer.echo(server.url if quiet else _welcome(server, with_key=options.key is not None))

    log_to_stderr()
    say_if_slower()
    if not quiet:
        typer.echo(f"loading {model} ...", err=True)
    stopped = run(resolved.value, options, ready=ready)
    if stopped is not None:
        raise typer.Exit(128 + stopped)


def _given(**degrees: int | None) -> dict[str, int] | None:
    """The degrees that were given, if there was one."""
    return {name: value for name, value in degrees.items() if value is not None} or None


def _adapters(given: list[str] | None) -> dict[str, str] | None:
    """Name -> directory, as the flags have them.

    Raises:
        ConfigError: one is not of the form, or a name is given twice.
    """
    from shoal.core.errors import ConfigError

    if not given:
        return None
    adapters: dict[str, str] = {}
    for word in given:
        name, separator, path = word.partition("=")
        if not (separator and name and path) or name in adapters:
            raise ConfigError(
                f"--adapter {word}: expected NAME=DIRECTORY with a name of its own, such as "
                "sql=runs/sql/adapter"
            )
        adapters[name] = str(Path(path).absolute())
    return adapters


def _phases(text: str) -> dict[str, int]:
    """Instances of each phase as the flag has them.

    Raises:
        ConfigError: it does not name both with a number.
    """
    from shoal.core.errors import ConfigError

    phases = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in ("prefill", "decode") or name in phases or not number.isdigit():
            raise ConfigError(
                f"--disagg {text}: expected both phases with a number, such as prefill=1,decode=1"
            )
        phases[name] = int(number)
    return phases


def _key(file: Path | None) -> str | None:
    """The API key of the file or the environment; a command line is public.

    Raises:
        ServeError: the file cannot be read, or others can read it.
    """
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
            hint=f"others could read the key; chmod 600 {file}",
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
