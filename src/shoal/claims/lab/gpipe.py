"""GPipe: any sequential network as a pipeline, in micro-batches with one update.

::

    pipeline = gpipe(layers, k=4, m=8, comm=comm)      # on each of 4 ranks
    loss = pipeline.step(inputs, targets)              # gradients are in the parameters
    optimizer.step()

The layers are cut into k cells of consecutive layers, so that the most expensive is as cheap as
it can be; rank r keeps cell r. A mini-batch is cut in m micro-batches, of sizes that differ by one
where m does not divide it. All of them go forward and then, last one first, backward
(:mod:`shoal.plan.schedules.gpipe`, by :class:`~shoal.parallel.pipeline.runtime.Runtime`). With
``recompute`` the forward pass of a cell keeps its input alone and the backward pass computes the
rest again: a rank holds N inputs of its cell and the activations of N / m samples in L / k layers
instead of those of N samples in L layers. Gradients are those of the mean (or sum) of the loss
over the mini-batch, whatever the sizes of its micro-batches.

What is random is drawn from a generator that is set by seed, step, layer and micro-batch before
the layer, and put back: a layer drops the same in its recomputation, and on whichever rank it is.
Batch normalisation uses the statistics of the micro-batch; its moving statistics, for evaluation,
follow those of the mini-batch. A tensor that a later layer needs again is said with
:class:`Save` and :class:`Use`; it travels with the boundaries in between.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, 2018. Explicit skips: Kim et al., torchgpipe, 2020.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.claims.lab.gpipe_boundary import (
    DTYPES,
    FINE,
    HEADER,
    Form,
    FormBoundary,
    Micro,
    Save,
    Use,
    crossing,
    skips,
)
from shoal.core.errors import ConfigError, require
from shoal.core.meter import Meter
from shoal.core.random import seed64
from shoal.parallel.pipeline.runtime import Runtime, StageBoundary
from shoal.plan.partition import partition
from shoal.plan.schedules.gpipe import GPipe

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, MicroBatch

__all__ = ["Pipeline", "Save", "Use", "gpipe", "held_bytes"]

Loss = Callable[[Tensor, Tensor], Tensor]

# Torch's default generator is one for all threads, and ranks may be threads.
_DRAWING = threading.RLock()

# A boundary's header says FINE first, or that a rank refuses; what it says then, in bytes.
_REFUSED = 2
_TEXT = 1024


class _Moments:
    """Mean and squared deviations of a mini-batch, put together from its micro-batches."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Values [N, C, ...]."""
        x = x.detach().transpose(0, 1).flatten(1)
        count, mean = x.shape[1], x.mean(1)
        squares = (x - mean[:, None]).square().sum(1)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, apart = self.count + count, mean - self.mean
        self.mean = self.mean + apart * (count / total)
        self.squares = self.squares + squares + apart.square() * (self.count * count / total)
        self.count = total

    @torch.no_grad()
    def commit(self, norm: _BatchNorm) -> None:
        """Move the statistics of ``norm`` as one pass over the mini-batch does."""
        if self.mean is None or self.squares is None or norm.running_mean is None:
            return
        assert norm.running_var is not None and norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = norm.momentum
        if share is None:
            share = 1.0 / float(norm.num_batches_tracked)
        unbiased = self.squares / max(1, self.count - 1)
        norm.running_mean.lerp_(self.mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


class Pipeline(nn.Module):
    """One rank of a pipeline. Made by :func:`gpipe`.

    Attributes:
        cells: numbers of the layers of each cell.
        layers: this rank's layers by number, so that parameters carry the names that
            ``nn.ModuleList`` of all layers gives them under ``layers``.
        runtime: what does the passes; its ``events`` are the last step's, if recorded.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        cells: Sequence[range],
        comm: Comm,
        *,
        m: int,
        recompute: bool,
        loss: Loss,
        reduction: Literal["mean", "sum"],
        seed: int,
    ) -> None:
        super().__init__()
        self.cells, self.comm, self.m, self.seed = tuple(cells), comm, m, seed
        self.recompute, self.reduction = recompute, reduction
        self._loss = loss
        rank = comm.rank
        mine = cells[rank]
        self.layers = nn.ModuleDict({str(i): layers[i] for i in mine})
        self.first, self.last = rank == 0, rank == len(cells) - 1
        opened = skips(layers)
        self._enter = crossing(opened, mine.start)
        self._leave = crossing(opened, mine.stop)
        parameter = next((p for p in self.layers.parameters() if p.is_floating_point()), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
        self.boundary = FormBoundary(dtype, self._device)
        self.runtime = Runtime(
            GPipe().build(len(cells), m),
            {rank: cast("Any", self._stage)},
            comm,
            cast("StageBoundary", self.boundary),
            recompute="stage" if recompute else "none",
        )
        self._forms: dict[Any, tuple[Form | None, Form | None]] = {}
        self._steps = 0
        self._moments: dict[_BatchNorm, _Moments] = {}
        self._counting = False
        for module in self.layers.modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                # Its own moving statistics would follow micro-batches, and recomputations too.
                module.track_running_stats = False
                module.register_forward_pre_hook(self._count)

    def step(
        self, inputs: Tensor, targets: Tensor, *, step: int | None = None, record: bool = False
    ) -> Tensor:
        """Forward and backward passes of a mini-batch; gradients are added to the parameters.

        Args:
            inputs: [N, ...], equal on all ranks; the first one computes with them.
            targets: [N, ...], for the last rank's loss.
            step: of training, for what is random; the number of calls if not given.
            record: keep the times of the passes.

        Returns:
            The loss of the mini-batch, on every rank.

        Raises:
            ConfigError: fewer samples than micro-batches, or a cell that cannot be one: its
                output is not a tensor, or it changes its input in place.
            RankError: a peer is gone or did not come in time.
        """
        number = self._steps if step is None else step
        self._steps += step is None
        batches = self._split(inputs, targets, number)
        for batch in batches:
            batch.awaited.extend(form for form in (batch.entry, batch.exit) if form is not None)
        self._moments.clear()
        loss = self.runtime.step(cast("Sequence[MicroBatch]", batches), 1.0, record=record)
        for norm, moments in self._moments.items():
            moments.commit(norm)
        self._moments.clear()
        if self.comm.world > 1:
            self.comm.broadcast(loss, self.comm.world - 1, tag="loss").wait()
        return loss

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """Outputs [N, ...] of a mini-batch, without gradients; on the last rank, else None.

        Moving statistics stay as they are.
        """
        results = []
        for batch in self._split(inputs, None, self._steps):
            x = None
            if batch.entry is not None:
                x = batch.entry.empty(self._device)
                self.comm.receive(x, self.comm.rank - 1, tag="activations").wait()
            with self._drawn():
                out = self._compute(x, batch)
            if self.last:
                results.append(out)
            else:
                self.comm.send(
                    self.boundary.outgoing(out), self.comm.rank + 1, tag="activations"
                ).wait()
        return torch.cat(results) if self.last else None

    def _split(self, inputs: Tensor, targets: Tensor | None, step: int) -> list[Micro]:
        total = len(inputs)
        require(
            self.m <= total,
            "gpipe.m",
            self.m,
            expected=f"at most the {total} samples of the mini-batch",
        )
        require(
            targets is None or len(targets) == total,
            "gpipe.targets",
            0 if targets is None else len(targets),
            expected=f"{total}, as many as there are inputs",
        )
        parts = inputs.tensor_split(self.m)
        aims = [None] * self.m if targets is None else list(targets.tensor_split(self.m))
        results = []
        for number, (part, aim) in enumerate(zip(parts, aims, strict=True)):
            weight = len(part) / total if self.reduction == "mean" else 1.0
            entry, exit_ = self._form(part, aim)
            results.append(Micro(number, part, aim, weight, step, entry, exit_))
        return results

    # Forms of the boundaries.

    def _form(self, part: Tensor, target: Tensor | None) -> tuple[Form | None, Form | None]:
        """What this rank's cell gets and gives for such a micro-batch; determined once, by all."""
        key = (tuple(part.shape), part.dtype, self.training, target is None)
        if key not in self._forms:
            self._forms[key] = self._try(part, target)
        return self._forms[key]

    def _try(self, part: Tensor, target: Tensor | None) -> tuple[Form | None, Form | None]:
        comm, rank = self.comm, self.comm.rank
        header = torch.zeros(HEADER, dtype=torch.int64)
        failure: ConfigError | None = None
        entry = leave = None
        if not self.first:
            comm.receive(header, rank - 1, tag="form").wait()
            entry = Form.of(header) if int(header[0]) == FINE else None
        if self.first or entry is not None:
            try:
                leave = self._probe(entry, part, target)
                header = torch.tensor([FINE]) if leave is None else leave.header()
            except ConfigError as error:
                failure = error
                header[0] = _REFUSED
        if not self.last:
            comm.send(header, rank + 1, tag="form").wait()
        refused = torch.tensor([0.0 if failure is None else 1.0 + rank])
        if comm.world > 1:
            comm.all_reduce(refused, tag="form", op="max").wait()
        if int(refused):
            # All ranks say the same, so that none waits for one that has ended.
            text = torch.zeros(_TEXT, dtype=torch.uint8)
            said = str(failure).encode()[:_TEXT]
            text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            if comm.world > 1:
                comm.broadcast(text, int(refused) - 1, tag="form").wait()
            raise ConfigError(bytes(text.tolist()).rstrip(b"\0").decode(errors="replace"))
        return entry, leave

    @torch.no_grad()
    def _probe(self, entry: Form | None, part: Tensor, target: Tensor | None) -> Form | None:
        """Run the cell once on copies of its buffers, and see what comes out.

        Raises:
            ConfigError: it cannot be a cell.
        """
        x: Any = part if entry is None else torch.zeros_like(entry.empty(self._device))
        version = x._version
        first = min(map(int, self.layers))
        with self._drawn():
            parts = self._walk(x, entry, lambda _, layer, value: _dry(layer, value))
        self._check_version(x, version, first)
        out = parts[0]
        after = max(map(int, self.layers))
        require(
            all(isinstance(p, Tensor) and p.dtype in DTYPES for p in parts),
            f"gpipe layer {after}",
            type(out).__name__ if not isinstance(out, Tensor) else str(out.dtype),
            expected="one floating-point tensor where the layers are cut",
            hint="put the layers that hand on something else into one nn.Sequential",
        )
        require(
            all(p.dtype == out.dtype for p in parts),
            f"gpipe layer {after}",
            ", ".join(str(p.dtype) for p in parts),
            expected="one dtype for a boundary and what is saved across it",
        )
        if not self.last:
            return Form(out.dtype, tuple(tuple(p.shape) for p in parts))
        if target is not None:
            value = self._loss(out, target)
            require(
                isinstance(value, Tensor) and value.dim() == 0,
                "gpipe.loss",
                list(value.shape) if isinstance(value, Tensor) else type(value).__name__,
                expected="a function that returns a scalar tensor",
            )
        return None

    def _check_version(self, x: Tensor, version: int, layer: int) -> None:
        require(
            x._version == version,
            f"gpipe layer {layer}",
            type(self.layers[str(layer)]).__name__,
            expected="no change of a cell's input in place, which recomputation needs again",
            hint="use inplace=False at the start of a cell",
        )

    # Passes.

    def _stage(self, x: Tensor | None, mb: Micro, *, recompute: bool) -> Tensor:
        again = self.recompute and torch.is_grad_enabled()
        given = mb.inputs if x is None else x
        version = given._version
        self._counting = self.training and not again
        try:
            with self._drawn():
                out = self._compute(x, mb)
        finally:
            self._counting = False
        self._check_version(given, version, self.cells[self.comm.rank].start)
        if self.last:
            assert mb.targets is not None
            out = self._loss(out, mb.targets) * mb.weight
        if torch.is_grad_enabled() and not out.requires_grad:
            out = out.detach().requires_grad_()  # nothing in here learns
        return out

    def _compute(self, x: Tensor | None, mb: Micro) -> Tensor:
        def call(number: int, layer: nn.Module, value: Any) -> Any:
            if self.training:
                torch.manual_seed(
                    seed64(self.seed, purpose="gpipe", step=mb.step, layer=number, index=mb.number)
                )
            return layer(value)

        return Form.pack(self._walk(mb.inputs if x is None else x, mb.entry, call))

    def _walk(
        self, x: Any, entry: Form | None, call: Callable[[int, nn.Module, Any], Any]
    ) -> list[Any]:
        """Through this rank's layers: what comes by at the end, and what is saved for later."""
        saved: dict[str, Any] = {}
        if entry is not None:
            x, *others = entry.unpack(x)
            saved = dict(zip(self._enter, others, strict=True))
        for number, layer in self.layers.items():
            if isinstance(layer, Save):
                saved[layer.name] = x
            elif isinstance(layer, Use):
                x = layer(x, saved.pop(layer.name))
            else:
                x = call(int(number), layer, x)
        return [x, *(saved[name] for name in self._leave)]

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """The default generator is ours meanwhile, and afterwards as it was."""
        devices = [self._device] if self._device.type == "cuda" else []
        with _DRAWING, torch.random.fork_rng(devices=devices, enabled=self.training):
            yield

    def _count(self, norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if self._counting and norm.training:
            assert isinstance(norm, _BatchNorm)
            self._moments.setdefault(norm, _Moments()).add(arguments[0])


def _dry(layer: nn.Module, value: Any) -> Any:
    """A layer's output; its buffers stay as they are.

    Raises:
        ConfigError: it fails.
    """
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    try:
        return torch.func.functional_call(layer, buffers, (value,))
    except (RuntimeError, ValueError, TypeError, IndexError) as cause:
        raise ConfigError(
            f"gpipe layer {type(layer).__name__}: it does not take "
            f"{list(value.shape) if isinstance(value, Tensor) else type(value).__name__}: "
            f"{str(cause).splitlines()[0]}"
        ) from cause


def held_bytes(
    activations: float,
    *,
    entry: float = 1.0,
    layers: int,
    k: int = 1,
    m: int = 1,
    recompute: bool = True,
) -> float:
    """Most bytes that a rank's passes keep for the backward pass, in GPipe's closed form.

    ``entry + layers / k * activations / m`` with recomputation, ``layers / k * activations``
    without; both of the whole mini-batch, of a cell's input and of one layer.
    """
    longest = math.ceil(layers / k)
    return entry + longest * activations / m if recompute else longest * activations


def gpipe(
    layers: Sequence[nn.Module],
    k: int = 4,
    m: int = 8,
    recompute: bool = True,
    costs: Sequence[float] | None = None,
    *,
    comm: Comm | None = None,
    loss: Loss | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    seed: int = 0,
) -> Pipeline:
    """This rank's part of a pipeline of any sequential network; every rank calls it.

    Args:
        layers: in order, with equal parameters on all ranks; a rank keeps its own.
        k: cells, one a rank.
        m: micro-batches of a mini-batch.
        recompute: keep the inputs of cells and compute the rest again.
        costs: of each layer, in any unit; numbers of parameters if not given.
        comm: k ranks; not needed with k = 1.
        loss: function of outputs and targets; cross entropy if not given.
        reduction: what ``loss`` does with the samples of a micro-batch, and the pipeline with
            those of the mini-batch.
        seed: of everything random.

    Raises:
        PlanError: more cells than layers, or costs that are none.
        ConfigError: another number of ranks than cells, or skips that are none.
    """
    require(m >= 1, "gpipe.m", m, expected="at least 1")
    world = 1 if comm is None else comm.world
    require(
        world == k,
        "gpipe.k",
        k,
        expected=f"{world}, the number of ranks",
        hint="give comm with one rank for each cell",
    )
    require(
        costs is None or len(costs) == len(layers),
        "gpipe.costs",
        0 if costs is None else len(costs),
        expected=f"{len(layers)}, one for each layer",
    )
    if costs is None:
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    if not any(costs):
        costs = [1.0] * len(layers)
    cells = partition(costs, k)
    if comm is None:
        from shoal.parallel.comm.collectives import TorchComm

        comm = TorchComm(Meter([]))
    return Pipeline(
        layers,
        cells,
        comm,
        m=m,
        recompute=recompute,
        loss=loss or nn.functional.cross_entropy,
        reduction=reduction,
        seed=seed,
    )
