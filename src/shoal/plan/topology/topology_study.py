"""``shoal explain topology``: which device is which rank, where clusters' networks differ?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from shoal.core.files import to_yaml
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.ir import Explanation, Machine, Progress, TrainJob
from shoal.machine.described import load
from shoal.plan.topology.clusters import Clusters
from shoal.plan.topology.groups import Group
from shoal.plan.topology.order import RankOrder, plan_order
from shoal.plan.topology.picture import picture

_AXES = ("tp", "dp", "pp")


@part
class TopologyStudy:
    """Arrange ranks so that gradients are summed inside clusters and only pipelines cross them.

    Simulates orders of clusters and degrees, and divides layers by the speed of each stage's
    devices. The settings of a training job are saved as job.yaml.

    **Examples**

        shoal explain topology clusters.yaml --model GPT-3-6.7B

        shoal explain topology clusters.yaml --model GPT-3-6.7B --pp 4 --tp 8 --picture ranks.svg

        shoal explain topology clusters.yaml --model shoal-16m --out split -o json

    Args:
        clusters: clusters and their networks, in YAML; or a machine with sites.
        model: a model's name, directory or file.
        pp: pipeline stages; searched, if not given.
        tp: ranks of a layer; searched, if not given.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        microbatch: sequences of a forward pass.
        alpha: factor on the share of layers of faster stages.
        overlap: sum gradients behind the passes around the update.
    """

    subject: ClassVar = "clusters"
    machine: ClassVar = None

    clusters: str
    model: str
    pp: PositiveInt | None = None
    tp: PositiveInt | None = None
    seq_len: PositiveInt = 2048
    global_batch: PositiveInt = 256
    microbatch: PositiveInt = 1
    alpha: float = 1.05
    overlap: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The best order of devices, its groups, and what a training job says of it."""
        file = Path(self.clusters)
        clusters = Clusters.load(file) if file.is_file() else Clusters.of(load(self.clusters))
        job = TrainJob(
            model=self.model,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            microbatch=self.microbatch,
        )
        result = plan_order(
            job, clusters, pp=self.pp, tp=self.tp, overlap=self.overlap, alpha=self.alpha
        )
        split = result.parallel().model_dump(mode="json", exclude_defaults=True)
        # Said even where it is the default: the hosts are listed for this order.
        split["order"] = result.parallel().order
        hosts = [result.host(node) for node in result.hosts]
        listed = ", ".join(hosts)
        grid = result.grid
        groups = Table(
            title=f"{self.model} on {clusters.name}: pp={grid.pp} dp={grid.dp} tp={grid.tp}, "
            f"{digits(result.step.seconds)} s a step",
            columns=("groups", "members", "network", "GB/s", "clusters"),
            rows=tuple(_row(result, axis, one) for axis in _AXES for one in _first(result, axis)),
            right="   rr",
        )
        blocks = [
            "one group of each kind and stage; GB/s of a member while all groups talk",
            f"hosts in this order: {listed}",
            f"layers of the stages: {_numbers(result.step.stages)} (by speed "
            f"{_numbers(result.rule)}, exact {_numbers(result.cut)})",
        ]
        if result.reason:
            blocks.append(f"{result.crossing} dp groups cross: {result.reason}")
        if not result.fits:
            blocks.append(f"does not fit: about {human_bytes(result.memory_bytes)} a rank")
        written = {"microbatch": self.microbatch, "parallel": split}
        return Explanation(
            blocks=(groups, *blocks),
            data=_record(result, split, hosts),
            picture=lambda: picture(result),
            files={"job.yaml": to_yaml(written, header=f"Hosts in this order: {listed}")},
        )


def _row(order: RankOrder, axis: str, group: Group) -> tuple[str, ...]:
    members = ", ".join(order.where(rank) for rank in group.ranks[:4])
    return (
        f"{axis} of stage {group.ranks[0] // order.grid.per_stage}" if axis != "pp" else axis,
        members + (f" and {len(group.ranks) - 4} more" if len(group.ranks) > 4 else ""),
        group.nic,
        digits(group.bandwidth / 1e9) if len(group.ranks) > 1 else "-",
        str(group.clusters),
    )


def _first(order: RankOrder, axis: str) -> list[Group]:
    """One group of each stage; pipelines are alike."""
    groups = order.groups(axis)
    return groups[:1] if axis == "pp" else groups[:: len(groups) // order.grid.pp]


def _numbers(stages: tuple[int, ...]) -> str:
    return " ".join(map(str, stages))


def _record(order: RankOrder, split: dict[str, Any], hosts: list[str]) -> dict[str, Any]:
    return {
        "parallel": split,
        "hosts": hosts,
        "devices": [order.where(rank) for rank in range(order.grid.world)],
        "step_s": order.step.seconds,
        "pipeline_s": order.step.pipeline_s,
        "sync_s": list(order.step.sync_s),
        "busy_s": list(order.step.busy_s),
        "stages": {"chosen": order.step.stages, "by_speed": order.rule, "exact": order.cut},
        "memory_bytes": order.memory_bytes,
        "fits": order.fits,
        "crossing": order.crossing,
        "reason": order.reason,
        "groups": {
            axis: [
                {
                    "ranks": group.ranks,
                    "members": [order.where(rank) for rank in group.ranks],
                    "nic": group.nic,
                    "bandwidth": group.bandwidth if len(group.ranks) > 1 else None,
                    "clusters": group.clusters,
                }
                for group in order.groups(axis)
            ]
            for axis in _AXES
        },
    }
