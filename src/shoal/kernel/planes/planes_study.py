"""``shoal explain planes``: products of few bits by every engine of this CPU."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field, PositiveInt

from shoal.core.errors import ConfigError
from shoal.core.measure import check_quiet
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress

_WIDTHS = frozenset("12345678")


@part
class PlanesStudy:
    """Time products of bipolar integers by every engine of this CPU, beside bf16.

    Engines count bits (popcnt), expand weights in registers (gemv), or multiply int8 by
    vectors (vnni) or by matrix tiles (amx). The one that dispatch selects is marked, with the
    estimates of `--machine`.

    **Examples**

        shoal explain planes --widths 1x1,2x8 --rows 1,16

        shoal explain planes --size 2048 --buffers 80 -o json

    Args:
        widths: bits of weights x bits of activations, with commas.
        rows: rows (tokens) of a call, with commas.
        size: outputs and inputs of a layer.
        buffers: number of weight matrices used in turn; 20 in bf16 exceed most caches.
        pairs: rounds.
        anyway: measure on a busy machine too.
    """

    widths: str = "1x1,2x2,2x8,4x4,4x8,8x8"
    rows: str = "1,16,256"
    size: Annotated[int, Field(ge=64)] = 4096
    buffers: PositiveInt = 20
    pairs: Annotated[int, Field(ge=3)] = 15
    anyway: bool = False

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        pieces = []
        for text in self.widths.split(","):
            w, _, a = text.strip().partition("x")
            if not (w in _WIDTHS and a in _WIDTHS):
                raise ConfigError(f"--widths {text}: expected two numbers of 1 to 8, such as 2x8")
            pieces.append((int(w), int(a)))
        counts = [word.strip() for word in self.rows.split(",")]
        if not all(word.isdigit() and int(word) for word in counts):
            raise ConfigError(
                f"--rows {self.rows}: expected whole numbers with commas, such as 1,16"
            )
        from shoal.kernel.planes import bench

        if not self.anyway:
            check_quiet(wait_s=60.0, hint="measure anyway with --set anyway=true")
        table = bench.table(
            machine,
            size=self.size,
            rows=[int(word) for word in counts],
            widths=pieces,
            buffers=self.buffers,
            pairs=self.pairs,
            progress=lambda text, done: progress(done, 1.0, text),
        )
        lines = Table(
            title="",
            columns=("rows", "bits", "engine", "measured", "expected", "x bf16", ""),
            rows=tuple(
                (
                    f"{line.m}",
                    f"{line.w} x {line.a}",
                    line.engine,
                    f"{1e6 * line.seconds:,.0f} us",
                    "" if line.estimate is None else f"{1e6 * line.estimate:,.0f} us",
                    f"{line.speedup:.2f}",
                    "chosen" if line.chosen else "",
                )
                for line in table
            ),
            right="r  rrr ",
        )
        return Explanation(blocks=(lines,), data=[dataclasses.asdict(line) for line in table])
