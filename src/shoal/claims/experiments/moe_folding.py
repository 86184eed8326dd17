"""[92] MoE Parallel Folding: do experts with a grid of their own keep their tokens inside a node?

Source: Liu et al., MoE Parallel Folding: Heterogeneous Parallelism Mappings for Efficient
Large-Scale MoE Model Training with Megatron Core, 2025.

Training steps of four processes on two emulated nodes: groups of experts on one node beside groups
inside dp. Widths and sequences are a sixteenth of the paper's mixtures. Two ratios are those of
sixty-four H100, eight a node, tp = cp = 2 and ep = 8, links of 400 GB/s inside a node and 50 GB/s
between: seconds of rows between nodes over seconds of computing (by the link's rate), and bytes of
experts' gradients over bytes of rows (by the number of sequences).

What the cost model makes of these sixty-four. Eight ranks on two nodes that route, every byte
counted; steps beside one process; what permuting costs beside the experts of a layer. The A/A run
has the experts inside dp.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import apart, mixture, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import Choice, part
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.ir import Estimate, Machine, ModelShape, Parallel, TrainJob

_RANKED = "shoal.claims.experiments.expert_ranks"
_PER_NODE, _FAR = 8, 50e9
# Really run: all but Qwen2, whose shared experts travel nowhere.
_RUN = ("mixtral_8x22b", "mixtral_8x22b_g8t8", "llama3_8x70b")


@part
class MoeFoldingClaim(BaseClaim, row=92, needs=("torch",)):
    """Folded grids beside experts inside dp.

    Args:
        seq_len: tokens of a sequence, of the simulated steps.
        global_batch: sequences of one.
        scale: what widths and sequences of the steps that are run are divided by.
        turns: number of times that these steps are timed.
        hidden: width of the layer that is timed.
        tiny: width of the small one.
        tokens: tokens that pass them.
        rounds: timed rounds.
    """

    seq_len: Annotated[int, Ge(1)] = 4096
    global_batch: Annotated[int, Ge(1)] = 256
    scale: Annotated[int, Ge(1)] = 16
    turns: Annotated[int, Ge(1)] = 8
    hidden: Annotated[int, Ge(1)] = 512
    tiny: Annotated[int, Ge(1)] = 128
    tokens: Annotated[int, Ge(1)] = 2048
    rounds: Annotated[int, Ge(1)] = 150

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        fold = not run.as_baseline
        run.progress("sixty-four ranks", 0.05)
        for name, shape in shapes().items():
            own, inside = (self._priced(shape, fold=one) for one in (fold, False))
            computing_s = sum(inside.terms_s[term] for term in _COMPUTING)
            whole_s = inside.step_s.value
            bound = whole_s / computing_s
            run.put(f"simulated_{name}", own.step_s.value, whole_s, bound=bound)
        run.put("off_node", _off_node(fold=fold))
        run.progress("eight ranks that route", 0.2)
        sent = routed_bytes(run.seed, fold=fold)
        run.put("far_bytes", sent.far)
        run.put("uncounted_bytes", sent.uncounted)
        run.progress("steps beside one process", 0.3)
        run.put("error", errors(SPLITS[: 2 if run.quick else None]))
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
        if run.lacks(unavailable(), *_RUN):
            return
        for number, name in enumerate(_RUN):
            run.progress(f"steps on two nodes, {name}", 0.7 + 0.1 * number)
            self._run(run, name, shapes()[name])

    def _run(self, run: ClaimRun, name: str, shape: ModelShape) -> None:
        """Seconds of steps on four ranks of two nodes, folded and with experts inside dp."""
        from shoal.claims.experiments.expert_ranks import scaled
        from shoal.cost.price.experts import dispatch
        from shoal.machine.described import load

        length = self.seq_len // self.scale
        config = scaled(shape, self.scale, layers=1, experts=shape.num_experts, length=length)
        few, wire = config.shape(), dict[str, float]()
        one = _small(2, length, fold=False)
        dispatch(one, few, load("2x2xH100"), 1, wire)
        # Gradients of a rank's experts over rows, as of sixty-four: by the number of sequences.
        rows, sums = self._far_bytes(shape) / 2, 2 * 7 / 8 * _numbers(shape) / 8
        passes = max(1, round(_numbers(few) / 2 / (wire["node"] / 4) * rows / sums))
        sequences = 2 * passes
        jobs = {
            arm: _small(sequences, length, fold=fold)
            for arm, fold in run.arms({"method": True, "baseline": False}).items()
        }
        given: dict[str, Any] = {"config": config, "timeout_s": 600.0}
        # A rank's tokens: half of every sequence of one of the two groups.
        alone = _small(passes, length // 2, fold=None)
        timed = functools.partial(on_ranks, f"{_RANKED}:passes_s", 4, job=alone, rounds=3, **given)
        computing_s = max(map(statistics.median, run.remember(f"computing {name}", timed)))
        # A node's port is that of two ranks.
        priced = self._priced(shape, fold=False).terms_s
        share = self._far_bytes(shape) / _FAR / sum(priced[one] for one in _COMPUTING)
        bandwidth = 2 * wire["node"] * passes / (share * computing_s)
        with emulate(2, bandwidth=bandwidth) as network:
            ranks = on_ranks(
                f"{_RANKED}:steps_s", 4, network=network, jobs=jobs, rounds=self.turns, **given
            )
        folded, inside = (slowest(ranks, arm) for arm in ("method", "baseline"))
        run.put(name, folded, inside, bound=statistics.median(inside) / computing_s)
        run.profile += (
            f"{name}: {sequences} sequences, {bandwidth / 1e6:.0f} MB/s a node: a step of "
            f"{statistics.median(folded):.2f} s, inside dp {statistics.median(inside):.2f} s, of "
            f"which computing {computing_s:.2f} s and rows between nodes {share * computing_s:.2f} "
            "s. "
        )

    def _far_bytes(self, shape: ModelShape) -> float:
        """Of rows that one of sixty-four ranks sends between nodes in a step, experts inside dp."""
        from shoal.cost.price.experts import dispatch

        wire: dict[str, float] = {}
        dispatch(self._job(shape, fold=False), shape, _machine(), 1, wire)
        return wire["node"]

    def _job(self, shape: ModelShape, *, fold: bool) -> TrainJob:
        from shoal.ir import TrainJob

        return TrainJob(
            model=shape.name, seq_len=self.seq_len, global_batch=self.global_batch, microbatch=1,
            parallel=_grid(fold=fold), shard=Choice(name="zero1"),
        )  # fmt: skip

    def _priced(self, shape: ModelShape, *, fold: bool) -> Estimate:
        """A step on sixty-four ranks, folded or with experts inside dp."""
        from shoal.cost.training.step import estimate
        from shoal.ir import Work

        return estimate(Work(job=self._job(shape, fold=fold), shape=shape), _machine())


_COMPUTING = ("matmul", "attention", "memory", "overhead")


def shapes() -> dict[str, ModelShape]:
    """The paper's mixtures: two of them are made of others' layers."""
    from shoal.cost.shapes import find

    mixtral, llama = find("Mixtral-8x22B-v0.1"), find("Llama-3-70B")
    fine = {"num_experts": 64, "top_k": 8, "expert_hidden": mixtral.expert_hidden // 8}
    upcycled = {"num_experts": 8, "top_k": 2, "expert_hidden": llama.ffn_hidden}
    return {
        "mixtral_8x22b": mixtral,
        "mixtral_8x22b_g8t8": mixtral.model_copy(update={"name": "Mixtral-8x22B-G8T8", **fine}),
        "qwen2_57b": find("Qwen2-57B-A14B"),
        "llama3_8x70b": llama.model_copy(update={"name": "Llama-3-8x70B", **upcycled}),
    }


def _numbers(shape: ModelShape) -> float:
    """Of all experts of a model."""
    from shoal.cost.arithmetic import expert_parameters

    return float(expert_parameters(shape))


def _small(sequences: int, length: int, *, fold: bool | None) -> TrainJob:
    """A job on four ranks with so many sequences; on one alone, without a fold."""
    split: dict[str, Any] = {"dp": 2, "tp": 2, "sp": True, "ep": 2, "fold": fold}
    return train_job(
        seq_len=length, global_batch=sequences, shard="zero1",
        microbatch=1, parallel={} if fold is None else split,
    )  # fmt: skip


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
    rates = {"device": 400e9, "node": _FAR}
    links = tuple(
        link.model_copy(update={"bandwidth": rates[link.scope]}) for link in machine.links
    )
    return machine.model_copy(update={"links": links})


# Grids of two, four and eight ranks: experts over each axis, over several, and cut.
SPLITS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    {"dp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 2},
    {"dp": 2, "pp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "cp": 2, "sp": True, "ep": 4},
    {"dp": 4, "tp": 2, "sp": True, "ep": 4, "fold": False},
)
_RANKS, _RANKS_A_NODE, _TOKENS = 8, 4, 96


class SentBytes(NamedTuple):
    """Bytes between two nodes of eight ranks, and beside those that the plan counts."""

    far: float
    uncounted: float


def routed_bytes(seed: int, *, fold: bool) -> SentBytes:
    """Route tokens on eight ranks, some experts far more popular than others, and count."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter
    from shoal.cost.price.expert_hops import routed
    from shoal.ir import Parallel
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.expert.dispatch import DispatchedExperts
    from shoal.parallel.expert.exchange import TAG

    config = mixture(32, 2, 8, 16)
    split = Parallel(dp=4, tp=2, sp=True, ep=4, fold=fold)
    source = torch.Generator().manual_seed(seed)
    # Of states that lean one way, a router chooses some experts far more often than others.
    x_RND = torch.randn(_RANKS, _TOKENS, config.hidden, generator=source) + 0.5
    router = torch.randn(config.num_experts, config.hidden, generator=source)
    meter = Meter()

    def on(comm: ThreadComm) -> list[int]:
        ranks = ranks_of(comm, split).experts
        assert ranks is not None
        layer = DispatchedExperts(config, ranks, 0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.router.weight.copy_(router)
            layer(x_RND[comm.rank])
            chosen = layer.routed(x_RND[comm.rank], None)[0].experts
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=8).tolist()
        return counts

    counts = run_ranks(_RANKS, on, meter=meter, ranks_per_node=_RANKS_A_NODE)
    width = x_RND.element_size() * config.hidden
    planned = [
        2 * size for size in routed(split.experts().groups("ep"), counts, width, _RANKS_A_NODE)
    ]
    totals = meter.totals()
    metered = [
        totals.get(f"wire_bytes{{op=all_to_all,scope={scope},tag={TAG}}}", 0.0)
        for scope in ("loopback", "node")
    ]
    uncounted = sum(abs(one - other) for one, other in zip(metered, planned, strict=True))
    return SentBytes(metered[1], uncounted)


def errors(splits: tuple[dict[str, Any], ...]) -> tuple[float, ...]:
    """Largest relative difference to one process after a step on each grid, in float64."""
    return tuple(apart(split, mixture(32, 2, 4, 16)) for split in splits)


def layer_and_permuting(
    experts: int, width: int, tokens: int, seed: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer of experts of this width, forward and back, and its permuting."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.model.permutation import RoutingPermutation
    from shoal.parallel.expert.dispatch import DispatchedExperts
    from shoal.parallel.protocols import ExpertRanks

    torch.manual_seed(seed)
    one = run_ranks(1, lambda comm: comm)[0]
    layer = DispatchedExperts(mixture(width, 2, experts, width), ExpertRanks(one, one, one, one), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    x_ND = torch.randn(tokens, width, requires_grad=True)
    routed, _ = layer.routed(x_ND, None)
    weight_NK, expert_NK = routed.weights.detach().requires_grad_(True), routed.experts

    def whole() -> None:
        torch.autograd.backward(layer(x_ND).sum())

    def permuting() -> None:
        at = RoutingPermutation(expert_NK, experts)
        torch.autograd.backward(at.unpermute(at.permute(x_ND), weight_NK).sum())

    return whole, permuting
