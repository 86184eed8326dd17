"""[92] MoE Parallel Folding: do experts with a grid of their own keep their tokens inside a node?

Source: Liu et al., MoE Parallel Folding: Heterogeneous Parallelism Mappings for Efficient
Large-Scale MoE Model Training with Megatron Core, 2025.

- Sixty-four ranks, eight a node, tp = cp = 2 and ep = 8: who of a group of experts is on another
  node, where groups are neighbours and where they are inside dp; and what the cost model makes of
  both for four mixtures, with 400 GB/s inside a node and 50 GB/s between nodes.
- Eight ranks on two nodes that really route: every byte that is sent to experts and back, near and
  far, beside what the plan counts of that routing.
- Training steps beside one process, over grids of four and eight ranks.
- One layer of eight experts on one core: what permuting costs beside the experts.

The A/A run has the experts inside dp.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.claims.protocols import Attempt, Context, Metric, Paired, Samples
from shoal.core.errors import require
from shoal.core.parts import Choice, part

if TYPE_CHECKING:
    from shoal.ir import Machine

__all__ = ["MoeFoldingClaim"]

_INSIDE = "experts inside dp"
_SHAPES = ("Mixtral-8x7B-v0.1", "Mixtral-8x22B-v0.1", "Qwen2-57B-A14B", "Qwen3-30B-A3B")
_PER_NODE = 8


@part
class MoeFoldingClaim:
    """Folded grids beside experts inside dp.

    Args:
        seq_len: tokens of a sequence, of the simulated steps.
        global_batch: sequences of one.
        hidden: width of the layer that is timed.
        tokens: that pass it.
        rounds: timed rounds.
    """

    seq_len: int = 4096
    global_batch: int = 256
    hidden: int = 512
    tokens: int = 2048
    rounds: int = 30

    rows: ClassVar[tuple[int, ...]] = (92,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric.counted("off_node", "<=", 0.0, _INSIDE, statistic="max", evidence="arithmetic"),
        Metric(
            name="simulated",
            unit="x",
            statistic="speedup",
            comparison=">=",
            threshold=1.15,
            baseline=_INSIDE,
            evidence="simulated",
            paper="49.3 % MFU of Mixtral 8x22B, 39.0 % of Qwen2-57B-A14B",
        ),
        Metric.counted("far_bytes", "<=", 0.0, _INSIDE, statistic="max", evidence="mechanism"),
        Metric.counted(
            "uncounted_bytes", "<=", 0.0, "the plan, of that routing", statistic="max"
        ),
        Metric.counted("error", "<=", 1e-9, "one process, in float64", statistic="max"),
        Metric(
            name="permuting",
            unit="1",
            statistic="ratio",
            comparison="<=",
            threshold=0.10,
            baseline="the layer of experts",
            evidence="mechanism",
            timing=True,
        ),
    )
    attempts: ClassVar[tuple[Attempt, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch", "hidden", "tokens", "rounds"):
            value = getattr(self, name)
            require(value >= 1, f"claim.moe_folding.{name}", value, expected="1 or more")

    def refuses(self, context: Context) -> str | None:
        """Models need torch."""
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None
