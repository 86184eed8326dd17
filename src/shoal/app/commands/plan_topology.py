"""``shoal plan topology``: which device is which rank, where clusters have different networks?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.plan.topology.order import Order

__all__ = ["topology"]


def topology(
    machine: Annotated[
        str, typer.Argument(help="Clusters and their networks, in YAML; or a machine with sites.")
    ],
    model: Annotated[str, typer.Option(help="A model's name, directory or file.")],
    pp: Annotated[
        int | None, typer.Option(help="Pipeline stages; searched, if not given.", min=1)
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks of a layer; searched, if not given.", min=1)
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 2048,
    global_batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 256,
    microbatch: Annotated[int, typer.Option(help="Sequences of a forward pass.", min=1)] = 1,
    alpha: Annotated[
        float, typer.Option(help="How many more layers faster stages get than their share.")
    ] = 1.05,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Sum gradients behind the passes around the update.")
    ] = False,
    job: Annotated[
        Path | None, typer.Option(help="Write what a training job has to say, in YAML.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the ranks on their nodes.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Keep the sums of gradients inside clusters, and let pipelines alone cross between them.

    Orders of clusters and degrees are simulated, and layers cut by the speed of each stage's
    devices. **Examples**

        shoal plan topology clusters.yaml --model GPT-3-6.7B

        shoal plan topology clusters.yaml --model GPT-3-6.7B --pp 4 --tp 8 --svg ranks.svg

        shoal plan topology clusters.yaml --model shoal-16m --job split.yaml -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic, write_yaml
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.topology.clusters import Clusters
    from shoal.plan.topology.order import plan_order
    from shoal.plan.topology.picture import picture

    file = Path(machine)
    clusters = Clusters.load(file) if file.is_file() else Clusters.of(load(machine))
    wanted = TrainJob(
        model=model, seq_len=seq_len, global_batch=global_batch, microbatch=microbatch
    )
    found = plan_order(wanted, clusters, pp=pp, tp=tp, overlap=overlap, alpha=alpha)
    split = found.parallel().model_dump(mode="json", exclude_defaults=True)
    # Said even where it is the default: the hosts are listed for this order.
    split["order"] = found.parallel().order
    hosts = [found.host(node) for node in found.hosts]
    if svg is not None:
        write_atomic(svg, picture(found))
    if job is not None:
        text = f"Hosts in this order: {', '.join(hosts)}"
        write_yaml(job, {"microbatch": microbatch, "parallel": split}, header=text)
    if output is Format.json:
        as_json(_told(found, split, hosts))
        return
    grid = found.grid
    table(
        f"{model} on {clusters.name}: pp={grid.pp} dp={grid.dp} tp={grid.tp}, "
        f"{found.step.seconds:.3g} s a step",
        ("groups", "members", "network", "GB/s", "clusters"),
        [
            (
                f"{axis} of stage {group.ranks[0] // grid.per_stage}" if axis != "pp" else axis,
                _members(found, group.ranks),
                group.nic,
                f"{group.bandwidth / 1e9:.3g}" if len(group.ranks) > 1 else "-",
                str(group.clusters),
            )
            for axis in ("tp", "dp", "pp")
            for group in _first(found, axis)
        ],
        numeric="   rr",
    )
    typer.echo("one group of each kind and stage; GB/s of a member while all groups talk")
    typer.echo(f"hosts in this order: {', '.join(hosts)}")
    typer.echo(
        f"layers of the stages: {_numbers(found.step.stages)} (by speed {_numbers(found.rule)}, "
        f"exact {_numbers(found.cut)})"
    )
    if found.reason:
        typer.echo(f"{found.crossing} dp groups cross: {found.reason}")
    if not found.fits:
        typer.echo(f"does not fit: about {found.memory_bytes / 1e9:.3g} GB a rank")


def _first(order: Order, axis: str) -> list[Any]:
    """One group of each stage; pipelines are alike."""
    groups, grid = order.groups(axis), order.grid
    if axis == "pp":
        return groups[:1]
    each = len(groups) // grid.pp
    return groups[::each]


def _members(order: Order, ranks: tuple[int, ...]) -> str:
    shown = ", ".join(order.where(rank) for rank in ranks[:4])
    return shown + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _numbers(stages: tuple[int, ...]) -> str:
    return " ".join(map(str, stages))


def _told(order: Order, split: dict[str, Any], hosts: list[str]) -> dict[str, Any]:
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
            for axis in ("tp", "dp", "pp")
        },
    }
