"""``shoal plan survival``: does the state in memory outlive its nodes, and how often to save?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["survival"]


def survival(
    nodes: Annotated[int, typer.Option(help="Nodes of the job.")] = 64,
    group: Annotated[int, typer.Option(help="Nodes of a coding group.")] = 4,
    losses: Annotated[int, typer.Option(help="Nodes of a group that the code survives.")] = 1,
    mtbf_h: Annotated[float, typer.Option(help="Mean life of a node, hours.")] = 10_000.0,
    shape: Annotated[float, typer.Option(help="Of the Weibull distribution of lives.")] = 1.0,
    hours: Annotated[float, typer.Option(help="Time without any replacement, hours.")] = 24.0,
    step_s: Annotated[float, typer.Option(help="Seconds of a step.")] = 10.0,
    memory_s: Annotated[float, typer.Option(help="Stall of a snapshot in memory, s.")] = 0.1,
    storage_s: Annotated[float, typer.Option(help="Stall of a save to storage, s.")] = 30.0,
    restart_s: Annotated[float, typer.Option(help="From a failure until it goes on, s.")] = 60.0,
    read_s: Annotated[float, typer.Option(help="More of it where storage is read, s.")] = 300.0,
    repair_h: Annotated[float, typer.Option(help="Until a lost node is replaced, hours.")] = 0.1,
    trials: Annotated[int, typer.Option(help="Simulated jobs; 0 for none.", min=0)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.", min=0)] = 0,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Compute how likely state in memory survives, and the interval at which saving costs least.

    Lives of nodes are Weibull; the formula is held against as many simulated jobs. The shares of
    time lost compare snapshots in memory with saving to storage alone.

    **Examples**

        shoal plan survival --nodes 64 --group 4

        shoal plan survival --nodes 64 --group 8 --losses 2 --mtbf-h 5000 --hours 48

        shoal plan survival --nodes 1024 --group 4 --storage-s 60 --step-s 20 -o json
    """
    from shoal.app.show import as_json, table
    from shoal.plan.survival import Saving, Survival, daly, sampled, young

    job = Survival(nodes=nodes, group=group, losses=losses, mtbf_h=mtbf_h, shape=shape)
    mtbf_s = 3600 * job.job_mtbf_h
    storage = Saving.storage(storage_s, mtbf_s, restart_s + read_s)
    memory = Saving.memory(
        memory_s, step_s, job, repair_h, restart_s, (storage_s, restart_s + read_s)
    )
    chances = {
        "node": job.node(hours),
        "group": job.of_group(hours),
        "job": job.of_job(hours),
        "job, simulated": sampled(job, hours, trials=trials, seed=seed) if trials else None,
        "job, no code": job.uncoded(hours),
    }
    intervals = {
        "young_s": young(storage_s, mtbf_s),
        "daly_s": daly(storage_s, mtbf_s),
        "job_mtbf_h": job.job_mtbf_h,
    }
    if output is Format.json:
        as_json(
            {
                "survival": job.model_dump(),
                "hours": hours,
                "chances": chances,
                "storage": intervals,
                "levels": [one.model_dump() for one in (memory, storage)],
            }
        )
        return
    table(
        f"state left after {hours:g} h, nothing replaced",
        ("of", "probability"),
        [(name, f"{chance:.6f}") for name, chance in chances.items() if chance is not None],
        numeric=" r",
    )
    table(
        f"a failure of any of {nodes} nodes every {job.job_mtbf_h:.3g} h",
        ("saves to", "every", "time lost"),
        [(one.name, f"{one.interval_s:.4g} s", f"{one.lost:.3%}") for one in (memory, storage)],
        numeric=" rr",
    )
    typer.echo(
        f"storage alone: every {intervals['young_s']:.4g} s by Young, "
        f"{intervals['daly_s']:.4g} s by Daly"
    )
