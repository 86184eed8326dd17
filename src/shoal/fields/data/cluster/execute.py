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
from shoal.fields.data.cluster.protocols import ClusteringProblem, State
from shoal.fields.data.cluster.solve import ClusteringSolution, solve
from shoal.fields.running import RunOutcome, RunProgress

# Clusters of the picture.
_SHOWN = 20


def execute(job: ClusterJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Cluster, and write ``labels.parquet``, ``medoids.json`` and a picture.

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
        k=job.k,
        init=job.init,
        max_iter=job.max_iter,
        seed=job.seed,
        threads=job.threads,
        state=None if progress.state is None else dict(progress.state),
        tick=tick,
        computing=lambda done: progress.say(done, "dissimilarities"),
    )
    solution = solve(table("clusterer").build(choice, where="method"), problem)
    result = solution.result
    total_s = progress.seconds - read_s
    _write(solution, progress.directory)
    picture = cluster_map(objects, solution.labels, job.seed)
    write_atomic(progress.directory / "map.svg", picture)
    return RunOutcome(
        measured={
            "total_s": total_s,
            "read_s": read_s,
            "loss": solution.loss,
            "swaps": float(result.swaps),
            "passes": float(result.passes),
        },
        details={
            "converged": result.converged,
            "medoids": np.asarray(result.medoids).tolist(),
            "sizes": np.bincount(solution.labels, minlength=job.k).tolist(),
        },
    )


def _write(solution: ClusteringSolution, directory: Path) -> None:
    """Labels as Parquet, medoids as JSON, a picture of the sizes; each file whole or not at all."""
    arrow: Any = import_extra("pyarrow", extra="fields", purpose="writing labels")
    parquet: Any = import_extra("pyarrow.parquet", extra="fields", purpose="writing labels")
    columns = {
        "object": np.arange(len(solution.labels)),
        "label": solution.labels,
        "medoid": np.asarray(solution.result.medoids)[solution.labels],
        "dissimilarity": solution.nearest,
    }
    text = io.BytesIO()
    parquet.write_table(arrow.table(columns), text)
    write_atomic(directory / "labels.parquet", text.getvalue())
    sizes = np.bincount(solution.labels, minlength=len(solution.result.medoids))
    medoids = np.asarray(solution.result.medoids).tolist()
    write_json(
        directory / "medoids.json",
        {"medoids": medoids, "loss": solution.loss, "sizes": sizes.tolist()},
    )
    largest = np.argsort(-sizes, kind="stable")[:_SHOWN]
    picture = StackedBars(
        f"objects of the {len(largest)} largest of {len(sizes)} clusters",
        {
            f"{place}: medoid {medoids[place]}": {"objects": float(sizes[place])}
            for place in largest
        },
        lambda value: f"{value:,.0f}",
    )
    write_atomic(directory / "clusters.svg", picture.render())
