"""[24] Three-level ZeRO: does little cross slow links, at which memory and which loss?

Source: Xu et al., Scaling Large Language Model Training on Frontier with Low-Bandwidth
Partitioning, 2025; its baseline is Wang et al., ZeRO++, 2023.

Eight ranks on two nodes of two packages: bytes metered between the nodes in a step of four
micro-batches, beside ZeRO 3 and ZeRO++ (int8 weights, int4 gradients in two hops, a second copy in
the node), and what ranks hold beside the formula. GPT-NeoX-20B on 48 nodes of Frontier by the cost
model; steps beside one process; quantisers; 300 steps on bytes beside exact ones. The A/A run has
the baseline.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import train_job
from shoal.claims.frame import ClaimRun, wire_bytes
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm
    from shoal.ir import TrainJob

_QUANT = {"weights": "int8", "grads": "int4"}
_BF16: dict[str, Any] = {"name": "topo3", "levels": [2, 4], "dtype": "bf16"}
_EXACT: dict[str, Any] = {"name": "topo3", "levels": [2, 4]}
_ZEROPP: dict[str, Any] = {"name": "topo3", "levels": [8, 4], "secondary": 4, "quant": _QUANT}
# What a level may be: all on one, none, the whole.
_SWITCHES: tuple[Any, ...] = (
    _EXACT,
    {"name": "topo3", "levels": [8, 8]},
    {"name": "topo3", "levels": [1, 4]},
    {"name": "topo3", "levels": [8, 4], "secondary": 4},
)


@part
class Topo3Claim(BaseClaim, row=24, needs=("torch",)):
    """Three levels beside ZeRO 3 and ZeRO++.

    Args:
        microbatches: microbatches of a rank in a step whose bytes are metered.
        machine: machine of the simulated steps.
        model: model of the simulated steps.
        sequences: sequences of each die in a simulated step.
        steps: steps of the runs that learn.
        seeds: how many of these there are.
    """

    microbatches: Annotated[int, Ge(1)] = 4
    machine: str = "48xFrontier"
    model: str = "GPT-NeoX-20B"
    sequences: Annotated[int, Ge(1)] = 4
    steps: Annotated[int, Ge(1)] = 300
    seeds: Annotated[int, Ge(1)] = 2

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("bytes between nodes", 0.02)
        count = self.microbatches
        zero3 = run.remember("zero3", lambda: node_bytes("zero3", count))
        zeropp = run.remember("zeropp", lambda: node_bytes(_ZEROPP, count))
        exact = zero3 if run.as_baseline else node_bytes(_EXACT, count)
        half = zeropp if run.as_baseline else node_bytes(_BF16, count)
        run.put("of_zero3", exact, zero3)
        run.put("of_zeropp", half, zeropp)
        run.progress("steps on Frontier", 0.1)
        result = run.remember("simulated", self._simulated)
        # A step cannot be shorter than what it computes.
        most = zip(result["zeropp"], result["zeropp, computing"], strict=True)
        bound = statistics.median(step / least for step, least in most)
        run.put("simulated", result[run.pick("topo3", "zeropp")], result["zeropp"], bound=bound)
        run.profile = ", ".join(f"{name} {min(of):.1f} s a step" for name, of in result.items())
        run.progress("steps beside one process", 0.15)
        run.put("uncounted_memory", uncounted(_BF16))
        run.put("error", errors(_SWITCHES[: 1 if run.quick else None]))
        run.put("rounded", _rounded(run.seed))
        if run.quick:
            return
        losses = self._losses(run.context)
        ours = losses[run.pick("quantised", "exact")]
        run.put("loss_gap", (a - b for a, b in zip(ours, losses["exact"], strict=True)))

    def _losses(self, context: ExperimentContext) -> dict[str, list[float]]:
        """Held-out loss by kind and seed, nats a byte."""
        kinds = {
            "exact": {"name": "topo3", "levels": [2, 2]},
            "quantised": {"name": "topo3", "levels": [2, 2], "quant": _QUANT},
        }
        losses: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(self.seeds):
            for name, shard in kinds.items():
                context.progress(f"{self.steps} steps, {name}", 0.3 + 0.7 * number / self.seeds)
                seed = context.seed + number
                made = functools.partial(learn, shard, seed, self.steps, 4)
                losses[name].append(context.remember(f"loss {name} {seed}", made))
        return losses

    def _simulated(self) -> dict[str, list[float]]:
        """Seconds of a step by sharding, with one, two and all sequences in a micro-batch."""
        from shoal.cost.shapes import find
        from shoal.cost.training.step import estimate
        from shoal.ir import Work
        from shoal.machine.described import load

        machine = load(self.machine)
        ranks, node = machine.num_devices, machine.devices_per_node
        package = machine.devices_per_package
        shards: dict[str, Any] = {
            "topo3": {"name": "topo3", "levels": [package, node], "quant": _QUANT},
            "zeropp": {
                "name": "topo3", "levels": [ranks, node], "secondary": node, "quant": _QUANT,
            },
            "zero3": "zero3",
        }  # fmt: skip
        result: dict[str, list[float]] = {}
        for name, shard in shards.items():
            result[name] = []
            for size in (1, 2, self.sequences):
                job = train_job(
                    model=self.model, seq_len=2048, global_batch=ranks * self.sequences,
                    microbatch=min(size, self.sequences), parallel={"dp": ranks}, shard=shard,
                    recompute="full", precision="bf16",
                )  # fmt: skip
                cost = estimate(Work(job=job, shape=find(self.model)), machine)
                result[name].append(cost.step_s.value)
                computing = cost.step_s.value - cost.terms_s["collective"]
                result.setdefault(f"{name}, computing", []).append(computing)
        return result


def _rounded(seed: int) -> tuple[float, ...]:
    """How far the quantisers move a number at most, in halves of its block's scale."""
    import torch

    from shoal.parallel.comm.compress import pack, unpack
    from shoal.parallel.comm.wire import BLOCK

    source = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 4 * BLOCK, generator=source).exp() * torch.randn(64, 1, generator=source)
    results = []
    for bits, most in ((4, 7), (8, 127)):
        off = (unpack(pack(x, bits), x.shape[1], bits) - x).abs().view(-1, BLOCK)
        scales = x.abs().view(-1, BLOCK).amax(1, keepdim=True) / most
        results.append(float((off / (scales / 2)).max()))
    return tuple(results)


