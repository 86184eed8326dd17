"""[101] LCM: is a learned operator in a tree as good as a recurrence, and shallow?

Source: Ong and Veličković, Learnable Commutative Monoids for Graph Neural Networks, 2022.

Networks that differ in their aggregator only learn the second smallest of 2 to 16 integers below
64, and are asked about sets of 32 to 256. The time is that of a training step on one set, in one
thread, with the penalties of both: a node with many neighbours, or the nodes of a graph. Of many
sets at once, which keep a core busy at any depth, times are in the details. In the A/A run the
recurrence is in the place of the operator, and the sum where sums are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

_SIZES = [32, 64, 128, 256]
_WIDTH = 64


@part
class LCMClaim(BaseClaim, row=101, needs=("torch", "torch_geometric")):
    """The learned operator beside a recurrence and a sum.

    Args:
        steps: that each network is trained.
        rounds: of each timing.
        sets: of each size that networks are asked about.
    """

    steps: int = 18_000
    rounds: int = 21
    sets: int = 1000

    def collect(self, run: ClaimRun) -> None:
        """Depth and symmetry; the full run trains, and times."""
        import torch

        from shoal.claims.lab.set_tasks import GRUOneWay, operations
        from shoal.fields.graph.gnn.lcm.monoid import GRUPair

        torch.manual_seed(run.seed)
        operator: torch.nn.Module = run.pick(GRUPair, GRUOneWay)(_WIDTH)
        pairs = torch.randn(1000, 2, _WIDTH)
        with torch.no_grad():
            gap = operator(pairs) - operator(pairs.flip(1))
        run.put("swap_gap", float(gap.abs().max()))
        run.put("depth_1024", operations(run.pick("lcm", "gru"), 1024), operations("gru", 1024))
        if not run.quick:
            self._learn(run)
            self._time(run)

    def _learn(self, run: ClaimRun) -> None:
        from shoal.claims.lab.set_tasks import accuracy, learned, spread

        right: dict[str, dict[int, float]] = {}
        apart: dict[str, float] = {}
        for at, name in enumerate(("sum", "gru", "lcm")):

            def train(name: str = name, at: int = at) -> Any:
                network = learned(
                    name, steps=self.steps, seed=run.seed, width=_WIDTH,
                    progress=lambda done: run.progress(f"training {name}", 0.3 * (at + done)),
                )  # fmt: skip
                found = accuracy(network, [8, 16, *_SIZES], sets=self.sets, seed=run.seed)
                return found, spread(network, _SIZES, sets=50, times=20, seed=run.seed)

            right[name], apart[name] = run.remember(f"second smallest {name}", train)
        mean = {
            name: sum(one[size] for size in _SIZES) / len(_SIZES) for name, one in right.items()
        }
        ours, plain = run.pick("lcm", "gru"), run.pick("lcm", "sum")
        run.put("accuracy_over_gru", mean[ours], mean["gru"], bound=1 / mean["gru"])
        run.put("accuracy_over_sum", mean[plain], mean["sum"])
        run.put("spread_over_gru", apart[ours], apart["gru"])
        run.details.update(accuracy=right, spread=apart)

    def _time(self, run: ClaimRun) -> None:
        from shoal.claims.lab.set_tasks import geometric_step, operations, training_step

        arms: dict[str, Callable[[], object]] = {}
        for size in (256, 1024):
            for name in ("lcm", "gru"):
                arms[f"{name} {size}"] = training_step(name, 1, size, _WIDTH, run.seed)
            arms[f"peer {size}"] = geometric_step(1, size, _WIDTH, run.seed)
        for name in ("lcm", "gru"):
            arms[f"{name} 256, 32 sets"] = training_step(name, 32, 256, _WIDTH, run.seed)
        pairs = {f"wall_{size}": (f"lcm {size}", f"gru {size}") for size in (256, 1024)}
        run.progress("timing", 0.92)
        lawless = {"name": "lcm", "associative_weight": 0.0, "identity_weight": 0.0}
        arms["tree"] = training_step(lawless, 1, 256, _WIDTH, run.seed)
        seconds = run.versus(arms, pairs, self.rounds, threads=1)
        # As many operators one after another as there are levels, at the price of a step of it.
        run.bounds["wall_256"] = operations("gru", 256) / operations("lcm", 256)
        for size in (256, 1024):
            run.put_peer(f"wall_{size}", seconds[f"gru {size}"], seconds[f"peer {size}"])
        middle = {name: sorted(one)[len(one) // 2] for name, one in seconds.items()}
        run.details["seconds"] = middle
        run.profile = (
            f"of {1e3 * middle['lcm 256']:.1f} ms {1e3 * middle['tree']:.1f} are the tree, "
            "the others the penalties"
        )
