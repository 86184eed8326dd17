"""Manifests for Kubernetes: an indexed Job and a headless Service."""

from __future__ import annotations

import re
from typing import Annotated, Any

import yaml
from annotated_types import Ge, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import TrainPlan
from shoal.train.launchers.torchrun import ranks_per_node

_INDEX = "batch.kubernetes.io/job-completion-index"
# A container's own is 64 MiB, too small for NCCL.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


@part
class Kubernetes:
    """``kubectl apply -f launch.yaml``; a lost pod is restarted and the run resumed.

    Args:
        image: container image that has ``shoal-ml[run]`` installed.
        claim: persistent volume claim with the plan; mounted as the working directory.
        port: port of the rendezvous on pod 0.
        restarts: how many times lost ranks are restarted before the pod is.
    """

    image: str = "shoal:latest"
    claim: str = "shoal-runs"
    port: Annotated[int, Ge(1024), Le(65535)] = 29500
    restarts: Annotated[int, Ge(0)] = 3

    def __post_init__(self) -> None:
        require(bool(self.image), "launch.kubernetes.image", self.image, expected="an image name")
        require(bool(self.claim), "launch.kubernetes.claim", self.claim, expected="a claim's name")

    def files(self, plan: TrainPlan) -> dict[str, str]:
        """``launch.yaml`` with both objects."""
        nodes, ranks = ranks_per_node(plan)
        name = re.sub(r"[^a-z0-9-]+", "-", plan.job.name.lower()).strip("-") or "run"
        command = [
            "torchrun",
            f"--nnodes={nodes}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={self.restarts}",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            f"--master-addr={name}-0.{name}",
            f"--master-port={self.port}",
            "-m",
            "shoal",
            "train",
            "--plan=plan.yaml",
            f"--dir=runs/{plan.job.name}",
            "--resume",
        ]
        container: dict[str, Any] = {
            "name": "rank",
            "image": self.image,
            "workingDir": "/data",
            "command": command,
            "env": [
                {
                    "name": "JOB_COMPLETION_INDEX",
                    "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}},
                }
            ],
            "ports": [{"containerPort": self.port}],
            "volumeMounts": [
                {"name": "data", "mountPath": "/data"},
                {"name": "shm", "mountPath": _SHARED_MEMORY},
            ],
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        if plan.machine.device.kind == "gpu":
            container["resources"] = {"limits": {"nvidia.com/gpu": ranks}}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {
                "clusterIP": "None",
                "selector": {"job-name": name},
                "ports": [{"port": self.port}],
            },
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {
                "completions": nodes,
                "parallelism": nodes,
                "completionMode": "Indexed",
                "backoffLimit": 6,
                "template": {
                    "spec": {
                        "subdomain": name,
                        "restartPolicy": "OnFailure",
                        "containers": [container],
                        "volumes": [
                            {"name": "data", "persistentVolumeClaim": {"claimName": self.claim}},
                            {"name": "shm", "emptyDir": {"medium": "Memory"}},
                        ],
                    }
                },
            },
        }
        return {"launch.yaml": yaml.safe_dump_all([service, job], sort_keys=False)}