RANKS, _PER_NODE = 8, 4
_COUNTED = ("parameters", "gradients")


def _job(shard: Any, *, microbatches: int) -> TrainJob:
    return train_job(
        seq_len=16, global_batch=RANKS * microbatches, microbatch=1, recompute="full",
        parallel={"dp": RANKS}, shard=shard, grad_clip=0.05,
    )  # fmt: skip


def _config() -> Any:
    """A model of which every row count is a multiple of the ranks: nothing is padded."""
    from shoal.claims.experiments.arch_training import mini

    return mini(64, 4, tied=False)


def _stepped(shard: Any, microbatches: int, look: Any) -> list[Any]:
    """One training step on eight ranks, two nodes of two packages of two; what ``look`` saw."""
    import torch

    from shoal.claims.lab.same_as_one import SeededWeights, tokens
    from shoal.claims.lab.session import RankSession
    from shoal.claims.lab.thread_ranks import run_ranks

    config, job = _config(), _job(shard, microbatches=microbatches)
    weights = SeededWeights(config)

    def on(comm: ThreadComm) -> Any:
        session = RankSession(comm, job, config, weights)
        engine = session.engine
        adam = torch.optim.AdamW(list(engine.sharded.owned().values()))
        rows = tokens(job, config.vocab_size, 0, documents=False)
        own = session.rows(rows.inputs, rows.targets, 0)
        engine.backward(own, 1, float(job.global_batch * job.seq_len))
        held = look(engine)
        engine.finish()
        adam.step()
        engine.sharded.publish()
        return held, comm.meter.totals()

    return run_ranks(RANKS, on, ranks_per_node=_PER_NODE)


def node_bytes(shard: Any, microbatches: int) -> float:
    """Bytes that a step of all ranks sends between the nodes, metered."""
    return sum(
        wire_bytes(totals, "scope=node", f"tag={tag}")
        for _, totals in _stepped(shard, microbatches, lambda _: None)
        for tag in _COUNTED
    )


def uncounted(shard: Any) -> tuple[float, ...]:
    """Per rank, bytes held at the end of backward beside 2 p / g0 + 2 p / g1 + 4 p / n.

    The moments are 8 p / n more, of the optimizer, whatever the sharding.
    """
    from shoal.cost.arithmetic import parameters

    count = parameters(_config().shape())
    g0, g1 = shard["levels"]

    formula = {"weights": 2 * count / g0, "gradients": 2 * count / g1, "masters": 4 * count / RANKS}
    ranks = _stepped(shard, 2, lambda engine: engine.sharded.held_bytes())
    return tuple(sum(abs(held[name] - formula[name]) for name in formula) for held, _ in ranks)


def errors(shards: tuple[Any, ...]) -> tuple[float, ...]:
    """Largest relative difference to one process after two steps, in float64."""
    from shoal.claims.lab.same_as_one import same_as_one

    jobs = (_job(shard, microbatches=2) for shard in shards)
    return tuple(same_as_one(job, _config(), steps=2).largest for job in jobs)


def learn(shard: Any, seed: int, steps: int, ranks: int) -> float:
    """Held-out loss in nats a byte of a small model that ``ranks`` threads have trained."""
    from shoal.claims.experiments.arch_training import mini
    from shoal.claims.experiments.co2_ranks import CO2Worker
    from shoal.claims.lab.thread_ranks import run_ranks

    job = train_job(
        seq_len=64, global_batch=8, microbatch=1, parallel={"dp": ranks}, shard=shard,
        optimizer={"name": "adamw", "lr": 3e-3}, seed=seed,
    )  # fmt: skip

    def on(comm: ThreadComm) -> float:
        return CO2Worker(comm, job, mini(64, 3), steps).learned()

    return run_ranks(ranks, on, ranks_per_node=ranks // 2, timeout_s=300.0)[0]
