"""[24] Three-level ZeRO: does little cross slow links, at which memory and which loss?

Source: Xu et al., Scaling Large Language Model Training on Frontier with Low-Bandwidth
Partitioning, 2025; its baseline is Wang et al., ZeRO++, 2023.

- Eight ranks that train, two nodes of two packages of two: bytes that are metered between the
  nodes in a step of four micro-batches, beside ZeRO 3 and beside ZeRO++ (int8 weights, int4
  gradients in two hops, a second copy in the node); what the ranks hold, beside the formula.
- Steps of GPT-NeoX-20B on the dies of 48 nodes of Frontier by the cost model, beside ZeRO++.
- Steps beside one process; numbers that a quantiser moves by more than half a scale.
- 300 steps on bytes with int8 weights and int4 gradients, beside exact ones.

The A/A run has the baseline in the place of the three levels.
"""

from __future__ import annotations

import functools
import statistics
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part, table

__all__ = ["Topo3Claim"]

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
class Topo3Claim(BaseClaim):
    """Three levels beside ZeRO 3 and ZeRO++.

    Args:
        microbatches: of a rank in a step whose bytes are metered.
        machine: of the simulated steps.
        model: of the simulated steps.
        sequences: of each die in a simulated step.
        steps: of the runs that learn.
        seeds: how many of these there are.
    """

    microbatches: Annotated[int, Ge(1)] = 4
    machine: str = "48xFrontier"
    model: str = "GPT-NeoX-20B"
    sequences: Annotated[int, Ge(1)] = 4
    steps: Annotated[int, Ge(1)] = 300
    seeds: Annotated[int, Ge(1)] = 2

    rows: ClassVar[tuple[int, ...]] = (24,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.topo3_ranks import errors, node_bytes, uncounted

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
        run.details["simulated_s"] = result
        run.profile = ", ".join(f"{name} {min(of):.1f} s a step" for name, of in result.items())
        run.progress("steps beside one process", 0.15)
        run.put("uncounted_memory", uncounted(_BF16))
        run.put("error", errors(_SWITCHES[: 1 if run.quick else None]))
        run.put("rounded", _rounded(run.seed))
        if run.quick:
            return
        if not run.as_baseline:
            run.progress("bytes of other settings", 0.2)
            run.details["node_bytes"] = {
                "zero3": zero3,
                "zeropp": zeropp,
                "exact": exact,
                "bf16": half,
                "quantised": node_bytes({**_EXACT, "quant": _QUANT}, count),
                "zero3, one micro-batch": node_bytes("zero3", 1),
                "exact, one micro-batch": node_bytes(_EXACT, 1),
                "bf16, one micro-batch": node_bytes(_BF16, 1),
                "zeropp, one micro-batch": node_bytes(_ZEROPP, 1),
            }
        losses = run.details["heldout_loss"] = self._losses(run.context)
        ours = losses[run.pick("quantised", "exact")]
        run.put("loss_gap", (a - b for a, b in zip(ours, losses["exact"], strict=True)))

    def _losses(self, context: ExperimentContext) -> dict[str, list[float]]:
        """Held-out loss by kind and seed, nats a byte."""
        from shoal.claims.experiments.topo3_ranks import learn

        kinds = {
            "exact": {"name": "topo3", "levels": [2, 2]},
            "quantised": {"name": "topo3", "levels": [2, 2], "quant": _QUANT},
        }
        losses: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(self.seeds):
            for at, (name, shard) in enumerate(kinds.items()):
                context.progress(
                    f"{self.steps} steps, {name}", 0.3 + 0.7 * (2 * number + at) / (2 * self.seeds)
                )
                seed = context.seed + number
                made = functools.partial(learn, shard, seed, self.steps, 4)
                losses[name].append(context.remember(f"loss {name} {seed}", made))
        return losses

    def _simulated(self) -> dict[str, list[float]]:
        """Seconds of a step by sharding, with one, two and all sequences in a micro-batch."""
        from shoal.cost.shapes import find
        from shoal.cost.training.step import estimate
        from shoal.ir import TrainJob, Work
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
                job = TrainJob.model_validate(
                    {
                        "model": self.model,
                        "seq_len": 2048,
                        "global_batch": ranks * self.sequences,
                        "microbatch": min(size, self.sequences),
                        "parallel": {"dp": ranks},
                        "shard": shard,
                        "recompute": "full",
                        "precision": "bf16",
                    }
                )
                work = Work(job=job, shape=find(self.model))
                cost = estimate(work, machine)
                result[name].append(cost.step_s.value)
                # What it would be if nothing travelled while others compute.
                sent = table("shard").build(job.shard).estimate(work, machine)
                apart = sent.terms_s["collective"] - cost.terms_s["collective"]
                result.setdefault(f"{name}, nothing hidden", []).append(cost.step_s.value + apart)
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
