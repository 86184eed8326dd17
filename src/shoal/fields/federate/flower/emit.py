"""A plan as the directory of a Flower app."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from annotated_types import Gt

from shoal.core.config import Kind
from shoal.core.errors import PlanError
from shoal.core.files import to_yaml
from shoal.core.parts import Choice, part
from shoal.core.traits import traits
from shoal.core.version import __version__
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.job import FederatePlan

# The trait of parts that Flower's server and nodes cannot run.
_OWN, _MEANS = "own_server", "it works in Shoal's own server and clients only"


@part
class FlowerApp:
    """An app for ``flwr run``: the plan, a server and a client that import Shoal.

    Args:
        cpus: that a client takes in Flower's simulation.
    """

    cpus: Annotated[float, Gt(0)] = 1.0

    def refuses(self, plan: Any) -> tuple[str, ...]:
        """Parts that work in Shoal's own server only."""
        if not isinstance(plan, FederatePlan):
            return (f"job = {plan.job.job}: Flower runs federations; plan one with job: federate",)
        return tuple(
            f"{key} = {choice.name}: {_MEANS}; use another, or shoal run federate"
            for key, kind, choice in _choices(plan)
            if _OWN in traits(kind, choice)
        )

    def emit(self, plan: Any) -> dict[str, str]:
        """Name of a file -> its text.

        Raises:
            PlanError: Flower cannot run the plan.
        """
        refused = self.refuses(plan)
        if refused:
            raise PlanError(f"--emit flower: Flower cannot run this plan: {'; '.join(refused)}")
        count = len(parse_clients(plan.job.clients))
        values = plan.model_dump(mode="json", exclude_none=True)
        return {
            "pyproject.toml": _project(plan.job.name, count, self.cpus),
            "README.md": _readme(plan.job.name, count),
            "federation/__init__.py": '"""A federation, written by shoal plan federate."""\n',
            "federation/plan.yaml": to_yaml(values),
            "federation/server_app.py": _half("server"),
            "federation/client_app.py": _half("client"),
        }


def _choices(plan: FederatePlan) -> Iterator[tuple[str, str, Choice]]:
    """Key, kind of part, and choice of all parts of a job."""
    for key, field in type(plan.job).model_fields.items():
        value = getattr(plan.job, key)
        inside = [
            note for one in get_args(field.annotation) for note in getattr(one, "__metadata__", ())
        ]
        for note in (*field.metadata, *inside):
            if isinstance(note, Kind) and isinstance(value, Choice):
                yield key, note.kind, value


def _half(name: str) -> str:
    return f'''"""The {name} of the federation: what plan.yaml beside this says."""

from pathlib import Path

from shoal.fields.federate.flower import {name}_app
from shoal.fields.federate.job import FederatePlan

app = {name}_app(FederatePlan.load(Path(__file__).with_name("plan.yaml")))
'''


def _project(name: str, clients: int, cpus: float) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    release = re.match(r"\d+(\.\d+)*", __version__)
    assert release is not None
    return f"""[project]
name = "{plain}"
version = "1.0.0"
description = "A federation, written by shoal plan federate"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = [
  "flwr[simulation]>=1.42",
  "safetensors>=0.5",
  "scikit-learn>=1.5",
  "shoal-ml>={release[0]}",
  "torch>=2.11",
]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "shoal"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

# Where the server writes model.safetensors and curve.json.
[tool.flwr.app.config]
out = "."

[tool.flwr.federations]
default = "local-simulation"

[tool.flwr.federations.local-simulation]
options.num-supernodes = {clients}
options.backend.client-resources.num-cpus = {cpus:g}
"""


def _readme(name: str, clients: int) -> str:
    return f"""# {name}

A federation of {clients} clients, written by `shoal plan federate --emit flower`.
`federation/plan.yaml` is the plan; server and client do what it says.

In Flower's simulation:

    pip install -e .
    flwr run .

On machines of their own, start a SuperLink, and node N of {clients}, counted from 0, with

    flower-supernode --node-config 'partition-id=N' ...

Every node reads its examples with the `data` and `partition` of the plan, which must give the same
on all of them. With `clock: virtual` the model is that of `shoal run federate --plan plan.yaml`;
with `clock: wall` updates are aggregated as they arrive.
"""
