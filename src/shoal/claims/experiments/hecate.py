"""[65] Hecate: do copies of popular experts, made anew for every step, even out who does what?

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data Parallelism,
2025.

Training without a balancing loss on four processes, each with four experts, half a core and a
shaped link: seconds of 50 steps beside experts on their owners, and beside experts that move every
50 steps and take their optimizer's state along. Widths and sequences are a sixteenth of Mixtral
8x7B's; the links' rate is such that rows travel for as large a share of the seconds of computing as
on devices of 400 TFLOP/s with 400 GB/s.

What a mixture of 32 experts routes in such a training, routed again on eight simulated devices:
rows of the busiest over the mean, and steps. The same by Zipf's law. Four ranks on two nodes that
gather, every byte counted; steps beside one process. The A/A run has experts on their owners; where
experts that move are the baseline, these.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import apart, mixture, train_job
from shoal.claims.frame import ClaimRun, wire_bytes
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import part, table
from shoal.machine.core_limit import unlimited
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.claims.lab.replay import ExpertCosts, ReplayResult
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.ir import TrainJob
    from shoal.plan.placement.protocols import Devices, Ints

_DEVICES, _PER_NODE = 8, 8
# Of the simulated devices: FLOP/s, and byte/s inside a node and between nodes.
_FLOPS, _NEAR, _FAR = 400e12, 400e9, 50e9
_RANKED, _MODEL = "shoal.claims.experiments.expert_ranks", "Mixtral-8x7B-v0.1"
_PLACERS: dict[str, Any] = {
    "owners": {"name": "owners"},
    "rearranged": {"name": "fssdp", "slots": 0, "resharding_every": 50},
}


@part
class HecateClaim(BaseClaim, row=65, needs=("torch",)):
    """Sparse copies beside plain and beside rearranged expert parallelism.

    Args:
        steps: steps of the training whose routing is recorded.
        slots: copies that a device has room for.
        tokens: tokens of a device and step, of the simulated layer.
        scale: what widths and tokens of the steps that are run are divided by.
        every: steps that are timed at a time.
        turns: how often.
    """

    steps: Annotated[int, Ge(1)] = 240
    slots: Annotated[int, Ge(0)] = 2
    tokens: Annotated[int, Ge(1)] = 4096
    scale: Annotated[int, Ge(1)] = 16
    every: Annotated[int, Ge(1)] = 50
    turns: Annotated[int, Ge(1)] = 5

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.plan.placement.protocols import Devices

        method: Any = run.pick({"name": "fssdp", "slots": self.slots}, "owners")
        run.progress("training that is recorded", 0.05)
        steps = 24 if run.quick else self.steps
        trace = run.remember(f"trace {steps}", lambda: recorded(steps, _DEVICES, run.seed))
        run.progress("routing it again", 0.5)
        devices = Devices(_DEVICES, _PER_NODE)
        result = self._replayed(trace, devices, method, _MODEL)
        zipf = _zipf(30 if run.quick else 200, Devices(16, 8), self.tokens, run.seed)
        skewed = self._replayed(zipf, Devices(16, 8), method, "Qwen3-30B-A3B")
        run.put("imbalance", *_by(result, "owners", "imbalance"))
        run.put("imbalance_of_zipf", *_by(skewed, "owners", "imbalance"))
        run.put("simulated_over_owners", *_by(result, "owners", "seconds"))
        run.put(
            "simulated_over_rearranged", *_by(result, run.pick("rearranged", "method"), "seconds")
        )
        run.progress("ranks that gather", 0.8)
        there = copied(method, run.seed)
        run.put("borrowed", there.borrowed)
        run.put("uncounted_bytes", there.uncounted)
        run.put("error", errors(method, quick=run.quick))
        if run.quick or run.lacks(unavailable() or unlimited(), "over_owners", "over_rearranged"):
            return
        run.progress("steps of four processes", 0.9)
        self._run(run)

    def _run(self, run: ClaimRun) -> None:
        """Seconds of steps on four ranks of half a core, by placer."""
        from shoal.claims.experiments.expert_ranks import scaled
        from shoal.cost.shapes import find

        length, costs = self.tokens // self.scale, self._costs(_MODEL)
        config = scaled(find(_MODEL), self.scale, layers=1, experts=4 * _RANKS, length=length)
        given: dict[str, Any] = {"config": config, "timeout_s": 1200.0}
        with emulate(_RANKS, bandwidth=1e9, cores=0.5) as network:
            alone = on_ranks(
                f"{_RANKED}:passes_s", _RANKS, network=network, job=_small(length, None),
                rounds=5, **given,
            )  # fmt: skip
        computing_s = max(map(statistics.median, alone))
        # Rows there and back, and their gradients: three of four go to other devices.
        rows, crossing = _TOP_K * self.tokens, 4 * 3 / 4
        share = crossing * rows * costs.row_bytes / _NEAR
        share /= 3 * (costs.attention_s + rows * costs.row_s)
        bandwidth = crossing * _TOP_K * length * 4 * config.hidden / (share * computing_s)
        method = {"fssdp": {"name": "fssdp", "slots": self.slots}}
        again = {f"{name} again": placer for name, placer in _PLACERS.items()}
        placers = _PLACERS | run.pick(method, again)
        jobs = {name: _small(length, placer, seed=run.seed) for name, placer in placers.items()}
        with emulate(_RANKS, bandwidth=bandwidth, cores=0.5) as network:
            ranks = on_ranks(
                f"{_RANKED}:steps_s", _RANKS, network=network, jobs=jobs, rounds=self.turns,
                steps=self.every, **given,
            )  # fmt: skip
        seconds = {name: slowest(ranks, name) for name in jobs}
        for name in _PLACERS:
            bound = statistics.median(seconds[name]) / (self.every * computing_s)
            mine = seconds[run.pick("fssdp", f"{name} again")]
            run.put(f"over_{name}", mine, seconds[name], bound=bound)
        run.profile = f"{bandwidth / 1e6:.0f} MB/s, computing {1e3 * computing_s:.0f} ms a step"
        for name, of in seconds.items():
            run.profile += f", {name} {1e3 * statistics.median(of) / self.every:.0f} ms"

    def _costs(self, model: str) -> ExpertCosts:
        """A layer of a mixture."""
        from shoal.claims.lab.replay import ExpertCosts
        from shoal.cost.shapes import find

        shape = find(model)
        matrices = 3.0 * shape.hidden * shape.expert_hidden
        kv = 2 * shape.num_kv_heads * shape.head_dim
        query = 2 * shape.num_heads * shape.head_dim
        products = 2.0 * shape.hidden * (kv + query) + 2.0 * self.tokens * query / 2
        return ExpertCosts(
            row_s=2.0 * matrices / _FLOPS,
            attention_s=self.tokens * products / _FLOPS,
            row_bytes=2.0 * shape.hidden,
            expert_bytes=2.0 * matrices,
            state_bytes=14.0 * matrices,  # bf16, and fp32 weights and both moments of Adam
            near=_NEAR,
            far=_FAR,
        )

    def _replayed(
        self, trace: Ints, devices: Devices, method: Any, model: str
    ) -> dict[str, ReplayResult]:
        """What each placer makes of a trace that is scaled to the tokens of a device."""
        from shoal.claims.lab.rearranged import RearrangedPlacement
        from shoal.claims.lab.replay import replay

        wanted = 2 * self.tokens
        scaled = trace * max(1, round(wanted / float(trace.sum(-1).mean())))
        costs = self._costs(model)
        build = table("placer").build
        placers = {
            "method": build(method),
            "owners": build("owners"),
            "rearranged": RearrangedPlacement(every=50),
        }
        return {name: replay(scaled, placer, devices, costs) for name, placer in placers.items()}


def _by(found: dict[str, ReplayResult], baseline: str, what: str) -> list[list[float]]:
    """Step by step, the mean over layers, of the method and of the baseline."""
    both = (getattr(found[name], what) for name in ("method", baseline))
    return [(values if values.ndim == 1 else values.mean(1)).tolist() for values in both]


def _zipf(steps: int, devices: Devices, tokens: int, seed: int, experts: int = 32) -> Ints:
    """Rows [S, 1, D, E] by Zipf's law; now and then two experts change their places."""
    from shoal.core.random import generator

    source = generator(seed, purpose="zipf routing")
    chance = 1 / np.arange(1, experts + 1)
    place = source.permutation(experts)
    array = np.zeros((steps, 1, devices.count, experts), dtype=np.int64)
    for step in range(steps):
        if source.random() < 0.1:
            one, other = source.choice(experts, 2, replace=False)
            place[[one, other]] = place[[other, one]]
        of = (chance / chance.sum())[place]
        array[step, 0] = source.multinomial(2 * tokens, of, size=devices.count)
    return array


