"""Two shardings of one model: of the experts over their own data-parallel ranks, and of the rest.

Stages 2 and 3 gather a block twice, its experts over one group and all else over another. Where
one of the two groups is a single rank, what lies there is whole, and stays so.

Source: Liu et al., MoE Parallel Folding, 2025, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.shard.replicated import ReplicatedModel
from shoal.parallel.shard.several import SeveralModels, sharded_part
from shoal.parallel.shard.units import check_divided
from shoal.parallel.tensor.slices import is_expert

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.protocols import Comm, Shard


def folded(
    shard: Shard, model: nn.Module, data: Comm, edp: Comm, *, whole_matrices: bool
) -> FoldedModel:
    """Shard the experts of a model over ``edp`` and all else over ``data``.

    Raises:
        ConfigError: there is nothing to divide over, or the optimizer needs whole matrices.
    """
    if shard.divides & {"gradients", "weights"}:
        check_divided(max(data, edp, key=lambda comm: comm.world), whole_matrices=whole_matrices)
    groups = ((_of_rest, data), (is_expert, edp))
    return FoldedModel(
        model,
        [sharded_part(shard, model, c, of, whole_matrices=whole_matrices) for of, c in groups],
    )


def _of_rest(name: str) -> bool:
    """The parameter is of none of them."""
    return not is_expert(name)


class FoldedModel(SeveralModels):
    """The rest first, then the experts."""

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes of gradients that travelled in the last step's backward passes, and after them."""
        both = [p.model for p in self.parts if isinstance(p.model, ReplicatedModel)]
        return sum(one.hidden_bytes for one in both), sum(one.after_bytes for one in both)

    def sliced(self) -> ReplicatedModel:
        """What sums the gradients beside the experts', in slices if it is set to."""
        rest = self.parts[0].model
        assert isinstance(rest, ReplicatedModel)
        return rest
