"""An embedding from a plan to a report: read, embed, write, judge, draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import open_atomic, write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.graph.embedding.inputs import graph_of_job, judged_nodes
from shoal.fields.graph.embedding.job import EmbedNodesJob
from shoal.fields.graph.embedding.judging import judged_f1
from shoal.fields.graph.embedding.picture import node_map
from shoal.fields.graph.embedding.protocols import NodeEmbedder
from shoal.fields.rates import timed_call
from shoal.fields.running import RunOutcome, RunProgress

FILES = ("embedding.npy", "ids.npy", "embedding.json")
"""Vectors [N, dim], names of the nodes [N], and where they come from."""


def execute(job: EmbedNodesJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Embed all nodes; with labels, measure how well a classifier names those it does not see.

    Raises:
        ShoalError: the graph cannot be read or embedded.
    """
    progress.say(0.0, "reading")
    read_s, graph = timed_call(lambda: graph_of_job(job))
    method: NodeEmbedder = table("node_embedder").build(choice, where="method")
    judged = judged_nodes(job, graph)
    progress.say(0.2, f"embedding {graph.num_nodes:,} nodes by {choice.name}")
    tuning = None if judged is None else judged[1]
    embed_s, embedding = timed_call(
        lambda: method.fit(graph, seed=job.seed, threads=job.threads, tuning=tuning)
    )
    progress.say(0.7, "writing")
    vectors = embedding.vectors
    ids = np.arange(graph.num_nodes) if graph.ids is None else graph.ids
    _write(progress.directory / FILES[0], vectors)
    _write(progress.directory / FILES[1], ids)
    details: dict[str, Any] = {
        "method": choice.model_dump(mode="json"),
        "seed": job.seed,
        "data": job.data,
        "num_nodes": graph.num_nodes,
        "nnz": graph.nnz,
        **graph.counts,
        "isolated": len(embedding.isolated),
        **embedding.details,
    }
    names = [str(ids[row]) for row in embedding.isolated]
    write_json(progress.directory / FILES[2], {**details, "isolated_nodes": names})
    measured = {
        "embed_s": embed_s,
        "read_s": read_s,
        "vector_bytes": float((progress.directory / FILES[0]).stat().st_size),
    }
    if judged is not None:
        assert graph.labels is not None
        progress.say(0.8, "judging")
        f1 = judged_f1(vectors, graph.labels, judged[0])
        measured |= {"micro_f1": f1.micro, "macro_f1": f1.macro}
        details |= {"train": len(judged[0].train), "test": len(judged[0].test)}
    picture = node_map(vectors, graph.labels, job.seed)
    write_atomic(progress.directory / "map.svg", picture)
    return RunOutcome(measured=measured, details={**details, "files": list(FILES)})


def _write(path: Path, array: np.ndarray) -> None:
    with open_atomic(path) as file:
        np.save(file, array, allow_pickle=False)
