"""``shoal bench serve --url``: a workload replayed against a server that runs elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.ir import ServeJob

# Most tokens of a request, where the server does not say.
_MAX_POSITION = 4096


def run(
    job: ServeJob,
    *,
    url: str,
    model: str,
    requests: int | None,
    rate: float | None,
    targets: tuple[float, float] | None,
    chat: bool,
    text: bool,
    ignore_eos: bool,
    vocab: int,
    timeout_s: float,
    output: Format,
    files: list[Path],
    quiet: bool,
) -> None:
    """Replay, print, and write what was asked for.

    Args:
        job: its workload and its ``max_position`` are used.
        url: of the server.
        model: what it calls the model; empty for the first that it lists.
        requests: so many of the workload; None for all.
        rate: requests per second; None for the workload's own times.
        targets: most s to the first token and per further token, for goodput.
        chat: ask ``chat/completions``.
        text: send words.
        ignore_eos: ask for outputs of exactly the trace's lengths.
        vocab: token ids are below it.
        timeout_s: s after which a request counts as hung.
        output: text or JSON.
        files: JSON or pictures.
        quiet: print the result only.
    """
    import dataclasses
    from collections import Counter

    import typer

    from shoal.app.commands.bench_shown import measured_rows, write_served
    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.errors import ServeError
    from shoal.core.parts import table as parts
    from shoal.cost.serving.simulator import summary
    from shoal.serve.bench.latencies import measured_of, samples_of
    from shoal.serve.bench.remote import RemoteServer, replay_remote, served_model
    from shoal.serve.bench.replay import with_workload

    remote = RemoteServer(
        url=url,
        model=model,
        key=os.environ.get("OPENAI_API_KEY") or None,
        chat=chat,
        text=text,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )
    known = served_model(remote)
    remote = dataclasses.replace(remote, model=known.name)
    job = with_workload(job, requests=requests, rate=rate)
    longest = job.max_position or known.max_position or _MAX_POSITION
    arrivals = (
        parts("workload")
        .build(job.workload, where="workload")
        .arrivals(count=requests, vocab_size=vocab, max_position=longest, seed=job.seed)
    )
    shown = output is Format.text
    if shown and not quiet:
        typer.echo(
            f"{len(arrivals)} requests of {job.workload.name} to {known.name} at {url}, each of "
            f"at most {longest:,} tokens"
        )
    with WorkBar("bench", quiet=quiet) as bar:
        result = replay_remote(
            remote, arrivals, progress=lambda done, total, _: bar(done, total, "requests")
        )
    served = [one.served for one in result]
    gaps = [gap for one in result for gap in one.gaps]
    failures = Counter(one.failure for one in result if one.failure is not None)
    reasons = {one.failure: one.reason for one in reversed(result) if one.failure is not None}
    if len(result) == failures.total():
        name, reason = next(iter(reasons.items()), ("empty", "the workload has no requests"))
        raise ServeError(
            f"{url}: none of {len(result)} requests was answered; the first {name}: {reason}"
        )
    measured = measured_of(served, gaps, targets=targets)
    lags = [max(0.0, one.sent - one.served.arrival) for one in result]
    measured |= {"lag_p99_s": summary("lag", lags)["lag_p99_s"]}
    fields = {
        "url": url,
        "model": known.name,
        "workload": job.workload.model_dump(mode="json"),
        "requests": len(result),
        "measured": measured,
        "failures": dict(failures),
        "reasons": reasons,
        "samples": samples_of(served, gaps),
    }
    write_served(files, fields, known.name)
    if not shown:
        as_json({name: value for name, value in fields.items() if name != "samples"})
        return
    table("", ("", "measured"), measured_rows(measured), numeric=" r")
    for name, count in failures.items():
        typer.echo(f"{count} {name}, the first: {reasons[name]}")
