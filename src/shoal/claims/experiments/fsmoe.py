"""[35] FSMoE: do chunks of their own for forward and backward pass make layers of experts faster?

Source: Pan et al., FSMoE: A Flexible and Scalable Training System for Sparse Mixture-of-Experts
Models, 2025.

1458 layers on six described nodes of eight devices: chosen chunks beside one chunk, beside the best
shared number where messages inside and between nodes wait for each other (Tutel), and beside all of
1 to 32. Layers beside one process. Four processes on two emulated nodes: chunks chosen from eight
timed sizes, with and without. The A/A run has one chunk.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import apart, mixture
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from shoal.cost.training.moe_tasks import MoeLayer
    from shoal.ir import Machine, ModelShape

_RANKS = "shoal.claims.experiments.fsmoe_ranks"
_NODES, _PER_NODE = 6, 8
# Sequences of a rank, their tokens, hidden size, experts' width over it, experts of a token,
# experts of a node, matrices of an expert.
_GRID = (
    (1, 2, 4), (512, 1024, 2048), (1024, 2048, 4096), (2, 3, 4), (1, 2, 4), (1, 2, 4),
    (False, True),
)  # fmt: skip
# Grids of ranks whose rows travel in chunks.
_SPLITS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2, "expert_chunks": [3, 5]},
    {"dp": 2, "etp": 2, "expert_chunks": [4, 2]},
    {"dp": 4, "ep": 2, "etp": 2, "expert_chunks": [2, 7]},
)


class _Seconds(NamedTuple):
    """Of one layer forward and back."""

    chosen: float
    one: float
    tutel: float
    best: float
    r: tuple[int, int]


@part
class FsmoeClaim(BaseClaim, row=35, needs=("torch",)):
    """Layers of experts in chunks, simulated on two levels of links and really run on four ranks.

    Args:
        hidden: width of the layer that is really run.
        width: width of its experts.
        tokens: tokens of a rank.
        repeats: pairs of timings.
    """

    hidden: Annotated[int, Ge(4)] = 512
    width: Annotated[int, Ge(4)] = 1024
    tokens: Annotated[int, Ge(4)] = 1024
    repeats: Annotated[int, Ge(4)] = 24

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        sample = list(product(*_GRID))[:: 73 if run.quick else 1]
        result = run.remember(f"simulated {len(sample)}", lambda: _simulated(run.context, sample))
        chosen = [run.pick(one.chosen, one.one) for one in result]
        pairs = list(zip(result, chosen, strict=True))
        run.progress("steps beside one process", 0.5)
        run.put("over_one_chunk", (one.one / mine for one, mine in pairs))
        run.put("over_shared", (run.pick(one.tutel, mine) / mine for one, mine in pairs))
        run.put("over_exhaustive", (one.chosen / one.best - 1 for one in result))
        run.put("passes_differ", (one.r[0] != one.r[1] and not run.as_baseline for one in result))
        config = mixture(32, 2, 4, 16)
        run.put("error", (apart(split, config) for split in _SPLITS[: 1 if run.quick else None]))
        if run.quick:
            return
        if run.lacks(unavailable(), "real_speedup"):
            return
        try:
            self._real(run)
        except PlanError as cause:
            # Times that do not grow with the size say nothing about chunks: too noisy a machine.
            run.skip(f"the tasks' times have no line: {cause}", "real_speedup")

    def _real(self, run: ClaimRun) -> None:
        """Seconds of a layer on four processes of two nodes, in chunks and not."""
        from shoal.claims.experiments.fsmoe_ranks import RANKS, SIZES
        from shoal.cost.training.moe_tasks import fitted, passes
        from shoal.plan.experts.moe_overlap import choose

        given: dict[str, Any] = {"hidden": self.hidden, "width": self.width, "tokens": self.tokens}

        def on(target: str, bandwidth: float, **more: Any) -> list[Any]:
            with emulate(2, bandwidth=bandwidth) as network:
                where = f"{_RANKS}:{target}"
                return on_ranks(where, RANKS, network=network, timeout_s=240.0, **given, **more)

        run.progress("tasks of the layer", 0.6)
        bytes_ = 2.0 * self.tokens * self.hidden * 4
        fast = run.remember("experts", lambda: on("tasks_s", 1e9, repeats=3))
        whole_s = max(one["experts"][-1] for one in fast)
        # Forward and back, two exchanges take as long as the experts do on average; half of what
        # a rank has goes to the other node.
        bandwidth = RANKS // 2 * bytes_ / 2 / (1.5 * whole_s / 2)
        timed = run.remember("tasks", lambda: on("tasks_s", bandwidth, repeats=5))
        sizes = [bytes_ * one for one in SIZES]
        names = ("exchange", "gather", "experts")
        lines = [fitted(sizes, list(slowest(timed, name)), name) for name in names]
        both = passes(lines[0], lines[1], lines[2], (bytes_, bytes_, bytes_), self.tokens)
        chunks = [choose(one).r for one in both]
        run.progress("the layer in chunks", 0.8)
        cut = run.arms({"cut": chunks, "uncut": [1, 1]}, {"cut": "uncut"})["cut"]
        ranks = on("layer_s", bandwidth, repeats=self.repeats, chunks=cut)
        run.put("real_speedup", slowest(ranks, "cut"), slowest(ranks, "uncut"))


def _simulated(context: ExperimentContext, grid: list[tuple[Any, ...]]) -> list[_Seconds]:
    """Seconds of every layer of the grid."""
    from shoal.plan.experts.moe_overlap import choose, exhaustive

    machine, result = _machine(), []
    for number, one in enumerate(grid):
        if number % 50 == 0:
            context.progress(f"layer {number} of {len(grid)}", 0.5 * number / len(grid))
        layer = _layer(machine, *one)
        both = layer.forward, layer.backward
        mine = [choose(pass_) for pass_ in both]
        every = [exhaustive(pass_) for pass_ in both]
        tutel = [exhaustive(pass_, one_link=True) for pass_ in both]
        result.append(
            _Seconds(
                chosen=sum(cut.seconds for cut in mine),
                one=sum(seconds[0] for seconds in every),
                tutel=min(map(sum, zip(*tutel, strict=True))),
                best=sum(min(seconds) for seconds in every),
                r=(mine[0].r, mine[1].r),
            )
        )
    return result


def _layer(
    machine: Machine,
    sequences: int,
    seq_len: int,
    hidden: int,
    wider: int,
    top_k: int,
    experts: int,
    gated: bool,
) -> MoeLayer:
    from shoal.cost.training.moe_tasks import layer_of
    from shoal.ir import ModelShape, Parallel

    shape: ModelShape = ModelShape(
        name="layer", num_layers=1, hidden=hidden, num_heads=hidden // 128,
        num_kv_heads=hidden // 128, head_dim=128, ffn_hidden=wider * hidden, gated=gated,
        num_experts=experts * _NODES, top_k=top_k, expert_hidden=wider * hidden, vocab_size=32000,
    )  # fmt: skip
    split = Parallel(dp=_NODES * _PER_NODE, ep=_NODES, etp=_PER_NODE)
    return layer_of(shape, machine, split, sequences * seq_len, seq_len)


def _machine() -> Machine:
    """Six nodes of eight L40S on PCIe, joined by one port of 100 Gbit/s a node."""
    from shoal.machine.described import load

    machine = load(f"{_NODES * _PER_NODE}xL40S")
    links = tuple(
        link.model_copy(update={"bandwidth": 12.5e9 / _PER_NODE}) if link.scope == "node" else link
        for link in machine.links
    )
    return machine.model_copy(update={"links": links})
