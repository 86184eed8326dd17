"""Launch files of a plan whose phases have instances of their own: what engines share of it.

Each phase has a configuration and a script that starts one of its instances, given by a number;
one more script starts what stands before all of them and knows their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.files import to_yaml
from shoal.ir import Phase, ServePlan
from shoal.plan.emit.shared import header, script

# Between the first ports of prefill and of decode instances, which stand above the router's.
_APART = 100


def phases_of(plan: ServePlan) -> dict[str, Phase]:
    """Name -> phase; empty where one engine does both."""
    disagg = plan.job.disagg
    return {} if disagg is None else {"prefill": disagg.prefill, "decode": disagg.decode}


def first_port(port: int, phase: str) -> int:
    """Port of the first instance of a phase, above that of the router."""
    return port + _APART * (1 if phase == "prefill" else 2)


def urls(plan: ServePlan, phase: str, port: int) -> list[str]:
    """Addresses of the instances of a phase, on this host until edited."""
    first = first_port(port, phase)
    return [f"http://127.0.0.1:{first + n}" for n in range(phases_of(plan)[phase].count)]


def instance_number(phase: Phase) -> str:
    """Shell lines: which instance this is, and which devices of the host are its own.

    Decode instances of the same host come after those that their caller started before.
    """
    each = phase.tp * phase.pp
    return (
        'n="${1:-0}"  # which instance of this phase, from 0\n'
        'first="${FIRST_DEVICE:-0}"\n'
        f"low=$((first + n * {each}))\n"
        f'CUDA_VISIBLE_DEVICES=$(seq -s, "$low" $((low + {each - 1})))\n'
        "export CUDA_VISIBLE_DEVICES\n"
    )


def phase_files(
    plan: ServePlan, configs: Mapping[str, dict[str, Any]], commands: Mapping[str, list[str]]
) -> dict[str, str]:
    """Name of a file -> its text: configuration and script of each phase."""
    phase_files = {}
    for name, phase in phases_of(plan).items():
        phase_files[f"{name}.yaml"] = header(plan) + to_yaml(configs[name])
        phase_files[f"{name}.sh"] = script(
            header(plan), commands[name], before=instance_number(phase)
        )
    return phase_files
