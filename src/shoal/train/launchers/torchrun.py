"""A shell script that starts a plan's ranks with torchrun."""

from __future__ import annotations

import shlex
from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import TrainPlan


def ranks_per_node(plan: TrainPlan) -> tuple[int, int]:
    """(nodes, ranks of a node) that the plan's world needs on its machine."""
    world = plan.job.parallel.world
    per_node = min(world, max(1, plan.machine.devices_per_node))
    if plan.machine.device.kind == "cpu":
        per_node = -(-world // plan.machine.nodes)
    return -(-world // per_node), per_node


@part
class Torchrun:
    """One ``torchrun`` command per node; only checkpoints need storage that all nodes share.

    Args:
        port: port of the rendezvous on the first node.
        restarts: how many times lost ranks are restarted from the last checkpoint.
    """

    port: Annotated[int, Ge(1024), Le(65535)] = 29500
    restarts: Annotated[int, Ge(0)] = 3

    def files(self, plan: TrainPlan) -> dict[str, str]:
        """``launch.sh``, which takes the node's number and the first node's address."""
        nodes, ranks = ranks_per_node(plan)
        name = shlex.quote(plan.job.name)
        script = f"""#!/bin/sh
# Start {plan.job.name}: {nodes} node(s) with {ranks} rank(s) each.
# Usage on node N (from 0): sh launch.sh N ADDRESS_OF_NODE_0
set -eu
exec torchrun --nnodes {nodes} --nproc-per-node {ranks} --max-restarts {self.restarts} \\
  --node-rank "${{1:-0}}" --master-addr "${{2:-127.0.0.1}}" --master-port {self.port} \\
  -m shoal train --plan plan.yaml --dir runs/{name} --resume
"""
        return {"launch.sh": script}
