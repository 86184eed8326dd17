"""A search from a plan to a report: serve until stopped, or load a server and measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table
from shoal.fields.retrieve.search.job import SearchJob
from shoal.fields.retrieve.search.keys import KeyRing
from shoal.fields.retrieve.search.load import run_load
from shoal.fields.retrieve.search.planning import load_documents
from shoal.fields.retrieve.search.protocols import TextEmbedder
from shoal.fields.retrieve.search.server import SearchOptions, running_search, serve_search
from shoal.fields.running import RunOutcome, RunProgress
from shoal.serve.http.app_server import check_host


def prepared(job: SearchJob, choice: Choice) -> Callable[[RunProgress], RunOutcome]:
    """What a run does: load a server of its own, or serve the job's directory until stopped.

    Raises:
        ShoalError: the keys cannot be read, or the address is not allowed.
    """
    embedder: TextEmbedder = table("embedder").build(job.embedder, where="embedder")
    if job.documents:
        return partial(_loaded, job, choice, embedder)
    options = SearchOptions(
        directory=Path(job.data),
        embedder=embedder,
        keys=KeyRing.read(job.keys),
        host=job.host,
        port=job.port,
        hosts=job.allow_host,
    )
    check_host(options.server())
    return partial(_served, options)


def _loaded(
    job: SearchJob, choice: Choice, embedder: TextEmbedder, progress: RunProgress
) -> RunOutcome:
    documents = load_documents(job)
    dim = embedder.embed([documents[0][0]]).shape[1]
    options = SearchOptions(directory=progress.directory / "collections", embedder=embedder, port=0)
    if options.directory.exists():
        raise ConfigError(f"{options.directory}: is left of a load that was stopped; remove it")
    progress.say(0.1, f"loading {len(documents):,} documents")
    with running_search(options) as url:
        result = run_load(
            {
                "url": url, "documents": documents, "dim": dim, "method": choice.name,
                "k": job.k, "queries": job.queries, "clients": job.clients, "seed": job.seed,
            }
        )  # fmt: skip
    seconds = result["query_s"]
    return RunOutcome(
        measured={
            "queries_per_s": len(seconds) / result["queries_s"],
            "query_p50_s": float(np.quantile(seconds, 0.5)),
            "query_p99_s": float(np.quantile(seconds, 0.99)),
            "upserts_per_s": len(documents) / result["upserts_s"],
        },
        details={"points": len(documents), "dim": dim, "queries": len(seconds)},
    )


def _served(options: SearchOptions, progress: RunProgress) -> RunOutcome:
    def ready(url: str) -> None:
        progress.event("serving", url=url)
        progress.say(0.0, f"{options.directory} is served at {url}; Ctrl-C stops")

    serve_search(options, ready=ready)
    seconds = list(options.metrics.query_s)
    details: dict[str, float] = {"queries": len(seconds)}
    if seconds:
        details |= {
            f"server_p{share}_s": float(np.quantile(seconds, share / 100)) for share in (50, 99)
        }
    return RunOutcome(measured={}, details=details)
