"""``shoal explain balance``: which ranks should compute which sequences of a batch?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.cost.shapes import resolve
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Explanation, Machine, Parallel, Progress
from shoal.plan.balance import ASSIGNERS
from shoal.plan.balance.sequences.lengths import read_lengths
from shoal.plan.balance.sequences.picture import draw
from shoal.plan.balance.sequences.predicted import predict


@part
class BalanceStudy:
    """Compare all ways to assign the sequences of a batch to ranks.

    Nothing runs. The step time includes all passes, but not the sum of the gradients, which is the
    same for all.

    **Examples**

        shoal explain balance lengths.txt

        shoal explain balance lengths.json --model Llama-3-8B --ranks 64 --picture step.svg

        shoal explain balance documents.parquet --column tokens --capacity 4096 -o json

    Args:
        lengths: lengths of one batch: .txt, .json, .parquet.
        model: name, directory or file.
        ranks: ranks of the pool.
        capacity: largest number of tokens of a rank in a pass.
        column: key or column of the lengths.
        offload: also plan offloading.
        limit: seconds for the solver.
    """

    subject: ClassVar = "lengths"
    machine: ClassVar = "64xH100"

    lengths: Path
    model: str = "Llama-2-7b"
    ranks: Annotated[int, Ge(1)] = 32
    capacity: Annotated[int, Ge(1)] = 8192
    column: str = "length"
    offload: bool = False
    limit: Annotated[float, Ge(0)] = 5.0

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Every assigner's step, fastest first, and what every rank does when."""
        lengths = read_lengths(self.lengths, self.column)
        cost = SequenceCost.on(resolve(self.model), machine, Parallel(dp=self.ranks))
        plans, refused = [], {}
        own: dict[str, dict[str, Any]] = {
            "flexsp": {"limit_s": self.limit},
            "bytescale": {"offload": "auto" if self.offload else "none"},
        }
        for name in ASSIGNERS:
            options = {"name": name, "capacity_tokens": self.capacity, **own.get(name, {})}
            try:
                plan = ASSIGNERS.build(options).assign(lengths, self.ranks, cost)
            except PlanError as cause:
                refused[name] = str(cause)
            else:
                plans.append((name, plan, predict(plan, cost)))
        if not plans:
            raise PlanError("; ".join(refused.values()))
        plans.sort(key=lambda one: one[2].step_s)
        shown = Table(
            title=f"{len(lengths):,} sequences of up to {max(lengths):,} tokens, {sum(lengths):,} "
            f"in all, on {self.ranks} ranks of {machine.name} with {self.capacity:,} each",
            columns=("assigner", "step", "idle", "attention sends", "passes", "groups of"),
            rows=tuple(
                (
                    name,
                    f"{digits(seen.step_s)} s",
                    f"{100 * seen.idle_share:.0f} %",
                    human_bytes(int(seen.exchange_bytes)),
                    str(len(plan.steps)),
                    _span([len(step.ranks) for step in plan.steps]),
                )
                for name, plan, seen in plans
            ),
            right=" rrrrr",
        )
        whole = 1 << (self.ranks.bit_length() - 1)
        notes = [f"not possible: {reason}" for reason in refused.values()]
        if whole != self.ranks and "flexsp" not in refused:
            notes.insert(
                0,
                f"flexsp: groups are powers of two, so {whole} of {self.ranks} ranks compute",
            )
        return Explanation(
            blocks=(shown, *notes),
            data={
                "plans": {
                    name: {
                        "step_s": seen.step_s,
                        "idle_share": seen.idle_share,
                        "attention_bytes": seen.exchange_bytes,
                        "micro_steps": len(plan.steps),
                        "largest_group": max(len(step.ranks) for step in plan.steps),
                    }
                    for name, plan, seen in plans
                },
                "refused": refused,
            },
            picture=lambda: draw(plans),
        )


def _span(degrees: list[int]) -> str:
    """From the smallest to the largest group."""
    least, most = min(degrees), max(degrees)
    return str(most) if least == most else f"{least} to {most}"
