"""The proof that a split equals one process: same loss, gradients and updated parameters.

One process computes the whole batch with the plain transformer and steps AdamW with
clipping by the global norm; the ranks do the same through :class:`ParallelEngine`. Gradients and
parameters of the ranks are put together to whole tensors by the boxes that each of them
says it holds; what several ranks hold must agree, and every element must be held.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.ir.hooks import TrainStep
from shoal.kernel.tensors import local
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.expert.balance import Routers
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train.optimizers.eager import EagerAdamW

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.dropout import Dropout
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm, LocalParameter

# Relative errors allowed: of a tensor's largest element, by dtype of the weights.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}

LR, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
# Adam divides an element of a gradient by its own size. One that is zero but for rounding (1e-9
# beside a largest one of 0.06) would be all rounding, and a step of up to LR either way: epsilon
# is above what fp32 rounds.
EPS = {torch.float64: 1e-8, torch.float32: 1e-6}


class SeededWeights:
    """Fresh weights of a configuration, the same on every rank.

    Args:
        config: the model.
        seed: seed of the weights.
        dtype: of the weights.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self._seed = seed
        self._dtype = dtype

    def model(self) -> Transformer:
        """The whole model; biases and norms are drawn too, so that a wrong one shows."""
        from shoal.model.transformer import Transformer

        model = Transformer(self.config).to(self._dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.whole(name).view(parameter.shape))
        return model

    def whole(self, name: str) -> Tensor:
        """One parameter; its values follow from its name and the seed."""
        shape = self._shapes[name]
        source = generator(self._seed, purpose=f"check {name}")
        values = torch.from_numpy(source.standard_normal(shape)) * 0.05
        return (values + name.endswith("norm.weight")).to(self._dtype)

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        from shoal.model.initialise import empty

        return {name: tuple(p.shape) for name, p in empty(self.config).named_parameters()}


@dataclass(frozen=True)
class TrainingOutcome:
    """Losses and gradient norms of every step; first gradients, last parameters, whole."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """How far two outcomes are apart.

    Args:
        loss: largest relative difference of losses.
        norm: largest relative difference of gradient norms.
        gradient: largest difference of a gradient's elements over its largest element.
        parameter: the same of the parameters.
        worst: name of the worst gradient.
        tolerance: what is allowed.
    """

    loss: float
    norm: float
    gradient: float
    parameter: float
    worst: str
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest of all differences."""
        return max(self.loss, self.norm, self.gradient, self.parameter)

    @property
    def same(self) -> bool:
        """Nothing differs by more than the tolerance."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, norm {self.norm:.1e}, gradient {self.gradient:.1e} "
            f"({self.worst}), parameter {self.parameter:.1e}; allowed {self.tolerance:.0e}"
        )


def tokens(job: TrainJob, vocab_size: int, step: int, *, documents: bool) -> ReplicaSequences:
    """A whole global batch of random tokens, ragged: each row counts a number of its own."""
    source = generator(job.seed, purpose="check tokens", step=step)
    size, length = job.global_batch, job.seq_len
    ids = torch.from_numpy(source.integers(0, vocab_size, (size, length + 1)))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    for row, cut in enumerate(source.integers(1, length, size)):
        targets[row, cut:] = -100
    result = None
    if documents:
        jumps = source.random((size, length)) < 0.15
        result = torch.from_numpy(jumps.cumsum(1)).to(torch.int32)
    return ReplicaSequences(inputs, targets, result, 0, step)


def _share(rows: ReplicaSequences, replicas: int, replica: int) -> ReplicaSequences:
    size = len(rows.inputs) // replicas
    part = slice(replica * size, (replica + 1) * size)
    documents = None if rows.documents is None else rows.documents[part]
    return ReplicaSequences(
        rows.inputs[part], rows.targets[part], documents, replica * size, rows.step
    )


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of both, for parameters of one dtype."""
    eps = EPS[parameters[0].dtype]
    return EagerAdamW(parameters, lr=LR, betas=BETAS, eps=eps, weight_decay=DECAY)


