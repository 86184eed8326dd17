"""[37] GNNPipe: do layers in a pipeline send less than nodes in parts, and learn as much?

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.

A network of 32 layers (GCNII) learns the sections of Debian's packages from the graph of their
dependencies, on four ranks: each with eight layers for the whole graph, whose chunks pass through,
or each with all layers for a quarter of the nodes, as METIS divides them, which is exact. Bytes are
counted where ranks send, gradients included; the first epoch of a pipeline, which is exact, does
not count. Seconds of an epoch are simulated: passes are timed here, and sent bytes take a link of 1
Gbit/s; other links are in the details. In the A/A run parts of nodes are in the pipeline's place.
"""

from __future__ import annotations

from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.fields.graph.deep.job import TrainDeepGnnJob

_LINKS = {"0.1 Gbit/s": 1.25e7, "1 Gbit/s": 1.25e8, "10 Gbit/s": 1.25e9}
_LATENCY_S = 5e-5
# Packages, below which the graph is another one.
_LEAST = 30_000


@part
class GNNPipeClaim(BaseClaim, row=37, needs=("torch", "pymetis")):
    """A pipeline of layers beside parts of nodes.

    Args:
        seeds: of parameters and orders of chunks.
        epochs: of each training.
        hidden: numbers of a vector.
        learning_rate: of Adam; of 0.005, 0.01 and 0.02 the one with which parts of nodes validate
            best, with another seed.
        rounds: of the timing of passes.
    """

    seeds: int = 3
    epochs: int = 60
    hidden: int = 32
    learning_rate: float = 0.02
    rounds: int = 7

    def collect(self, run: ClaimRun) -> None:
        """The quick run counts bytes on a planted graph; the full one trains and times."""
        given: dict[str, Any] = {"data": "planted:1000", "epochs": 2, "hidden": 8}
        if not run.quick:
            given = {
                "data": "packages", "epochs": self.epochs, "hidden": self.hidden,
                "learning_rate": self.learning_rate,
            }  # fmt: skip
        job = TrainDeepGnnJob(**given)
        names = [metric.name for metric in self.metrics]
        try:
            from shoal.fields.graph.deep.inputs import deep_graph

            nodes = deep_graph(job).graph.num_nodes
        except DataError as cause:
            run.skip(str(cause), *names)
            return
        few = not run.quick and nodes < _LEAST
        reason = f"{nodes:,} packages; apt-get update fetches the others" if few else None
        if run.lacks(reason, *names):
            return
        seeds = [run.seed + at for at in range(1 if run.quick else self.seeds)]
        rows = {
            split: [_trained(run, job, split, seed) for seed in seeds]
            for split in ("pipe", "nodes")
        }
        ours = rows[run.pick("pipe", "nodes")]
        run.put("bytes", rows["nodes"][0]["sent_bytes"], ours[0]["sent_bytes"])
        if run.quick:
            return
        gaps = [
            exact["test"] - stale["test"] for exact, stale in zip(rows["nodes"], ours, strict=True)
        ]
        best = sum(one["test"] for one in rows["nodes"]) / len(seeds)
        run.put("accuracy_gap", gaps, bound=best - 1)  # no label is wrong
        self._simulate(run, job)
        run.details.update(
            nodes=nodes,
            networks={
                split: [
                    {key: row[key] for key in ("val", "test", "epoch", "epoch_s")} for row in one
                ]
                for split, one in rows.items()
            },
        )

    def _simulate(self, run: ClaimRun, job: TrainDeepGnnJob) -> None:
        from shoal.claims.lab.deep_gnn_times import split_grid, timed_split
        from shoal.cost.pipeline.simulator import UniformLinks
        from shoal.fields.graph.deep.inputs import deep_graph, divide
        from shoal.fields.graph.deep.planning import work_of
        from shoal.kernel.threads import torch_threads

        data, seconds = deep_graph(job), dict[str, dict[str, float]]()
        exact = 1 / job.refresh if job.refresh else 0.0
        for split in ("pipe", "nodes"):
            grid = split_grid(split, job.ranks)
            division = divide(data, grid, job.layers)
            work = work_of(job, grid, division, data)
            with torch_threads(1):
                timed = timed_split(data.graph, division, work, self.rounds)
            seconds[split] = {
                name: timed.epoch_s(UniformLinks(rate, _LATENCY_S), exact=exact)
                for name, rate in _LINKS.items()
            }
            run.details[f"replicas_{split}"] = work.replicas
        link = "1 Gbit/s"
        run.put("epoch", seconds[run.pick("pipe", "nodes")][link], seconds["nodes"][link])
        run.details["epoch_s"] = seconds
        run.profile = "; ".join(
            f"{split}: an epoch of {one['1 Gbit/s']:.2f} s" for split, one in seconds.items()
        )


def _trained(run: ClaimRun, job: TrainDeepGnnJob, split: str, seed: int) -> dict[str, Any]:
    """A training with a split and a seed, once for both runs."""

    def train() -> Any:
        from shoal.claims.lab.deep_gnn_times import split_grid
        from shoal.fields.graph.deep.inputs import deep_graph, divide
        from shoal.fields.graph.deep.training import train_seed

        data, grid = deep_graph(job), split_grid(split, job.ranks)
        features = data.features_of(job.feature_dim, job.seed)
        watch = lambda epoch: run.progress(f"{split}, seed {seed}", 0.9 * epoch / job.epochs)  # noqa: E731
        row, *_ = train_seed(job, grid, data, features, divide(data, grid, job.layers), seed, watch)
        return row

    row: dict[str, Any] = run.remember(f"{split} {seed}", train)
    return row
