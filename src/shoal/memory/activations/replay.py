"""Units of a model whose operators are done again in the backward pass, but for chosen results.

A unit, such as the attention of a block, keeps its input alone (``torch.utils.checkpoint``). In
its forward pass the results of some operators are sent away; when the backward pass has it run once
more, those come back in the place of being computed. Which is decided operator by operator, so any
number of bytes can be sent.

The first step keeps nothing and shows which operators there are. What is a view, is written in
place, draws random numbers or casts a weight is always done again: with the state of torch's
generators that the unit began with.

Source: Liao et al., Fuyou, 2024, section 4.5 (which activations are swapped).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import ModelError
from shoal.kernel.operators import OperatorMode, tensors_in
from shoal.memory.activations.offloaded import TensorPlaceholder
from shoal.memory.activations.protocol import in_backward
from shoal.memory.streaming.chain import find_blocks

if TYPE_CHECKING:
    from shoal.memory.activations.swapping import ActivationSwapping

# A member of a block is a unit of its own if it has at least one in so many of its weights.
_LARGE = 8


@dataclass
class Operator:
    """One operator of a unit, as the first step has seen it.

    Args:
        name: of its overload.
        nbytes: of its results.
        movable: its results can be sent away instead of being computed again.

    Attributes:
        again: the backward pass does it again.
        seconds: it took in every pass that was measured.
    """

    name: str
    nbytes: int
    movable: bool
    again: bool = False
    seconds: list[float] = field(default_factory=list)


class ActivationReplay:
    """The units of a model, and which results of each are sent away.

    Args:
        units: names and modules, in the order in which they run.
        swapping: sends away and brings back.
        is_weight: whether memory is that of a parameter.

    Attributes:
        operators: operators of every unit; empty before the first step.
        chosen: of every unit, numbers of the operators whose results are sent away.
        measuring: take the time of operators.
        active: a step trains.
        rounds: micro-batches since it was set to 0.
        unsettled: a hook is at work, whose operators are none of a unit's.
    """

    def __init__(
        self,
        units: list[tuple[str, nn.Module]],
        swapping: ActivationSwapping,
        is_weight: Callable[[Tensor], bool],
    ) -> None:
        self.names = [name for name, _ in units]
        self.swapping, self.is_weight = swapping, is_weight
        self.operators: list[list[Operator]] = [[] for _ in units]
        self.chosen: list[frozenset[int]] = [frozenset() for _ in units]
        self.measuring = self.active = False
        self.unsettled = self.rounds = 0
        for index, (_, unit) in enumerate(units):
            unit.forward = functools.partial(self._forward, index, unit.forward)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operators in here are none of a unit's."""
        self.unsettled += 1
        try:
            yield
        finally:
            self.unsettled -= 1

    def seconds(self) -> list[list[float]]:
        """Of every operator of every unit; units that do the same share what was measured."""
        alike: dict[tuple[str, ...], list[list[Operator]]] = {}
        for operators in self.operators:
            alike.setdefault(tuple(one.name for one in operators), []).append(operators)
        seconds: list[list[float]] = []
        for operators in self.operators:
            same = alike[tuple(one.name for one in operators)]
            seconds.append([_middle([unit[n] for unit in same]) for n in range(len(operators))])
        return seconds

    def begin(self) -> None:
        """A micro-batch begins."""
        self.swapping.begin()
        self.swapping.group = 0
        self.rounds += 1

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.active or not torch.is_grad_enabled() or in_backward():
            return forward(*args, **kwargs)
        ran, swapping = _Pass(self, index), self.swapping
        swapping.group = index

        def modes() -> tuple[_First, _Again]:
            return ran.first, ran.again

        try:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=modes, **kwargs)
        finally:
            # What is saved between two of them is needed with the second.
            swapping.group = index + 1 if index + 1 < len(self.names) else None


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is computed again at one time: the members of the blocks, such as their two halves.

    Only what one of them saves is on the device at a time. A block that is not made of several
    large members is one itself.

    Raises:
        ModelError: the model has no chain of blocks.
    """
    units = []
    for name, block in find_blocks(model)[1]:
        total = sum(p.numel() for p in block.parameters())
        parts = [
            (f"{name}.{leaf}", child)
            for leaf, child in block.named_children()
            if any(True for _ in child.children())
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)
            and sum(p.numel() for p in child.parameters()) * _LARGE >= total
        ]
        units += parts if len(parts) > 1 else [(name, block)]
    return units


class _Pass:
    """One unit in one micro-batch."""

    def __init__(self, replay: ActivationReplay, index: int) -> None:
        self.replay, self.index = replay, index
        self.name = replay.names[index]
        # Number of an operator -> its name, and what stands for its results.
        self.kept: dict[int, tuple[str, Any]] = {}
        self.recording = not replay.operators[index]
        self.first, self.again = _First(self), _Again(self)


class _Counting(OperatorMode):
    """Numbers the operators of a unit that make something new."""

    def __init__(self, ran: _Pass) -> None:
        super().__init__()
        self.ran = ran
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.ran.replay.unsettled or not _is_new(func):
            return self.old(func, args, kwargs)
        number, self.number = self.number, self.number + 1
        return self.new(number, func, args, kwargs)

    def old(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do a view, or what writes to something."""
        return func(*args, **kwargs)

    @abc.abstractmethod
    def new(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what makes something new, or not."""


class _First(_Counting):
    """The forward pass: sends away what is chosen, or writes down what there is."""

    def __init__(self, ran: _Pass) -> None:
        super().__init__(ran)
        self._made: dict[int, int] = {}
        replay = ran.replay
        self._known = replay.operators[ran.index]
        self._chosen = replay.chosen[ran.index]

    def old(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.ran.recording and not self.ran.replay.unsettled and func._schema.is_mutable:
            self._check_random(func, kwargs)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors_in(value):
                        number = self._made.get(tensor.untyped_storage()._cdata)
                        if number is not None:
                            self._known[number].movable = False
        return func(*args, **kwargs)

    def new(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        if self.ran.recording:
            return self._recorded(number, func, args, kwargs)
        known = self._known
        if number >= len(known) or known[number].name != str(func):
            # It goes another way this time: what it makes from here on is all made again.
            self._chosen = frozenset()
            return func(*args, **kwargs)
        if not self.ran.replay.measuring:
            result = func(*args, **kwargs)
        else:
            device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))
            begin = _now(device)
            result = func(*args, **kwargs)
            known[number].seconds.append(_now(device) - begin)
        if number in self._chosen:
            # Detached: autograd makes the result itself a node of this pass.
            pack = self.ran.replay.swapping.pack_result
            slips = tree_map_only(Tensor, lambda tensor: pack(tensor.detach()), result)
            self.ran.kept[number] = (str(func), slips)
        return result

    def _recorded(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        self._check_random(func, kwargs)
        given = list(tensors_in((args, kwargs)))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = _generators(given) if seeded else []
        result = func(*args, **kwargs)
        assert number == len(self._known)
        inputs = {tensor.untyped_storage()._cdata for tensor in given}
        # Attention that drops nothing is seeded too, and draws nothing.
        drew = seeded and before != _generators(given)
        nbytes, movable = 0, not drew
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            movable &= storage._cdata not in inputs
            self._made[storage._cdata] = number
            nbytes += storage.nbytes()
        if func.overloadpacket is torch.ops.aten._to_copy:
            movable &= not any(self.ran.replay.is_weight(tensor) for tensor in given)
        self._known.append(Operator(str(func), nbytes, movable and nbytes > 0))
        return result

    def _check_random(self, func: Any, kwargs: Any) -> None:
        if kwargs.get("generator") is not None:
            raise ModelError(
                f"offload: fuyou: {self.ran.name} draws from a generator of its own ({func}), "
                "whose state nobody keeps, so it cannot be computed again; draw from torch's own "
                "generator"
            )


class _Again(_Counting):
    """The backward pass has the unit run once more."""

    def __enter__(self) -> Any:
        self.number = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def new(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        ran = self.ran
        if ran.recording:
            known = ran.replay.operators[ran.index]
            self._check(func, known[number].name if number < len(known) else "nothing")
            known[number].again = True
        if number not in ran.kept:
            return func(*args, **kwargs)
        name, slips = ran.kept.pop(number)
        self._check(func, name)
        return tree_map_only(
            TensorPlaceholder,
            ran.replay.swapping.unpack,
            slips,
            is_leaf=lambda item: isinstance(item, TensorPlaceholder),
        )

    def _check(self, func: Any, name: str) -> None:
        if str(func) != name:
            raise ModelError(
                f"offload: fuyou: {self.ran.name} does {func} in the backward pass where the "
                f"forward pass did {name}; it must do the same both times"
            )


@functools.cache
def _is_new(func: Any) -> bool:
    """Whether an operator makes tensors that nothing else has the memory of."""
    schema = func._schema
    if schema.is_mutable:
        return False
    tensors = [value for value in schema.returns if "Tensor" in str(value.type)]
    return bool(tensors) and not any(value.alias_info for value in schema.returns)


def _middle(operators: list[Operator]) -> float:
    """Median of what was measured; 0 for what was not."""
    taken = [seconds for one in operators for seconds in one.seconds]
    return statistics.median(taken) if taken else 0.0


def _generators(tensors: list[Tensor]) -> list[bytes]:
    """States of torch's own generators that an operator on these may draw from."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]
    # No operator: a scope that counts the device would see it.
    return [bytes(list(state.untyped_storage())) for state in states]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
