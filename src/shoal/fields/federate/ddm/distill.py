"""Distillation of an ensemble into one network of the same shape, which needs no router.

The student matches the velocity of the whole ensemble at noisy samples of the data.

Source: McAllister et al., Decentralized Diffusion Models, 2025, section 3.4.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.fields.federate.ddm.ensemble import Ensemble
from shoal.fields.federate.ddm.protocols import FlowData, NetworkTask
from shoal.fields.federate.ddm.training import NetworkTraining, train_to_the_end


class StudentTraining(NetworkTraining):
    """A network that learns the velocity of an ensemble.

    Args:
        task: how it is trained; without labels.
        data: whose noisy samples it sees.
        teacher: the ensemble.
    """

    def __init__(self, task: NetworkTask, data: FlowData, teacher: Ensemble) -> None:
        super().__init__(task, data)
        self.teacher = teacher

    def target(self, x: torch.Tensor, t: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        """What the ensemble says, in the place of one noise's velocity."""
        with torch.no_grad():
            return self.teacher.velocity(x, t)


def distill(directory: Path, task: NetworkTask, data: FlowData, teacher: Ensemble) -> None:
    """Train a student to the end; it is ``student/model.safetensors`` in the directory of the run.

    Args:
        directory: of the run; a student that was stopped goes on.
        task: of the student, an expert of all the data.
        data: whose noisy samples it sees.
        teacher: the ensemble.
    """
    place = directory / "student"
    place.mkdir(exist_ok=True)
    student = StudentTraining(task, data, teacher)
    train_to_the_end(place, student, lambda step, loss: None)
