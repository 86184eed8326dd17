"""A batch script for Slurm."""

from __future__ import annotations

import re
from typing import Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import TrainPlan
from shoal.train.launchers.torchrun import ranks_per_node

_WORD = re.compile(r"^[A-Za-z0-9_.-]*$")


@part
class Slurm:
    """``sbatch launch.sbatch``; the job is requeued and resumed when a node is lost.

    Args:
        partition: partition to ask for; empty for the cluster's default.
        account: account to charge; empty for the user's default.
        hours: time limit.
        port: port of the rendezvous on the first node.
        restarts: how many times lost ranks are restarted before the job is requeued.
    """

    partition: str = ""
    account: str = ""
    hours: Annotated[float, Gt(0)] = 24.0
    port: Annotated[int, Ge(1024), Le(65535)] = 29500
    restarts: Annotated[int, Ge(0)] = 3

    def __post_init__(self) -> None:
        for key in ("partition", "account"):
            word = getattr(self, key)
            require(bool(_WORD.match(word)), f"launch.slurm.{key}", word, expected="a plain word")

    def files(self, plan: TrainPlan) -> dict[str, str]:
        """``launch.sbatch``."""
        nodes, ranks = ranks_per_node(plan)
        minutes = max(1, round(self.hours * 60))
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={plan.job.name}",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --time={minutes}",
            "#SBATCH --requeue",
            "#SBATCH --signal=TERM@120",
        ]
        if plan.machine.device.kind == "gpu":
            lines.append(f"#SBATCH --gpus-per-node={ranks}")
        if self.partition:
            lines.append(f"#SBATCH --partition={self.partition}")
        if self.account:
            lines.append(f"#SBATCH --account={self.account}")
        lines += [
            "set -eu",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun torchrun --nnodes {nodes} --nproc-per-node {ranks} \\",
            '  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \\',
            f"  --max-restarts {self.restarts} \\",
            f'  --rdzv-endpoint "$head:{self.port}" \\',
            f"  -m shoal train --plan plan.yaml --dir runs/{plan.job.name} --resume",
        ]
        return {"launch.sbatch": "\n".join(lines) + "\n"}
