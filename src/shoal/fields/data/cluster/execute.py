"""A clustering from a plan to a report."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.bars import StackedBars
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.cluster.inputs import objects_of
from shoal.fields.data.cluster.job import ClusterJob
from shoal.fields.data.cluster.picture import cluster_map
from shoal.fields.data.cluster.protocols import (
    Clusterer,
    Clustering,
    ClusteringProblem,
    State,
)
from shoal.fields.running import RunOutcome, RunProgress

# Clusters of the picture.
_SHOWN = 20


def execute(job: ClusterJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Cluster, and write ``labels.parquet``, the method's own files and a picture of the sizes.

    Raises:
        ShoalError: the data cannot be read, or not be clustered like that.
    """
    progress.say(0.0, "reading")
    begun = time.perf_counter()
    objects = objects_of(job)
    read_s = time.perf_counter() - begun

    def tick(done: float, loss: float, state: State) -> None:
        passed = max(progress.seconds, 1e-9)
        swaps = state["swaps"]
        text = f"{swaps} swaps ({swaps / passed:,.0f}/s), loss {loss:.6g}"
        progress.tick(done, text, state, loss=loss, swaps=swaps)

    problem = ClusteringProblem(
        objects=objects,
        k=0 if job.k == "auto" else job.k,
        init=job.init,
        max_iter=job.max_iter,
        seed=job.seed,
        threads=job.threads,
        state=None if progress.state is None else dict(progress.state),
        tick=tick,
        say=progress.say,
    )
    method: Clusterer = table("clusterer").build(choice, where="method")
    clustering = method.cluster(problem)
    total_s = progress.seconds - read_s
    sizes = np.bincount(clustering.labels, minlength=len(clustering.names)).tolist()
    _write(clustering, sizes, progress.directory)
    picture = cluster_map(objects, clustering.labels, job.seed)
    write_atomic(progress.directory / "map.svg", picture)
    return RunOutcome(
        measured={"total_s": total_s, "read_s": read_s, **clustering.measured},
        details={
            "converged": clustering.converged,
            "what": clustering.what,
            "names": [*clustering.names],
            "sizes": sizes,
            "files": [*clustering.files, *clustering.pictures],
            **clustering.details,
        },
    )


def _write(clustering: Clustering, sizes: list[int], directory: Path) -> None:
    """Labels as Parquet, the method's files, a picture of the sizes; each whole or not at all."""
    arrow: Any = import_extra("pyarrow", extra="fields", purpose="writing labels")
    parquet: Any = import_extra("pyarrow.parquet", extra="fields", purpose="writing labels")
    columns = {
        "object": np.arange(len(clustering.labels)),
        "label": clustering.labels,
        **clustering.columns,
    }
    text = io.BytesIO()
    parquet.write_table(arrow.table(columns), text)
    write_atomic(directory / "labels.parquet", text.getvalue())
    for name, value in clustering.files.items():
        write_json(directory / name, value)
    for name, svg in clustering.pictures.items():
        write_atomic(directory / name, svg)
    largest = np.argsort(-np.array(sizes), kind="stable")[:_SHOWN]
    picture = StackedBars(
        f"objects of the {len(largest)} largest of {len(sizes)} clusters",
        {
            f"{place}: {clustering.what} {clustering.names[place]}": {
                "objects": float(sizes[place])
            }
            for place in largest
        },
        lambda value: f"{value:,.0f}",
    )
    write_atomic(directory / "clusters.svg", picture.render())
