"""ZeRO stages 2 and 3 over any communicator, threads included.

Each parameter is cut along its first dimension into as many parts as there are ranks, of
ceil(rows / ranks) rows, the last ones padded; the parts of a unit (a block, or what surrounds
the blocks) lie in one flat tensor, so one collective gathers a unit. Before a unit's forward
pass its parameters are gathered; their gradients come back to one place in backward, where
they are kept until the last micro-batch and then scattered as sums.

Stage 2 keeps what it gathered until the update. Stage 3 forgets it after the forward pass:
with recomputation the pass is done again in backward and gathers again; without it autograd
holds the gathered values until backward, which costs memory but no second gather.

Source: Rajbhandari et al., ZeRO, 2020, sections 5.2 and 5.3; the layout is that of FSDP2
(Zhao et al., PyTorch FSDP, 2023), whose parts a checkpoint can exchange with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from shoal.kernel.squares import sum_of_squares
from shoal.parallel.protocols import LocalParameter
from shoal.parallel.shard.units import check_divided, units

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm


class _Gather(torch.autograd.Function):
    """The local parts of a unit to its whole parameters; gradients go to the unit."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tuple(unit.gather())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.unit.receive(gradients)
        return (None,) * (1 + len(gradients))


class Unit:
    """Parameters of one type that are gathered together.

    Args:
        whole: the parameters; each is replaced by its local part everywhere in the model.
        owner: whose communicators are used.
    """

    def __init__(self, whole: Sequence[nn.Parameter], owner: GatheredModel) -> None:
        self.owner = owner
        comm = owner.comm
        self.shapes = [tuple(p.shape) for p in whole]
        # Rows of a part and elements of a row; a scalar is a row of one.
        self.rows = [-(-(p.shape[0] if p.dim() else 1) // comm.world) for p in whole]
        self.widths = [p.numel() // max(1, p.shape[0] if p.dim() else 1) for p in whole]
        sizes = [r * w for r, w in zip(self.rows, self.widths, strict=True)]
        self.flat = whole[0].new_zeros(sum(sizes), requires_grad=False).detach()
        self.places: list[tuple[int, int]] = []
        self.parts: list[nn.Parameter] = []
        start = 0
        for parameter, size in zip(whole, sizes, strict=True):
            self.places.append((start, size))
            mine = parameter.detach().reshape(-1)[comm.rank * size : (comm.rank + 1) * size]
            self.flat[start : start + mine.numel()].copy_(mine)
            self.parts.append(nn.Parameter(self._local(self.flat, len(self.parts)).detach()))
            start += size
        self.kept: Tensor | None = None
        """What stage 2 gathered, [ranks, part]."""
        self.gradient: Tensor | None = None
        """Sum of this rank's gradients that were not scattered yet, [ranks, part]."""

    def gather(self) -> list[Tensor]:
        """The whole parameters."""
        everything = self.everything()
        results = []
        for shape, (start, size), width in zip(self.shapes, self.places, self.widths, strict=True):
            rows = shape[0] if shape else 1
            padded = everything[:, start : start + size].reshape(-1)
            # A tensor of its own: autograd may keep it, and its counter of versions.
            results.append(padded[: rows * width].clone().view(shape))
        return results

    def everything(self) -> Tensor:
        """Every rank's part, in their order: [ranks, part]."""
        if self.kept is not None:
            return self.kept
        comm = self.owner.comm
        result = self.flat.new_empty(comm.world, self.flat.numel())
        comm.all_gather(result.view(-1), self.flat, tag="parameters").wait()
        if not self.owner.reshard:
            self.kept = result
        return result

    def forget(self) -> None:
        """The parts have changed, or may: what was gathered of them is no longer true."""
        self.kept = None

    def receive(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients of the whole parameters; scatter the sum after the last micro-batch."""
        whole = self.padded(gradients)
        self.gradient = whole if self.gradient is None else self.gradient.add_(whole)
        self.owner.received(self)

    def padded(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the whole parameters, as parts: [ranks, part]."""
        result = self.flat.new_zeros(self.owner.comm.world, self.flat.numel())
        for gradient, (start, size) in zip(gradients, self.places, strict=True):
            padded = gradient.new_zeros(self.owner.comm.world * size)
            padded[: gradient.numel()] = gradient.reshape(-1)
            result[:, start : start + size] = padded.view(-1, size)
        return result

    def scatter(self) -> None:
        """Sum the gradients over the ranks; each keeps those of its part."""
        if self.gradient is None:
            return
        gradient, self.gradient = self.gradient, None
        own = torch.empty_like(self.flat)
        self.owner.comm.reduce_scatter(own, gradient.view(-1), tag="gradients").wait()
        if self.owner.across is not None:
            self.owner.across.all_reduce(own, tag="gradients").wait()
        self.keep(own)

    def keep(self, own: Tensor) -> None:
        """Give the parts their sums of gradients [part], on top of those that they have."""
        for index, part in enumerate(self.parts):
            local = self._local(own, index)
            part.grad = local if part.grad is None else part.grad + local

    def row(self, index: int) -> int:
        """First row of this rank's part of parameter ``index``."""
        return min(self.rows[index] * self.owner.comm.rank, (self.shapes[index] or (1,))[0])

    def _local(self, flat: Tensor, index: int) -> Tensor:
        """This rank's rows of parameter ``index``, without padding."""
        shape, (start, _) = self.shapes[index], self.places[index]
        rows = max(0, min(self.rows[index], (shape or (1,))[0] - self.row(index)))
        values = flat[start : start + rows * self.widths[index]]
        return values.view(rows, *shape[1:]) if shape else values.view(shape if rows else (0,))


class GatheredModel:
    """See :class:`~shoal.parallel.protocols.ShardedModel`.

    Args:
        model: the model; its parameters become local parts, with the same names.
        comm: the ranks that share the parameters.
        reshard: forget gathered parameters after forward (stage 3).
        whole_matrices: the optimizer needs whole matrices.
        across: ranks that hold the same parts as this one; their gradients are summed too.
        of: which parameters, by name; all if not given.

    Raises:
        ConfigError: there is one rank, or the optimizer needs whole matrices.
    """

    overlap = True
    unit: type[Unit] = Unit

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        *,
        reshard: bool,
        whole_matrices: bool,
        across: Comm | None = None,
        of: Callable[[str], bool] = lambda name: True,
    ) -> None:
        check_divided(comm, whole_matrices=whole_matrices)
        self.model = model
        self.comm = comm
        self.across = across if across is not None and across.world > 1 else None
        self.reshard = reshard
        self._sync = False
        self._units: list[Unit] = []
        # Whole parameter -> its unit and number there; where it stands in the modules.
        home: dict[nn.Parameter, tuple[Unit, int]] = {}
        blocks, around = units(model)
        names = {p: name for name, p in model.named_parameters() if p.requires_grad and of(name)}
        self._none = next(model.parameters()).detach().view(-1)[:0]
        for module in (*blocks, *around):
            self._divide([p for p in module.parameters() if p in names and p not in home], home)
        self._divide([p for p in names if p not in home], home)
        self._names = {name: home[p] for p, name in names.items()}
        inner: set[int] = {id(child) for block in blocks for child in block.modules()}
        for module in blocks:
            self._wrap(module, list(module.modules()), home)
        for module in around:
            outside = [child for child in module.modules() if id(child) not in inner]
            self._wrap(module, outside, home)
        for child in model.modules():
            for leaf, parameter in list(child._parameters.items()):
                if parameter is not None and parameter in home:
                    unit, index = home[parameter]
                    child._parameters[leaf] = unit.parts[index]

    def _divide(
        self, parameters: list[nn.Parameter], home: dict[nn.Parameter, tuple[Unit, int]]
    ) -> None:
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            chosen = [p for p in parameters if p.dtype == dtype]
            unit = self.unit(chosen, self)
            self._units.append(unit)
            home.update({p: (unit, index) for index, p in enumerate(chosen)})

    def _wrap(
        self,
        module: nn.Module,
        children: list[nn.Module],
        home: dict[nn.Parameter, tuple[Unit, int]],
    ) -> None:
        """Gather around the passes of ``module`` what its ``children`` hold."""
        places: dict[Unit, list[tuple[nn.Module, str, int]]] = {}
        for child in children:
            for leaf, parameter in child._parameters.items():
                if parameter is not None and parameter in home:
                    unit, index = home[parameter]
                    places.setdefault(unit, []).append((child, leaf, index))
        for name in ("forward", "loss_sum"):
            method = getattr(module, name, None)
            if method is not None:
                setattr(module, name, self._gathering(method, places))

    def _gathering(
        self,
        method: Callable[..., Any],
        places: dict[Unit, list[tuple[nn.Module, str, int]]],
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with ExitStack() as stack:
                for unit, result in places.items():
                    stack.enter_context(self._shown(unit, result))
                return method(*args, **options)

        return call

    @contextmanager
    def _shown(self, unit: Unit, places: list[tuple[nn.Module, str, int]]) -> Iterator[None]:
        """The modules have the whole parameters, unless a pass around this one has seen to it."""
        mine = [place for place in places if place[1] not in place[0].__dict__]
        if not mine:
            yield
            return
        whole = _Gather.apply(unit, *unit.parts)  # type: ignore[no-untyped-call]
        for child, leaf, index in mine:
            # An attribute of the object hides the registered local part.
            child.__dict__[leaf] = whole[index]
        try:
            yield
        finally:
            for child, leaf, _ in mine:
                del child.__dict__[leaf]

    def received(self, unit: Unit) -> None:
        """A unit got its gradients of one micro-batch."""
        if self._sync and self.overlap:
            unit.scatter()

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch; gradients stay here until the last one."""
        self._sync = last
        yield
        self._sync = False

    def finish(self) -> None:
        """Scatter the gradients that were not scattered yet."""
        for unit in self._units:
            unit.scatter()

    def owned(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter that has some here."""
        result = {name: unit.parts[index] for name, (unit, index) in self._names.items()}
        return {name: part for name, part in result.items() if part.numel()}

    def held(self) -> dict[str, LocalParameter]:
        """Slices along the first dimension."""
        parameters: dict[str, LocalParameter] = {}
        for name in self.owned():
            unit, index = self._names[name]
            unit.forget()  # the caller may write
            shape = unit.shapes[index]
            offset = (unit.row(index), *(0,) * (len(shape) - 1)) if shape else ()
            parameters[name] = LocalParameter(unit.parts[index].detach(), offset, shape)
        return parameters

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of chosen parameters, over the ranks."""
        total = sum_of_squares(self._none)
        for name, part in self.owned().items():
            if part.grad is not None and counts(name):
                total += sum_of_squares(part.grad)
        self.comm.all_reduce(total, tag="norm").wait()
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        for part in self.owned().values():
            if part.grad is not None:
                part.grad.mul_(factor)

    def publish(self) -> None:
        """Forget last step's gradients and parameters; the next forward gathers new ones."""
        for unit in self._units:
            unit.forget()
            for part in unit.parts:
                part.grad = None

    def writes(self, name: str) -> bool:
        """Every rank writes its slices, once."""
        return self.across is None or self.across.rank == 0
