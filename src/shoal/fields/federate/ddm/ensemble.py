"""Experts and their router as one model: its velocity, samples, and guidance.

Source: McAllister et al., Decentralized Diffusion Models, 2025, sections 3.1 and 3.3; guidance: Ho
and Salimans, Classifier-Free Diffusion Guidance, 2022.

Shapes: N samples, D numbers each, K experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.federate.ddm.protocols import ExpertMixture, NetworkTask
from shoal.fields.federate.ddm.training import build_network, read_tensors
from shoal.fields.federate.protocols import FederationError
from shoal.model.flow import PATHS

Velocity = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [N, D], t [N], labels [N] or None) -> [N, D]; of a router -> logits [N, K]."""

Mode = Choice | str | Mapping[str, Any]
"""A part of the table ``expert_mixture``."""

MANIFEST = "experts.json"
_BATCH = 2048


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Experts and a router.

    Args:
        experts: of each cluster; None for one that is missing, whose weight the others take.
        router: logits of the clusters.
        features: numbers of a sample, D.
        image: shape of a sample.
        low: what -1 stands for in the data.
        high: what 1 stands for.
        classes: labels that may be asked for; 0 for none.
    """

    experts: Sequence[Velocity | None]
    router: Velocity
    features: int
    image: tuple[int, ...] = ()
    low: float = -1.0
    high: float = 1.0
    classes: int = 0

    def probabilities(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Of the cluster of each noisy sample, [N, K]; zero for a missing expert."""
        logits = self.router(x, t, labels)
        if logits.shape[-1] != len(self.experts):
            raise FederationError(
                f"router: of {logits.shape[-1]} experts, and there are {len(self.experts)}; train "
                "it with them"
            )
        gone = [at for at, expert in enumerate(self.experts) if expert is None]
        if gone:
            logits = logits.index_fill(-1, torch.tensor(gone), -math.inf)
        return logits.softmax(-1)

    def velocity(
        self,
        x: Tensor,
        t: Tensor,
        *,
        mode: Mode = "full",
        draw: np.random.Generator | None = None,
        labels: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Of noisy samples [N, D] at times [N].

        Args:
            x: noisy samples.
            t: their times, in 0 to 1.
            mode: which experts work: ``full``, ``top1``, ``{"name": "topm", "m": 2}``, ``sample``.
            draw: of the mixtures that draw.
            labels: int64 [N], for models that were trained with labels.
            guidance: weight of the mixed velocity with labels over that without; 1 for none.
        """
        mixture: ExpertMixture = table("expert_mixture").build(mode, where="mode")
        draw = draw or np.random.default_rng(0)
        mixed = self._mixed(x, t, labels, mixture, draw)
        if labels is None or guidance == 1.0:
            return mixed
        plain = self._mixed(x, t, None, mixture, draw)
        return plain + guidance * (mixed - plain)

    def _mixed(
        self,
        x: Tensor,
        t: Tensor,
        labels: Tensor | None,
        mixture: ExpertMixture,
        draw: np.random.Generator,
    ) -> Tensor:
        weights = mixture.weights(self.probabilities(x, t, labels), draw)
        result = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            rows = weights[:, at].nonzero()[:, 0]
            if len(rows) and expert is not None:
                some = None if labels is None else labels[rows]
                velocity = expert(x[rows], t[rows], some)
                result.index_add_(0, rows, weights[rows, at, None] * velocity)
        return result

    @torch.no_grad()
    def sample(
        self,
        n: int,
        *,
        mode: Mode = "top1",
        steps: int = 50,
        label: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
    ) -> np.ndarray:
        """Samples float32 [N, ...] in the scale of the data, by Euler's steps from noise.

        Args:
            n: how many.
            mode: as of :meth:`velocity`.
            steps: how many.
            label: of all samples, for models that were trained with labels.
            guidance: as of :meth:`velocity`.
            seed: of the noise.

        Raises:
            FederationError: a label or a guidance that the model was not trained for.
        """
        if n < 1 or steps < 1:
            raise FederationError(f"sample: n = {n}, steps = {steps}; expected at least 1 of each")
        if label is None and guidance != 1.0:
            raise FederationError("sample: guidance needs a label")
        if label is not None and not 0 <= label < self.classes:
            expected = f"one of 0 to {self.classes - 1}" if self.classes else "none: the experts "
            more = "" if self.classes else "were trained without labels (conditional: false)"
            raise FederationError(f"sample: label {label}; expected {expected}{more}")
        batches = []
        for first in range(0, n, _BATCH):
            count = min(_BATCH, n - first)
            draw = generator(seed, purpose="samples of a flow", index=first)
            x = torch.from_numpy(draw.standard_normal((count, self.features), np.float32))
            labels = None if label is None else torch.full((count,), label)
            for step in range(steps):
                t = torch.full((count,), 1 - step / steps)
                x = (
                    x
                    - self.velocity(x, t, mode=mode, draw=draw, labels=labels, guidance=guidance)
                    / steps
                )
            batches.append(x.numpy())
        whole = (np.concatenate(batches) + 1) / 2 * (self.high - self.low) + self.low
        return whole.reshape(n, *self.image) if self.image else whole

    @torch.no_grad()
    def loss(
        self,
        x: np.ndarray,
        *,
        path: str = "linear",
        mode: Mode = "full",
        draws: int = 8,
        seed: int = 0,
    ) -> float:
        """Mean squared error of the velocity at noisy samples of data in -1 to 1, [N, D]."""
        errors = []
        for turn in range(draws):
            draw = generator(seed, purpose="flow loss", step=turn)
            noise = torch.from_numpy(draw.standard_normal(x.shape, np.float32))
            t = torch.from_numpy((draw.permutation(len(x)) + draw.random(len(x))) / len(x)).float()
            place, velocity = PATHS[path].between(torch.from_numpy(x), noise, t)
            found = self.velocity(place, t, mode=mode, draw=draw)
            errors.append(float(torch.nn.functional.mse_loss(found, velocity)))
        return float(np.mean(errors))


def load_ensemble(directory: Path | str, *, degrade: bool = False) -> Ensemble:
    """The experts and the router in the directory of a run.

    Args:
        directory: of the run.
        degrade: go on without experts that are missing; the router's weights go to the others.

    Raises:
        FederationError: a file is missing or damaged, or the networks do not belong together.
    """
    root = Path(directory)
    try:
        words = json.loads((root / MANIFEST).read_bytes())
        count, image = int(words["experts"]), tuple(int(one) for one in words["image"])
        low, high, classes = float(words["low"]), float(words["high"]), int(words["classes"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise FederationError(
            f"{root / MANIFEST}: cannot be read ({cause}); give the directory of a run of "
            "train_experts that has ended"
        ) from cause
    experts: list[Velocity | None] = []
    tasks: list[NetworkTask] = []
    for at in range(count):
        path = root / "islands" / str(at) / "model.safetensors"
        if path.exists():
            network, task = read_network(path)
            experts.append(network)
            tasks.append(task)
        elif degrade:
            experts.append(None)
        else:
            raise FederationError(
                f"{path}: expert {at} of {count} is missing; continue the run with --resume, or "
                "go on without it: degrade=True"
            )
    if not tasks:
        raise FederationError(f"{root}: all {count} experts are missing; train one at least")
    router: Velocity = _alone
    if count > 1:
        router, task = read_network(root / "router" / "model.safetensors")
        tasks.append(task)
    check_together(tasks, count)
    features = tasks[0].shape.features
    return Ensemble(experts, router, features, image, low, high, classes)


def read_network(path: Path) -> tuple[Velocity, NetworkTask]:
    """A trained network and how it was trained.

    Raises:
        FederationError: no such checkpoint.
    """
    tensors, words = read_tensors(path)
    try:
        task = NetworkTask.model_validate(words["task"])
        stored = sum(one.numel() for one in tensors.values())
        if stored != task.shape.parameters:  # before a network of any size is made
            raise ValueError(f"{stored} numbers for {task.shape.parameters} parameters")
        network = build_network(task.shape)
        network.load_state_dict(tensors)
    except (KeyError, ValueError, RuntimeError) as cause:
        raise FederationError(f"{path}: no checkpoint of an expert ({cause})") from cause
    network.eval()
    return network, task


def check_together(tasks: Sequence[NetworkTask], count: int) -> None:
    """Refuse experts and routers that do not make up one model.

    Raises:
        FederationError: they differ in what the mixture rests on; says in what.
    """
    first = tasks[0]
    for task in tasks:
        if task.path != first.path:
            raise FederationError(
                f"{task.folder}: noise path {task.path}, and {first.folder} has {first.path}; "
                "experts of one ensemble share the path"
            )
        if task.shape.features != first.shape.features:
            raise FederationError(
                f"{task.folder}: samples of {task.shape.features} numbers, and {first.folder} has "
                f"{first.shape.features}; experts of one ensemble share the data's shape"
            )
        if task.experts != count or (task.role == "router" and task.shape.outputs != count):
            raise FederationError(
                f"{task.folder}: trained as one of {task.experts} experts, and the ensemble has "
                f"{count}; train the router and the experts in one run"
            )


def _alone(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
    """The router of a single expert."""
    return x.new_zeros((len(x), 1))


def sample(
    directory: Path | str,
    n: int,
    *,
    mode: Mode = "top1",
    steps: int = 50,
    label: int | None = None,
    guidance: float = 1.0,
    degrade: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Draw from the experts in the directory of a run, float32 [N, ...] in the data's scale.

    Args:
        directory: of a run of ``train_experts``.
        n: how many samples.
        mode: which experts work in a step: ``full``, ``top1``, ``{"name": "topm", "m": 2}`` or
            ``sample``.
        steps: Euler's steps from noise to data.
        label: of all samples, for experts that were trained with labels.
        guidance: weight of the label; 1 for the data's own distribution.
        degrade: go on without experts that are missing.
        seed: of the noise.

    Raises:
        FederationError: a network is missing, or the networks do not belong together.
    """
    ensemble = load_ensemble(directory, degrade=degrade)
    return ensemble.sample(n, mode=mode, steps=steps, label=label, guidance=guidance, seed=seed)