Backward: TypeAlias = "Callable[[Transformer, ReplicaSequences, Dropout | None], float]"
"""Forward and backward passes of a whole batch, and its mean loss."""


def _plainly(job: TrainJob) -> Backward:
    """The transformer's own passes, in one piece."""
    from shoal.model.routing import StepRouting

    routing = StepRouting(job.seed, 0, 0, job.global_batch)

    def backward(model: Transformer, rows: ReplicaSequences, dropout: Dropout | None) -> float:
        count = int((rows.targets != -100).sum())
        loss = model.loss_sum(
            rows.inputs,
            rows.targets,
            documents_BT=rows.documents,
            dropout=dropout.at(rows.step, 0) if dropout is not None else None,
            routing=replace(routing, step=rows.step) if model.config.num_experts else None,
        )
        (loss / count).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) / count

    return backward


def one_process(
    job: TrainJob,
    weights: SeededWeights,
    *,
    steps: int = 3,
    documents: bool = False,
    backward: Backward | None = None,
) -> TrainingOutcome:
    """The reference: the plain transformer on the whole batch, or with other passes."""
    from shoal.model.dropout import Dropout

    backward = backward or _plainly(job)
    model = weights.model()
    dropout = Dropout(job.dropout, job.seed) if job.dropout else None
    shape = weights.config
    routers = Routers(model, shape.num_layers, shape.num_experts, job.global_batch, None)
    optimizer = adamw(list(model.parameters()))
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        rows = tokens(job, weights.config.vocab_size, step, documents=documents)
        optimizer.zero_grad()
        losses.append(backward(model, rows, dropout))
        if not gradients:
            gradients = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters()
                if p.requires_grad
            }
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)))
        optimizer.step()
        routers.finish()
        routers.published(TrainStep(step, steps))
    return TrainingOutcome(
        losses, norms, gradients, {n: p.detach() for n, p in model.named_parameters()}
    )


