"""[65] Hecate: do copies of popular experts, made anew for every step, even out who does what?

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data
Parallelism, 2025.

- What a mixture of eight experts routes while it is trained without a balancing loss, recorded
  step by step and routed again on eight simulated devices with two slots each: rows of the busiest
  device over the mean, and steps of a layer of Mixtral 8x7B, beside experts on their owners and
  beside experts that move every 50 steps and pay for it.
- The same imbalance where 32 experts on 16 devices of two nodes are chosen by Zipf's law; their
  copies are as large as experts of Qwen3 30B A3B.
- Four ranks on two nodes that really gather: bytes of copies beside the table, and experts that a
  rank has beside its own. Training steps beside one process, whatever is copied.

The A/A run has experts on their owners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part, table

if TYPE_CHECKING:
    from shoal.claims.lab.replay import ExpertCosts, ReplayResult
    from shoal.plan.placement.protocols import Devices, Ints

__all__ = ["HecateClaim"]

_DEVICES, _PER_NODE = 8, 8
# Of the simulated devices: FLOP/s, and byte/s inside a node and between nodes.
_FLOPS, _NEAR, _FAR = 400e12, 400e9, 50e9


@part
class HecateClaim(BaseClaim):
    """Sparse copies beside plain and beside rearranged expert parallelism.

    Args:
        steps: of the training whose routing is recorded.
        slots: copies that a device has room for.
        tokens: of a device and step, of the simulated layer.
    """

    steps: Annotated[int, Ge(1)] = 240
    slots: Annotated[int, Ge(0)] = 2
    tokens: Annotated[int, Ge(1)] = 4096

    rows: ClassVar[tuple[int, ...]] = (65,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        from shoal.claims.experiments.hecate_ranks import copied, errors, recorded
        from shoal.claims.lab.replay import gini
        from shoal.plan.placement.protocols import Devices

        method: Any = run.pick({"name": "fssdp", "slots": self.slots}, "owners")
        run.progress("training that is recorded", 0.05)
        steps = 24 if run.quick else self.steps
        trace = run.remember(f"trace {steps}", lambda: recorded(steps, _DEVICES, run.seed))
        run.progress("routing it again", 0.5)
        devices = Devices(_DEVICES, _PER_NODE)
        result = self._replayed(trace, devices, method, "Mixtral-8x7B-v0.1")
        zipf = _zipf(30 if run.quick else 200, Devices(16, 8), self.tokens, run.seed)
        skewed = self._replayed(zipf, Devices(16, 8), method, "Qwen3-30B-A3B")
        run.put("imbalance", *_by(result, "owners", "imbalance"))
        run.put("imbalance_of_zipf", *_by(skewed, "owners", "imbalance"))
        run.put("over_owners", *_by(result, "owners", "seconds"))
        run.put("over_rearranged", *_by(result, run.pick("rearranged", "method"), "seconds"))
        run.progress("ranks that gather", 0.8)
        there = copied(method, run.seed)
        run.put("borrowed", there.borrowed)
        run.put("uncounted_bytes", there.uncounted)
        run.put("error", errors(method, quick=run.quick))
        run.details |= {
            "gini": gini(trace.sum(2)),
            "gini_of_zipf": gini(zipf.sum(2)),
            "imbalance": {name: float(one.imbalance.mean()) for name, one in result.items()},
            "imbalance_of_zipf": {
                name: float(one.imbalance.mean()) for name, one in skewed.items()
            },
            "step_ms": {name: 1e3 * float(one.seconds.mean()) for name, one in result.items()},
            "copies_a_layer": float(result["method"].copies.mean()),
            "gathered_bytes_a_step": result["method"].gathered_bytes / steps,
            "moved_bytes": {name: one.moved_bytes for name, one in result.items()},
            "copied_bytes": there.counted,
        }

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
