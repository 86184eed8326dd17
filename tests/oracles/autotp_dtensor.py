"""A tensor-parallel plan as torch's own: what ``parallelize_module`` of DTensor takes.

Source: PyTorch, Tensor Parallelism (``torch.distributed.tensor.parallel``), 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor.parallel import ParallelStyle

    from shoal.plan.autotp.plan import TensorPlan


def torch_styles(plan: TensorPlan) -> dict[str, ParallelStyle]:
    """Module -> style.

    The model's own code runs on the parts, so it must take its sizes from its inputs (``-1`` in
    a view), as newer families of transformers do.

    Args:
        plan: of a model without fused projections.

    Raises:
        PlanError: a fused projection, of which torch would cut consecutive parts.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    made: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": lambda: ColwiseParallel(),
        "rowwise": lambda: RowwiseParallel(),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(),
    }
    out: dict[str, ParallelStyle] = {}
    for module, style in plan.dtensor().items():
        if style not in made:
            raise PlanError(
                f"{module}: {style}: torch's styles cut a fused projection into consecutive parts, "
                "which are not whole heads; run the plan with split_model, or split the projection"
            )
        out[module] = made[style]()
    return out