def _small(length: int, placer: Any, *, seed: int = 0) -> TrainJob:
    """A job of four sequences on four ranks; of one on one, without a placer."""
    split = {"dp": _RANKS, "ep": _RANKS, "placer": placer}
    return train_job(
        seq_len=length, global_batch=1 if placer is None else _RANKS, microbatch=1, seed=seed,
        optimizer={"name": "adamw", "lr": 3e-3}, parallel={} if placer is None else split,
    )  # fmt: skip


# Four a device of the simulated.
_EXPERTS, _TOP_K = 32, 2
_RANKS, _RANKS_A_NODE, _TOKENS, _STEPS = 4, 2, 64, 6

SPLITS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    {"dp": 2, "cp": 2, "ep": 4},
)


def recorded(steps: int, devices: int, seed: int) -> Ints:
    """Train a small mixture without a balancing loss; rows [S, L, D, E] that it routes."""
    import torch

    from shoal.claims.experiments.arch_training import Recipe, mini, text, train
    from shoal.model.feedforward import Experts
    from shoal.train import zoo

    config = mini(64, 2, ffn=64, family="mixtral", num_experts=_EXPERTS, top_k=_TOP_K)
    model = zoo.random(config, seed)
    rows: list[Ints] = []

    def note(module: Any, given: Any, logits_NE: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        chosen = torch.topk(logits_NE.detach(), _TOP_K, dim=-1).indices.flatten()
        source = torch.arange(len(chosen)) * devices // len(chosen)
        flat = torch.bincount(source * _EXPERTS + chosen, minlength=devices * _EXPERTS)
        rows.append(flat.view(devices, _EXPERTS).numpy())

    routers = [module.router for module in model.modules() if isinstance(module, Experts)]
    hooks = [router.register_forward_hook(note) for router in routers]
    train(model, text().train, Recipe(steps=steps, batch=2 * devices, length=128), seed)
    for hook in hooks:
        hook.remove()
    return np.stack(rows).reshape(steps, len(hooks), devices, _EXPERTS)


class CopiedRun(NamedTuple):
    """Experts that a rank had beside its own, at most; bytes beside those that the table says."""

    borrowed: tuple[int, ...]
    uncounted: float


def copied(placer: Any, seed: int) -> CopiedRun:
    """Route on four ranks for some steps, some experts far more popular than others."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter
    from shoal.core.parts import Choice
    from shoal.ir import Parallel
    from shoal.ir.hooks import TrainStep
    from shoal.model.routing import StepRouting
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.expert.balance import Routers
    from shoal.parallel.expert.copies import copies_of, sent_copies
    from shoal.parallel.expert.fssdp import CopiedExperts, dispatched
    from shoal.parallel.expert.layer_copies import TAG

    config = mixture(32, 1, _EXPERTS, 16)
    source = torch.Generator().manual_seed(seed)
    x_SRND = torch.randn(_STEPS, _RANKS, _TOKENS, config.hidden, generator=source) + 0.5
    router = torch.randn(_EXPERTS, config.hidden, generator=source)
    choice, meter = Choice.model_validate(placer), Meter()

    def on(comm: ThreadComm) -> tuple[int, float]:
        ranks = ranks_of(comm, Parallel(dp=_RANKS, ep=_RANKS)).experts
        assert ranks is not None
        layer = dispatched(config, ranks, 0, choice)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.router.weight.copy_(router)
        most, said, place = 0, 0.0, torch.arange(_TOKENS)
        routers = Routers(layer, 1, _EXPERTS, _RANKS, comm)
        size = sum(p[0].numel() * 4 for p in (layer.gate_up_proj, layer.down_proj))
        for step, x_RND in enumerate(x_SRND):
            if isinstance(layer, CopiedExperts):
                own = copies_of(layer.owner_E, layer.held, layer.devices, comm.rank)
                most = max(most, own.count)
                # There, and gradients back; each is counted where it is sent.
                travels = sent_copies(layer.owner_E, layer.held, layer.devices)
                said += 2 * size * len(travels) / _RANKS
            of = StepRouting(seed, step, comm.rank, _RANKS)
            tokens = of.over(place, _TOKENS, 1, training=True)
            torch.autograd.backward(layer(x_RND[comm.rank], tokens=tokens).sum())
            routers.finish()
            routers.published(TrainStep(step, _STEPS))
        return most, said

    ranks = run_ranks(_RANKS, on, meter=meter, ranks_per_node=_RANKS_A_NODE)
    wire = wire_bytes(meter.totals(), TAG)
    counted = sum(said for _, said in ranks)
    return CopiedRun(tuple(most for most, _ in ranks), abs(wire - counted))


def errors(placer: Any, *, quick: bool) -> tuple[float, ...]:
    """Largest relative difference to one process after steps with copies, in float64."""
    config = mixture(32, 2, 4, 16)
    splits = SPLITS[: 1 if quick else None]
    return tuple(apart({**split, "placer": placer}, config, steps=3) for split in splits)
