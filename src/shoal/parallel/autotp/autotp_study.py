"""``shoal explain autotp``: how would this model be split by tensor parallelism?"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from shoal.core.errors import MissingExtraError
from shoal.core.files import to_json
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress
from shoal.plan.autotp.plan import TensorPlan


@part
class AutotpStudy:
    """Derive a tensor-parallel plan of a model from its graph, independent of module names.

    The model is built on the meta device, without weights. `--out` writes the
    plan as plan.yaml, and module -> style as tp_plan.json, which is `tp_plan` of transformers.

    **Examples**

        shoal explain autotp config.json

        shoal explain autotp llama-3-70b/ --tp 8 --out split

        shoal explain autotp config.json --tp 4 -o json

    Args:
        config: a config.json of transformers, or a directory.
        tp: ranks that share the model.
        length: tokens of the example.
        fallback: if a model cannot be traced as a whole: modules (trace its modules) or refuse.
    """

    subject: ClassVar = "config"
    machine: ClassVar = None

    config: Path
    tp: Annotated[int, Ge(2)] = 2
    length: Annotated[int, Ge(2)] = 8
    fallback: Literal["modules", "refuse"] = "modules"

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """What is split, what is not, and why."""
        plan = self._plan()
        blocks: list[Table | str] = [
            f"{plan.model} on {plan.tp} ranks: {100 * plan.sharded:.1f} % of "
            f"{human_bytes(plan.parameter_bytes)} are split, {plan.all_reduces} all-reduces "
            "forward",
            _split(plan),
        ]
        if plan.whole:
            rows = sorted({(_any_layer(name), why) for name, why in plan.whole.items()})
            blocks.append(
                Table(
                    title="whole on every rank",
                    columns=("parameters", "because"),
                    rows=tuple(rows),
                )
            )
        return Explanation(
            blocks=(*blocks, *(f"note: {note}" for note in plan.notes)),
            data={**plan.model_dump(mode="json"), "dtensor": plan.dtensor()},
            files={
                "plan.yaml": plan.as_yaml("A tensor-parallel plan, by `shoal explain autotp`."),
                "tp_plan.json": to_json(plan.dtensor()),
            },
        )

    def _plan(self) -> TensorPlan:
        """The plan of the model.

        Raises:
            ModelError: a configuration that cannot be used.
            PlanError: heads that ``tp`` does not divide, or a model that cannot be traced.
            MissingExtraError: torch or transformers is not installed.
        """
        try:
            from shoal.parallel.autotp.auto import discover
            from shoal.parallel.autotp.families import example, from_config, read_config
        except ModuleNotFoundError as cause:
            if cause.name != "torch":
                raise
            raise MissingExtraError("torch", "run", "tracing a model") from cause
        model = from_config(read_config(self.config))
        inputs = example(model, length=self.length)
        name = type(model).__name__
        return discover(model, (), inputs, tp=self.tp, name=name, fallback=self.fallback).plan


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _split(plan: TensorPlan) -> Table:
    """The plan's weights, those of all layers in one row."""
    rows: Counter[tuple[str, ...]] = Counter()
    for name, split in plan.weights.items():
        pieces = f" in {len(split.segments)} segments" if len(split.segments) > 1 else ""
        what = f"dimension {split.dim} of {sum(split.segments)}{pieces}"
        rows[_any_layer(name), split.style, what] += 1
    return Table(
        title="split",
        columns=("parameters", "by", "what", "how many"),
        rows=tuple((*row, str(number)) for row, number in rows.items()),
        right="   r",
    )
