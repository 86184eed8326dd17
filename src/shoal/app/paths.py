"""What ``shoal plan paths`` does, shows and writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.app.show import WorkBar, console, table
from shoal.core.config import resolve
from shoal.core.errors import ConfigError, require
from shoal.core.files import write_atomic
from shoal.core.parts import Choice
from shoal.core.svg import Chart, Series
from shoal.cost.network.collectives import Collective, collective, place
from shoal.cost.network.fabric import LeafSpine
from shoal.plan.paths import PATH_PLANNERS
from shoal.plan.paths.compare import Compared, compare

__all__ = ["asked", "compared", "picture", "show", "summary", "write"]

_MOST_FLOWS = 4_000_000
_HEALTH = re.compile(r"(\d+)-(\d+)(?:=(\d*\.?\d+))?")


def asked(
    file: Path | None, flags: dict[str, Any], broken: Sequence[str], machine: str | None
) -> LeafSpine:
    """The fabric of a file or a machine, with flags over it.

    Raises:
        ConfigError: a file or flag that cannot be used.
        MachineError: a fabric that cannot be.
    """
    base = None
    if machine is not None:
        from shoal.machine.described import load

        require(file is None, "--machine", machine, expected="no file of a fabric beside it")
        found = load(machine)
        require(
            found.fabric is not None,
            "--machine",
            machine,
            expected="a machine whose description has a fabric",
            hint="give --leaves, --hosts and --spines, or a file",
        )
        assert found.fabric is not None
        base = LeafSpine.of(found.fabric)
    health = [_broken(word) for word in broken]
    return resolve(LeafSpine, base=base, file=file, flags={**flags, "health": health or None}).value


def _broken(word: str) -> dict[str, float]:
    found = _HEALTH.fullmatch(word)
    require(
        found is not None,
        "--broken",
        word,
        expected="LEAF-SPINE for links that are down, or LEAF-SPINE=SHARE for slow ones",
        hint="such as 3-0 or 3-0=0.5",
    )
    assert found is not None
    return {
        "leaf": int(found[1]),
        "spine": int(found[2]),
        "share": float(found[3] or 0.0),
    }


def compared(
    fabric: LeafSpine,
    *,
    name: str,
    algorithm: str | None,
    size: float,
    placement: str,
    ranks: int | None,
    policies: Sequence[str],
    seed: int,
    start: float,
    jitter: float,
    resolution: float,
) -> tuple[Collective, list[Compared]]:
    """The collective, and what every policy reaches.

    Raises:
        PlanError: a policy or a collective that cannot be planned here.
    """
    hosts = place(fabric, placement, ranks=ranks, seed=seed)
    if name == "all_to_all":
        require(
            len(hosts) ** 2 <= _MOST_FLOWS,
            "--ranks",
            len(hosts),
            expected=f"at most {int(_MOST_FLOWS**0.5)} for an all-to-all",
        )
    job = collective(name, hosts, size, algorithm=algorithm, fabric=fabric)
    chosen: list[Choice | str] = [*policies]
    if "all" in policies:
        # The colouring behind split is about equal links; asked for by name, it says so.
        chosen = [name for name in PATH_PLANNERS if name != "split" or fabric.uniform]
    with WorkBar("paths") as bar:
        found = compare(
            job,
            fabric,
            chosen,
            seed=seed,
            start=start,
            size=jitter,
            resolution=resolution,
            progress=lambda text, share: bar(share, 1.0, text),
        )
    return job, found


def summary(fabric: LeafSpine, job: Collective, found: Sequence[Compared]) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "fabric": fabric.model_dump(mode="json", exclude_none=True),
        "collective": job.name,
        "algorithm": job.algorithm,
        "bytes": job.size,
        "flows": len(job.flows),
        "phases": int(job.repeats.sum()),
        "bound_s": found[0].bound_s,
        "policies": [
            {
                "policy": item.planner,
                "seconds": item.seconds,
                "congestion": item.congestion,
                "connections_per_flow": item.connections,
                "most_connections_on_a_link": item.busiest,
                "uplink_bytes": item.up.tolist(),
                "downlink_bytes": item.down.tolist(),
                "notes": list(item.notes),
            }
            for item in found
        ],
    }


def picture(job: Collective, found: Sequence[Compared]) -> str:
    """Bytes of every link between leaf and spine, busiest first, as SVG."""
    series = []
    for item in found:
        loads = sorted((*item.up.ravel().tolist(), *item.down.ravel().tolist()), reverse=True)
        places = [100.0 * i / max(1, len(loads) - 1) for i in range(len(loads))]
        series.append(Series(item.planner, places, loads))
    return Chart(
        title=f"Loads of links, {job.name} by {job.algorithm}",
        description="Bytes on each link between leaf and spine, sorted, for each policy; "
        "a flat line is an even load.",
        x_label="links, busiest first (%)",
        y_label="bytes",
        series=series,
    ).render()


def write(path: Path, job: Collective, found: Sequence[Compared]) -> None:
    """Write the picture.

    Raises:
        ConfigError: it cannot be written.
    """
    write_atomic(path, picture(job, found), error=ConfigError)


def show(fabric: LeafSpine, job: Collective, found: Sequence[Compared]) -> None:
    """Print what every policy reaches, fastest first."""
    rails = f", {fabric.rails} rails" if fabric.rails > 1 else ""
    ports = f", {fabric.ports} ports a card" if fabric.ports > 1 else ""
    console().print(
        f"{fabric.leaves} leaves of {fabric.hosts} hosts, {fabric.spines} spines{rails}{ports}: "
        f"{job.name} of {job.size:.3g} B by {job.algorithm}, {len(job.flows):,} different flows; "
        f"no paths take less than {1e3 * found[0].bound_s:.4g} ms",
        markup=False,
    )
    ranked = sorted(found, key=lambda item: (item.seconds, item.connections))
    table(
        "policies, fastest first",
        ("policy", "ms", "over bound", "congestion", "paths a flow", "most on a link"),
        [
            (
                item.planner,
                f"{1e3 * item.seconds:.4g}",
                f"{item.seconds / item.bound_s:.2f}x" if item.bound_s else "",
                f"{item.congestion:.2f}x",
                f"{item.connections:.3g}",
                item.busiest or "all",
            )
            for item in ranked
        ],
        numeric=" rrrrr",
    )
    console().print("congestion: bytes on the busiest link over those of ideal spraying")
    for item in ranked:
        for note in item.notes:
            console().print(f"note: {item.planner}: {note}", markup=False)
