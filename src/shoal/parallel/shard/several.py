"""Several shardings of one model, each of some of its parameters and over ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shoal.parallel.shard.gathered import GatheredModel
from shoal.parallel.shard.replicated import ReplicatedShard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, LocalParameter, Shard, ShardedModel


class ShardedPart(NamedTuple):
    """Some parameters of a model, and what shards them.

    Args:
        of: whether a parameter is one of them, by name.
        model: what shards them.
    """

    of: Callable[[str], bool]
    model: ShardedModel


def sharded_part(
    shard: Shard, model: nn.Module, comm: Comm, of: Callable[[str], bool], *, whole_matrices: bool
) -> ShardedPart:
    """Shard some parameters of ``model`` over ``comm``; a single rank holds them whole.

    Raises:
        ConfigError: they would be divided, and the optimizer needs whole matrices.
    """
    if not shard.divides & {"gradients", "weights"}:
        part = shard.apply(_only(model, of), comm, whole_matrices=whole_matrices)
    elif comm.world == 1:
        part = ReplicatedShard().apply(_only(model, of), comm, whole_matrices=False)
    else:
        part = GatheredModel(
            model,
            comm,
            reshard="weights" in shard.divides,
            whole_matrices=whole_matrices,
            of=of,
        )
    return ShardedPart(of, part)


def _only(model: nn.Module, of: Callable[[str], bool]) -> nn.Module:
    """A module that has some of the parameters of a model, under their names."""
    from torch import nn

    class Some(nn.Module):
        def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
            for name, parameter in model.named_parameters():
                if of(name):
                    yield name, parameter

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return (parameter for _, parameter in self.named_parameters())

    return Some()


class SeveralModels:
    """See :class:`~shoal.parallel.protocols.ShardedModel`.

    Args:
        model: all of it.
        parts: its parameters' shardings; every parameter is in one.
    """

    def __init__(self, model: nn.Module, parts: Sequence[ShardedPart]) -> None:
        self.model, self.parts = model, parts

    @property
    def overlap(self) -> bool:
        """See :class:`~shoal.parallel.protocols.ShardedModel`."""
        return self.parts[0].model.overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        for part in self.parts:
            part.model.overlap = value

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.model.accumulate(last=last))
            yield

    def finish(self) -> None:
        """Sum the gradients, each over its own ranks."""
        for part in self.parts:
            part.model.finish()

    def owned(self) -> dict[str, Tensor]:
        """What this rank's optimizer updates, in the order of the model."""
        every = {name: x for part in self.parts for name, x in part.model.owned().items()}
        return {name: every[name] for name, _ in self.model.named_parameters() if name in every}

    def held(self) -> dict[str, LocalParameter]:
        """What this rank holds, in the order of the model."""
        every = {name: x for part in self.parts for name, x in part.model.held().items()}
        return {name: every[name] for name, _ in self.model.named_parameters() if name in every}

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the chosen gradients."""
        first, *rest = (part.model.squared_norm(counts) for part in self.parts)
        return sum(rest, first)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        for part in self.parts:
            part.model.scale_gradients(factor)

    def publish(self) -> None:
        """Make every rank see every new parameter."""
        for part in self.parts:
            part.model.publish()

    def writes(self, name: str) -> bool:
        """Whether this rank saves its part of the parameter ``name``."""
        return next(part for part in self.parts if part.of(name)).model.writes(name)
