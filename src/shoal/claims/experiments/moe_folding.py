"""[92] MoE Parallel Folding: do experts with a grid of their own keep their tokens inside a node?

Source: Liu et al., MoE Parallel Folding: Heterogeneous Parallelism Mappings for Efficient
Large-Scale MoE Model Training with Megatron Core, 2025.

- Sixty-four ranks, eight a node, tp = cp = 2 and ep = 8: who of a group of experts is on another
  node, where groups are neighbours and where they are inside dp; and what the cost model makes of
  both for four mixtures, with 400 GB/s inside a node and 50 GB/s between nodes.
- Eight ranks on two nodes that really route: every byte that is sent to experts and back, near and
  far, beside what the plan counts of that routing.
- Training steps beside one process, over grids of four and eight ranks.
- A layer of experts on one core: what permuting costs beside the experts, for eight of width 512
  and for those of a tiny model, sixteen of width 128.

The A/A run has the experts inside dp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part

if TYPE_CHECKING:
    from shoal.ir import Machine, Parallel

__all__ = ["MoeFoldingClaim"]

_SHAPES = ("Mixtral-8x7B-v0.1", "Mixtral-8x22B-v0.1", "Qwen2-57B-A14B", "Qwen3-30B-A3B")
_PER_NODE = 8


@part
class MoeFoldingClaim(BaseClaim):
    """Folded grids beside experts inside dp.

    Args:
        seq_len: tokens of a sequence, of the simulated steps.
        global_batch: sequences of one.
        hidden: width of the layer that is timed.
        tiny: width of the small one.
        tokens: that pass them.
        rounds: timed rounds.
    """

    seq_len: Annotated[int, Ge(1)] = 4096
    global_batch: Annotated[int, Ge(1)] = 256
    hidden: Annotated[int, Ge(1)] = 512
    tiny: Annotated[int, Ge(1)] = 128
    tokens: Annotated[int, Ge(1)] = 2048
    rounds: Annotated[int, Ge(1)] = 150

    rows: ClassVar[tuple[int, ...]] = (92,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.moe_folding_ranks import (
            SPLITS,
            errors,
            layer_and_permuting,
            routed_bytes,
        )

        fold = not run.as_baseline
        run.progress("sixty-four ranks", 0.05)
        steps = {name: self._simulated(name) for name in _SHAPES}
        run.put("off_node", _off_node(fold=fold))
        run.put(
            "simulated",
            (one[fold] for one in steps.values()),
            (one[False] for one in steps.values()),
        )
        run.progress("eight ranks that route", 0.2)
        sent = routed_bytes(run.seed, fold=fold)
        run.put("far_bytes", sent.far)
        run.put("uncounted_bytes", sent.uncounted)
        run.progress("steps beside one process", 0.3)
        run.put("error", errors(SPLITS[: 2 if run.quick else None]))
        run.details |= {
            "over_inside_dp": {name: one[False] / one[True] for name, one in steps.items()},
            "near_bytes": sent.near,
            "rows_of_experts": sent.rows,
        }
        if run.quick:
            return
        run.progress("permuting beside the layer", 0.6)
        for name, experts, width in (
            ("permuting", 8, self.hidden),
            ("permuting_tiny", 16, self.tiny),
        ):
            layer, permuting = layer_and_permuting(experts, width, self.tokens, run.seed)
            arms = {"method": permuting, "baseline": layer}
            timed = run.race(arms, self.rounds, threads=1)
            run.put(name, timed["method"], timed["baseline"])

    def _simulated(self, name: str) -> dict[bool, float]:
        """Seconds of a step on sixty-four ranks, folded and with experts inside dp."""
        from shoal.cost.shapes import find
        from shoal.cost.training.step import estimate
        from shoal.ir import TrainJob, Work

        result = {}
        for fold in (True, False):
            job = TrainJob(
                model=name,
                seq_len=self.seq_len,
                global_batch=self.global_batch,
                microbatch=1,
                parallel=_grid(fold=fold),
                shard=Choice(name="zero1"),
            )
            result[fold] = estimate(Work(job=job, shape=find(name)), _machine()).step_s.value
        return result


def _grid(*, fold: bool) -> Parallel:
    from shoal.ir import Parallel

    return Parallel(dp=16, tp=2, cp=2, ep=8, sp=True, fold=fold)


def _off_node(*, fold: bool) -> list[int]:
    """Of every rank, how many of its group of experts are on other nodes."""
    results = []
    for group in _grid(fold=fold).experts().groups("ep"):
        for rank in group:
            results.append(sum(other // _PER_NODE != rank // _PER_NODE for other in group))
    return results


def _machine() -> Machine:
    """Sixty-four H100, eight a node; 400 GB/s between those of a node, 50 GB/s between nodes."""
    from shoal.machine.described import load

    machine = load("64xH100")
    rates = {"device": 400e9, "node": 50e9}
    links = tuple(
        link.model_copy(update={"bandwidth": rates[link.scope]}) for link in machine.links
    )
    return machine.model_copy(update={"links": links})
