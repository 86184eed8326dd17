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

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import Choice, part
from shoal.kernel.threads import torch_threads

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

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        from shoal.claims.experiments.moe_folding_ranks import SPLITS, errors, routed_bytes

        fold = not as_baseline
        context.progress("sixty-four ranks", 0.05)
        steps = {name: self._simulated(name) for name in _SHAPES}
        context.progress("eight ranks that route", 0.2)
        sent = routed_bytes(context.seed, fold=fold)
        context.progress("steps beside one process", 0.3)
        metrics = {
            "off_node": PairedSamples(method=tuple(map(float, _off_node(fold=fold)))),
            "simulated": PairedSamples(
                method=tuple(one[fold] for one in steps.values()),
                baseline=tuple(one[False] for one in steps.values()),
            ),
            "far_bytes": PairedSamples(method=(sent.far,)),
            "uncounted_bytes": PairedSamples(method=(sent.uncounted,)),
            "error": PairedSamples(method=errors(SPLITS[:2] if quick else SPLITS)),
        }
        details: dict[str, Any] = {
            "over_inside_dp": {name: one[False] / one[True] for name, one in steps.items()},
            "near_bytes": sent.near,
            "rows_of_experts": list(sent.rows),
        }
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        context.progress("permuting beside the layer", 0.6)
        sizes = {"permuting": (8, self.hidden), "permuting_tiny": (16, self.tiny)}
        for name, size in sizes.items():
            metrics[name] = self._permuting(context, *size, whole=as_baseline)
        return ClaimSamples(metrics=metrics, details=details)

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

    def _permuting(
        self, context: ExperimentContext, experts: int, width: int, *, whole: bool
    ) -> PairedSamples:
        """Seconds of permuting rows to experts and back, beside those of the whole layer."""
        from shoal.claims.experiments.moe_folding_ranks import layer_and_permuting
        from shoal.core.measure import interleave

        layer, permuting = layer_and_permuting(experts, width, self.tokens, context.seed)
        with torch_threads(1):
            timed = interleave(
                {"method": layer if whole else permuting, "baseline": layer},
                self.rounds,
                seed=context.seed,
            ).seconds
        return PairedSamples(method=timed["method"], baseline=timed["baseline"])


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
