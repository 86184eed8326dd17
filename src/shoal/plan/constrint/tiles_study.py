"""``shoal explain tiles``: which tiles does a kernel get on a machine, and why not larger ones?"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from shoal.core.config import parse
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress
from shoal.plan.constrint.solve import solve
from shoal.plan.constrint.tiles import (
    Facts,
    LinearShape,
    RecurrenceShape,
    facts_of,
    here,
    linear_system,
    recurrence_system,
    tiling,
)

# Type of a recurrent matrix -> numbers of a vector of 64 bytes, and bytes of a number.
_SIZES = {"fp64": (8, 8), "fp32": (16, 4), "bf16": (16, 2)}


@part
class TilesStudy:
    """Choose the tile sizes of a kernel by an integer constraint solver.

    Without `--machine`, the constraints are those of this CPU. If no solution exists, the
    conflicting constraints are named.

    **Examples**

        shoal explain tiles recurrence --hidden 768 --heads 12

        shoal explain tiles recurrence --hidden 2048 --heads 1 --machine H100 --dtype bf16

        shoal explain tiles linear --batch 4 --n 11008 --k 4096 --bits 4 --system

        shoal explain tiles --facts '{l2_bytes: 1048576}'

    Args:
        kernel: recurrence, linear, or a file with another system.
        hidden: units of all heads of a recurrence.
        heads: heads of a recurrence.
        batch: sequences; rows of x of a product.
        function: lstm, gru, elman or slstm.
        dtype: dtype of the recurrent matrix: fp64, fp32 or bf16.
        n: outputs of a product.
        k: inputs of a product.
        bits: bits of a weight of a product.
        group: weights of a product that share a scale.
        facts: facts of the machine, which override the known ones.
        system: show the system of constraints without solving it.
    """

    subject: ClassVar = "kernel"
    machine: ClassVar = ""

    kernel: str = "recurrence"
    hidden: int = 768
    heads: int = 12
    batch: int = 1
    function: Literal["lstm", "gru", "elman", "slstm"] = "lstm"
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    n: int = 4096
    k: int = 4096
    bits: int = 4
    group: int = 128
    facts: dict[str, int | str] = field(default_factory=dict)
    system: bool = False

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The best tiles, or the system that says what they must fulfil."""
        meanings: dict[str, str] = {}
        if self.kernel in ("recurrence", "linear"):
            known = here() if machine is None else facts_of(machine)
            facts = parse(Facts, {**known.model_dump(), **self.facts}, where="facts")
            shape = self._shape()
            if self.system:
                text = (
                    linear_system(shape, facts)
                    if isinstance(shape, LinearShape)
                    else recurrence_system(shape, facts)
                )
                return Explanation(blocks=(text.rstrip(),), data=text)
            result = tiling(shape, facts)
            solution, meanings = result.solution, result.meanings
        else:
            path = Path(self.kernel)
            require(path.is_file(), "tiles", self.kernel, expected="recurrence, linear, or a file")
            text = path.read_text(encoding="utf-8")
            if self.system:
                return Explanation(blocks=(text.rstrip(),), data=text)
            solution = solve(text)
        shown = meanings or dict.fromkeys(solution, "")
        best = "solved" if solution.objective is None else "proven optimum"
        return Explanation(
            blocks=(
                Table(
                    title=f"tiles of {self.kernel}",
                    columns=("", "", ""),
                    rows=tuple((one, f"{solution[one]:,}", text) for one, text in shown.items()),
                    right=" r ",
                ),
                f"{best} in {solution.nodes} nodes",
            ),
            data={
                "tiles": {name: solution[name] for name in shown},
                "objective": solution.objective,
                "nodes": solution.nodes,
                "values": dict(solution),
            },
        )

    def _shape(self) -> RecurrenceShape | LinearShape:
        if self.kernel == "linear":
            sides = {"m": self.batch, "n": self.n, "k": self.k}
            sides |= {"bits": self.bits, "group": self.group}
            return parse(LinearShape, sides, where="tiles")
        lanes, number_bytes = _SIZES[self.dtype]
        sizes = {"hidden": self.hidden, "heads": self.heads, "batch": self.batch}
        sizes |= {"lanes": lanes, "number_bytes": number_bytes}
        return parse(RecurrenceShape, {"function": self.function, **sizes}, where="tiles")
