"""Training one network of :mod:`shoal.model.flow` alone, from a shard to a checkpoint.

All parameters are views of one vector and their gradients of another, so Adam, the running mean
and a sum over ranks are each a few calls. What is drawn in a step is a function of its number, so a
training that is stopped goes on bit for bit from its state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.random import generator, seed64
from shoal.fields.federate.ddm.protocols import FlowData, FlowShape, NetworkTask
from shoal.fields.federate.protocols import FederationError
from shoal.model.flow import PATHS, FlowNetwork

_WARM, _BETAS, _EPSILON = 100, (0.9, 0.99), 1e-8
# Steps between states on disk.
_SAVE = 500


def build_network(shape: FlowShape, seed: int = 0) -> FlowNetwork:
    """Initialized from a seed, whatever else draws from torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(seed, purpose="flow network"))
        return FlowNetwork(
            shape.features,
            shape.outputs,
            width=shape.width,
            depth=shape.depth,
            classes=shape.classes,
            residual=shape.residual,
        )


class NetworkTraining:
    """A network, its gradients, moments and running mean, each as one vector.

    Args:
        task: how it is trained.
        data: what from.
    """

    def __init__(self, task: NetworkTask, data: FlowData) -> None:
        self.task, self.step = task, 0
        self.x, self.y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        self.cluster = torch.from_numpy(data.cluster)
        self.network = build_network(task.shape, task.seed)
        parameters = list(self.network.parameters())
        self.weights = torch.cat([one.detach().reshape(-1) for one in parameters])
        self.gradient = torch.zeros_like(self.weights)
        self.ema = self.weights.clone()
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        at = 0
        for one in parameters:
            one.data = self.weights[at : at + one.numel()].view(one.shape)
            one.grad = self.gradient[at : at + one.numel()].view(one.shape)
            at += one.numel()

    def loss(self, rank: int = 0, world: int = 1) -> Tensor:
        """Of this step's batch, or of the share of a rank."""
        task = self.task
        draw = generator(task.seed, purpose="flow batch", step=self.step, index=task.number)
        rows = draw.integers(len(self.x), size=task.batch)[rank::world]
        t = torch.from_numpy(draw.random(task.batch, np.float32)[rank::world])
        noise = draw.standard_normal((task.batch, task.shape.features), np.float32)[rank::world]
        x, velocity = PATHS[task.path].between(self.x[rows], torch.from_numpy(noise), t)
        labels = None
        if task.shape.classes:
            hidden = torch.from_numpy(draw.random(task.batch) < task.drop)[rank::world]
            labels = torch.where(hidden, task.shape.classes, self.y[rows])
        if task.role == "router":
            cluster = self.cluster[rows]
            return torch.nn.functional.cross_entropy(self.network(x, t, labels), cluster)
        wanted = self.target(x, t, velocity)
        return torch.nn.functional.mse_loss(self.network(x, t, labels), wanted)

    def target(self, x: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
        """What the network should say at noisy samples [N, D]."""
        return velocity

    def advance(
        self, loss: Tensor, combine: Callable[[Tensor], None] = lambda gradient: None
    ) -> float:
        """An optimizer step; ``combine`` sums gradients over ranks in place."""
        self.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        combine(self.gradient)
        self.step += 1
        b1, b2 = _BETAS
        with torch.no_grad():
            self.first.lerp_(self.gradient, 1 - b1)
            self.second.mul_(b2).addcmul_(self.gradient, self.gradient, value=1 - b2)
            rate = self.task.lr * min(1.0, self.step / _WARM) / (1 - b1**self.step)
            scale = (self.second / (1 - b2**self.step)).sqrt_().add_(_EPSILON)
            self.weights.addcdiv_(self.first, scale, value=-rate)
            # A young mean forgets its start sooner.
            decay = min(self.task.ema, self.step / (self.step + 10))
            self.ema.lerp_(self.weights, 1 - decay)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """What a stopped training goes on from."""
        return {
            "weights": self.weights,
            "ema": self.ema,
            "first": self.first,
            "second": self.second,
            "step": torch.tensor([self.step]),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        for name in ("weights", "ema", "first", "second"):
            getattr(self, name).copy_(state[name])
        self.step = int(state["step"])

    def averaged(self) -> dict[str, Tensor]:
        """The running mean, by name of the parameter."""
        tensors, at = {}, 0
        for name, one in self.network.named_parameters():
            tensors[name] = self.ema[at : at + one.numel()].view(one.shape).clone()
            at += one.numel()
        return tensors


def train_to_the_end(
    directory: Path,
    training: NetworkTraining,
    tick: Callable[[int, float], None],
    combine: Callable[[Tensor], None] = lambda gradient: None,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Train from the state in a directory if there is one, and leave ``model.safetensors``.

    Args:
        directory: of this network alone.
        training: at its beginning.
        tick: called now and then with the steps made and the loss.
        combine: as of :meth:`NetworkTraining.advance`.
        rank: which share of each batch is this process's; only the first one writes.
        world: number of shares.

    Raises:
        FederationError: the loss is not finite, or the state is of another network.
    """
    task, state = training.task, directory / "state.safetensors"
    if state.exists():
        tensors, words = read_tensors(state)
        if words.get("task") != task.model_dump(mode="json"):
            raise FederationError(f"{state}: of another training; remove it, and it begins again")
        training.load(tensors)
    while training.step < task.steps:
        loss = training.advance(training.loss(rank, world), combine)
        if not np.isfinite(loss):
            raise FederationError(
                f"{task.folder}: the loss is {loss} at step {training.step}; lower lr = {task.lr:g}"
            )
        if training.step % 50 == 0:
            tick(training.step, loss)
        if training.step % _SAVE == 0 and rank == 0:
            write_tensors(state, training.state(), {"task": task.model_dump(mode="json")})
    if rank == 0:
        words = {"task": task.model_dump(mode="json")}
        write_tensors(directory / "model.safetensors", training.averaged(), words)
        state.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> None:
    """A safetensors file with words in its metadata, whole or not at all."""
    torch_file: Any = import_extra(
        "safetensors.torch", extra="run", purpose="checkpoints of experts"
    )
    write_atomic(path, torch_file.save(dict(tensors), metadata={"words": json.dumps(words)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Such a file.

    Raises:
        FederationError: it is missing, or none.
    """
    safe: Any = import_extra("safetensors", extra="run", purpose="checkpoints of experts")
    try:
        with safe.safe_open(path, framework="pt") as file:
            words = json.loads((file.metadata() or {}).get("words", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, words  # noqa: SIM118
    except (OSError, ValueError, safe.SafetensorError) as cause:
        raise FederationError(f"{path}: no checkpoint of an expert ({cause})") from cause


def write_shard(directory: Path, data: FlowData) -> None:
    """What a process learns from, in its own directory."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {"x": data.x, "y": data.y, "cluster": data.cluster}
    tensors = {name: torch.from_numpy(one) for name, one in arrays.items()}
    write_tensors(directory / "shard.safetensors", tensors, {"classes": data.classes})


def read_shard(directory: Path) -> FlowData:
    """Read it.

    Raises:
        FederationError: it is missing, or no shard.
    """
    path = directory / "shard.safetensors"
    tensors, words = read_tensors(path)
    if set(tensors) != {"x", "y", "cluster"} or not isinstance(words.get("classes"), int):
        raise FederationError(f"{path}: no shard of samples; start the run again")
    arrays = {name: one.numpy() for name, one in tensors.items()}
    return FlowData(**arrays, classes=words["classes"])
