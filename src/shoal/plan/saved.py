"""Plans that were saved: read, and held against the model and the machine that are here now.

What a plan says it is for is hashed by what decides its numbers. A plan for something else is
refused with both hashes and every field that differs: its prediction would be of another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import ConfigError, PlanError, ShoalError
from shoal.core.files import read_yaml
from shoal.cost.shapes import shape_of
from shoal.ir import Machine, ModelShape, Plan, Report, TrainPlan, kind_named, kind_of

# What a shape is called, and where its numbers come from, changes nothing.
_WORDS = {"name", "family", "source", "rope_base"}
# What decides how fast a probed host is, of everything that its fingerprint says.
_TELLING = ("cpu", "isa", "cores")
_MOST_LISTED = 6


def read_plan(path: Path) -> Plan[Any]:
    """The plan in a file, of any kind of job.

    Raises:
        ConfigError: the file is none, or was edited into something impossible; names the key.
    """
    raw = read_yaml(path)
    job = raw.get("job") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(job, dict) or "machine" not in raw:
        raise ConfigError(
            f"{path}: not a plan: there is no job with its machine in it; give the file that "
            "shoal plan train --out saved"
        )
    # Plans of version 0.1 that train do not say so.
    return kind_named(str(job.get("job", "train"))).plan_type.load(path)


def read_report(path: Path, plan: Plan[Any]) -> Report[Any] | None:
    """The report that a run of such a plan has left; None where there is none that can be read."""
    try:
        return kind_of(plan).report_type.model_validate_json(path.read_bytes())
    except (OSError, ValueError, ShoalError):  # of another version: the run makes it again
        return None


def mark(facts: Mapping[str, object]) -> str:
    """Twelve digits that are the same for the same facts."""
    text = json.dumps(dict(facts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def machine_marks(machine: Machine) -> dict[str, object]:
    """The facts that make two descriptions one machine: probing again does not change them."""
    fields = {f"fingerprint.{key}": machine.fingerprint.get(key, "") for key in _TELLING}
    return {
        "device.kind": machine.device.kind,
        "device.name": machine.device.name,
        "nodes": machine.nodes,
        "devices_per_node": machine.devices_per_node,
        **{key: value for key, value in fields.items() if value},
    }


def check_model(plan: TrainPlan, where: str) -> None:
    """Refuse a plan whose shape is not the one of the model that it names.

    Raises:
        PlanError: it is not; names every number that differs.
        ShoalError: there is no such model.
    """
    planned, result = _numbers(plan.shape), _numbers(shape_of(plan.job))
    if planned != result:
        raise PlanError(
            f"{where}: made for another model: its shape (hash {mark(planned)}) is not that of "
            f"{plan.job.model} (hash {mark(result)}): "
            f"{_differences(planned, result, 'the model')}; "
            f"plan again: shoal plan train {plan.job.model} --out {where}"
        )


def check_machine(plan: TrainPlan, here: Machine, where: str) -> None:
    """Refuse a plan that was made for another machine than ``here``, or for more than it has.

    Raises:
        PlanError: names every fact that differs, and what to do.
    """
    planned, result = machine_marks(plan.machine), machine_marks(here)
    # Only a probe has a fingerprint: a description is held against what both of them say.
    shared = [key for key in planned if key in result]
    one, other = ({key: facts[key] for key in shared} for facts in (planned, result))
    if one != other:
        raise PlanError(
            f"{where}: made for another machine: {plan.machine.name} (hash {mark(one)}) is not "
            f"{here.name} (hash {mark(other)}): {_differences(one, other, here.name)}; plan again "
            f"with shoal plan train {plan.job.model} --out {where}, write what starts it there "
            f"with --launch, or name the machine with --machine if this is {plan.machine.name}"
        )
    world = plan.job.parallel.world
    if here.device.kind == "gpu" and world > here.num_devices:
        raise PlanError(
            f"{where}: parallel: {world} ranks on the {here.num_devices} devices of {here.name}; "
            "lower a degree, or plan again with shoal plan train"
        )


def check_device(
    machine: Machine, here: Literal["cpu", "gpu"], what: str, *, anyway: bool = False
) -> None:
    """Refuse to run on one kind of device what was planned for another.

    Args:
        machine: what was planned for.
        here: kind of device that would compute.
        what: names the plan in the error.
        anyway: the user wants it; what is measured is not scored.

    Raises:
        PlanError: they differ.
    """
    if machine.device.kind == here or anyway:
        return
    kinds = {"cpu": "the CPU", "gpu": "GPUs"}
    raise PlanError(
        f"{what}: made for {kinds[machine.device.kind]} of {machine.name} "
        f"({machine.device.name}), and this host would compute on {kinds[here]}: its prediction "
        "would be of another run; plan for this host (--machine local, after shoal probe), write "
        "what starts it there with --launch, or give --anyway (anyway=True in Python) to run it "
        "here without scoring it"
    )


def _numbers(shape: ModelShape) -> dict[str, object]:
    return shape.model_dump(mode="json", exclude=_WORDS)


def _differences(planned: Mapping[str, object], found: Mapping[str, object], other: str) -> str:
    notes = [
        f"{key} is {planned[key]!r} in the plan and {found[key]!r} of {other}"
        for key in planned
        if planned[key] != found[key]
    ]
    more = f", and {len(notes) - _MOST_LISTED} more" if len(notes) > _MOST_LISTED else ""
    return ", ".join(notes[:_MOST_LISTED]) + more
