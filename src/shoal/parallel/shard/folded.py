"""Two shardings of one model: of the experts over their own data-parallel ranks, and of the rest.

Stages 2 and 3 gather a block twice, its experts over one group and all else over another. Where
one of the two groups is a single rank, what lies there is whole, and stays so.

Source: Liu et al., MoE Parallel Folding, 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from shoal.parallel.shard.gathered import GatheredModel
from shoal.parallel.shard.replicated import ReplicatedModel, ReplicatedShard
from shoal.parallel.shard.units import check_divided
from shoal.parallel.tensor.slices import is_expert

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, LocalParameter, Shard, ShardedModel

__all__ = ["FoldedModel", "folded"]


def folded(
    shard: Shard, model: nn.Module, data: Comm, edp: Comm, *, whole_matrices: bool
) -> FoldedModel:
    """Shard the experts of a model over ``edp`` and all else over ``data``.

    Raises:
        ConfigError: there is nothing to divide over, or the optimizer needs whole matrices.
    """
    if not shard.divides & {"gradients", "weights"}:
        rest, experts = (
            shard.apply(_only(model, of_experts=which), comm, whole_matrices=whole_matrices)
            for which, comm in ((False, data), (True, edp))
        )
        return FoldedModel(model, rest, experts)
    check_divided(max(data, edp, key=lambda comm: comm.world), whole_matrices=whole_matrices)
    sharded_models: list[ShardedModel] = []
    for which, comm in ((False, data), (True, edp)):
        if comm.world == 1:
            part = ReplicatedShard().apply(
                _only(model, of_experts=which), comm, whole_matrices=False
            )
        else:
            part = GatheredModel(
                model,
                comm,
                reshard="weights" in shard.divides,
                whole_matrices=whole_matrices,
                of=is_expert if which else _of_rest,
            )
        sharded_models.append(part)
    return FoldedModel(model, *sharded_models)


def _of_rest(name: str) -> bool:
    """The parameter is of none of them."""
    return not is_expert(name)


def _only(model: nn.Module, *, of_experts: bool) -> nn.Module:
    """A module that has some of the parameters of a model, under their names."""
    from torch import nn

    class Some(nn.Module):
        def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
            for name, parameter in model.named_parameters():
                if is_expert(name) == of_experts:
                    yield name, parameter

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return (parameter for _, parameter in self.named_parameters())

    return Some()


class FoldedModel:
    """See :class:`~shoal.parallel.protocols.ShardedModel`.

    Args:
        model: whole, as this rank has it.
        rest: of its parameters beside the experts'.
        experts: of the experts'.
    """

    def __init__(self, model: nn.Module, rest: ShardedModel, experts: ShardedModel) -> None:
        self.model, self._rest, self._experts = model, rest, experts

    @property
    def overlap(self) -> bool:
        """See :class:`~shoal.parallel.protocols.ShardedModel`."""
        return self._rest.overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self._rest.overlap = self._experts.overlap = value

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes of gradients that travelled in the last step's backward passes, and after them."""
        both = [one for one in (self._rest, self._experts) if isinstance(one, ReplicatedModel)]
        return sum(one.hidden_bytes for one in both), sum(one.after_bytes for one in both)

    def sliced(self) -> ReplicatedModel:
        """What sums the gradients beside the experts', in slices if it is set to."""
        assert isinstance(self._rest, ReplicatedModel)
        return self._rest

    def _of(self, name: str) -> ShardedModel:
        return self._experts if is_expert(name) else self._rest

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        with ExitStack() as both:
            for one in (self._rest, self._experts):
                both.enter_context(one.accumulate(last=last))
            yield

    def finish(self) -> None:
        """Sum the gradients, each over its own ranks."""
        self._rest.finish()
        self._experts.finish()

    def owned(self) -> dict[str, Tensor]:
        """What this rank's optimizer updates, in the order of the model."""
        both = self._rest.owned() | self._experts.owned()
        return {name: both[name] for name, _ in self.model.named_parameters() if name in both}

    def held(self) -> dict[str, LocalParameter]:
        """What this rank holds, in the order of the model."""
        both = self._rest.held() | self._experts.held()
        return {name: both[name] for name, _ in self.model.named_parameters() if name in both}

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the chosen gradients."""
        return self._rest.squared_norm(counts) + self._experts.squared_norm(counts)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        self._rest.scale_gradients(factor)
        self._experts.scale_gradients(factor)

    def publish(self) -> None:
        """Make every rank see every new parameter."""
        self._rest.publish()
        self._experts.publish()

    def writes(self, name: str) -> bool:
        """Whether this rank saves its part of the parameter ``name``."""
        return self._of(name).writes(name)