def on_rank(
    job: TrainJob,
    weights: SeededWeights,
    comm: Comm,
    *,
    steps: int = 3,
    documents: bool = False,
    dtype: torch.dtype = torch.float64,
) -> TrainingOutcome:
    """The same on one rank of a split; every rank returns the whole outcome."""
    schedule = check_split(job, weights.config.shape())
    engine = ParallelEngine(job, schedule, weights, comm, dtype=dtype)
    owned = engine.sharded.owned()
    # Detached: the local part of a distributed tensor is no leaf, and shares its memory.
    updated = {name: local(p).detach() for name, p in owned.items()}
    optimizer = adamw(list(updated.values())) if updated else None
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    whole = _meta(weights.config)
    shapes = {n: tuple(p.shape) for n, p in whole.items()}
    unlearnt = {n for n, p in whole.items() if not p.requires_grad}
    for step in range(steps):
        everything = tokens(job, weights.config.vocab_size, step, documents=documents)
        count = int((everything.targets != -100).sum())
        replica, replicas = engine.reads or (0, 1)
        rows = _share(everything, replicas, replica)
        size = job.microbatch or len(rows.inputs)
        loss = engine.backward(rows, size, count)
        engine.finish()
        norm = engine.grad_norm()
        if not gradients:
            result = {n: local(p.grad) for n, p in owned.items() if p.grad is not None}
            trained = {n: s for n, s in shapes.items() if n not in unlearnt}
            gradients = assemble(engine.boxes(result), trained, comm, dtype)
        factor = (job.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        engine.sharded.scale_gradients(factor)
        for name, parameter in owned.items():
            updated[name].grad = None if parameter.grad is None else local(parameter.grad)
        if optimizer is not None:
            optimizer.step()
        engine.publish(TrainStep(step, steps, state=lambda: _state(optimizer, updated)))
        comm.all_reduce(loss, tag="loss").wait()
        losses.append(float(loss) / count)
        norms.append(float(norm))
    parameters = assemble(engine.held(), shapes, comm, dtype)
    return TrainingOutcome(losses, norms, gradients, parameters)


def assemble(
    boxes: Mapping[str, list[LocalParameter]],
    shapes: Mapping[str, tuple[int, ...]],
    comm: Comm,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Whole tensors from the boxes that the ranks hold.

    Raises:
        AssertionError: some element is held by no rank, or two ranks disagree about one.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    totals, helds = torch.zeros(sum(sizes), dtype=dtype), torch.zeros(sum(sizes), dtype=dtype)
    for (name, shape), total, held in zip(
        shapes.items(), totals.split_with_sizes(sizes), helds.split_with_sizes(sizes), strict=True
    ):
        for box in boxes.get(name, []):
            place = tuple(
                slice(o, o + s) for o, s in zip(box.offset, box.tensor.shape, strict=True)
            )
            total.view(shape)[place] = box.tensor.detach().to(dtype)
            held.view(shape)[place] = 1.0
    mine, here = totals.clone(), helds.clone()
    # All tensors in one call: a collective costs more than adding so few numbers.
    comm.all_reduce(totals, tag="check").wait()
    comm.all_reduce(helds, tag="check").wait()
    for name, held in zip(shapes, helds.split_with_sizes(sizes), strict=True):
        if not bool((held > 0).all()):
            raise AssertionError(f"{name}: some elements are held by no rank")
    wholes = totals / helds
    differences = ((mine - wholes).abs() * here).split_with_sizes(sizes)
    apart = torch.stack([one.max() for one in differences])
    comm.all_reduce(apart, tag="check", op="max").wait()
    result = {}
    for (name, shape), whole, most in zip(
        shapes.items(), wholes.split_with_sizes(sizes), apart.tolist(), strict=True
    ):
        if most > 1e-12 * max(1.0, float(whole.abs().max())) * _scale(dtype):
            raise AssertionError(f"{name}: ranks that hold the same elements differ by {most}")
        result[name] = whole.view(shape)
    return result


def _scale(dtype: torch.dtype) -> float:
    return 1.0 if dtype == torch.float64 else 1e7


def compare(one: TrainingOutcome, many: TrainingOutcome, dtype: torch.dtype) -> Comparison:
    """Relative differences of two outcomes."""

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))

    gradients = {n: apart(one.gradients[n], many.gradients[n]) for n in one.gradients}
    worst = max(gradients, key=lambda name: gradients[name])
    return Comparison(
        loss=_worst(one.losses, many.losses),
        norm=_worst(one.norms, many.norms),
        gradient=gradients[worst],
        parameter=max(apart(one.parameters[n], many.parameters[n]) for n in one.parameters),
        worst=worst,
        tolerance=TOLERANCE[dtype],
    )


def _worst(one: list[float], many: list[float]) -> float:
    return max(abs(b / a - 1.0) for a, b in zip(one, many, strict=True))


def same_as_one(
    job: TrainJob,
    config: ModelConfig,
    *,
    steps: int = 3,
    documents: bool = False,
    dtype: torch.dtype = torch.float64,
    run: Callable[[Callable[[Comm], TrainingOutcome]], TrainingOutcome] | None = None,
) -> Comparison:
    """Train with the split of ``job`` and with one process, and compare.

    Args:
        job: its batch, split, sharding, clipping and dropout count; data and optimizer do not.
        config: the model.
        steps: optimizer steps.
        documents: with a document mask.
        dtype: of weights and computation.
        run: runs a function on every rank and returns what rank 0 returned; threads of this
            process if not given.

    Raises:
        PlanError: the split cannot run.
    """
    from shoal.claims.lab.thread_ranks import run_ranks

    weights = SeededWeights(config, job.seed, dtype)
    one = one_process(job, weights, steps=steps, documents=documents)

    def on(comm: Comm) -> TrainingOutcome:
        return on_rank(job, weights, comm, steps=steps, documents=documents, dtype=dtype)

    check_split(job, config.shape())
    many = run(on) if run is not None else run_ranks(job.parallel.world, on)[0]
    return compare(one, many, dtype)


def _meta(config: ModelConfig) -> dict[str, Tensor]:
    from shoal.model.initialise import empty

    return dict(empty(config).named_parameters())


def _state(
    optimizer: torch.optim.Optimizer | None, updated: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    return {} if optimizer is None else {n: optimizer.state[p] for n, p in updated.items()}
