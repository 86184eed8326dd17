"""``shoal explain scaling``: how much data does a target error need?"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.cost.scaling.ask import data_needed, fit_best
from shoal.cost.scaling.fit import fit
from shoal.cost.scaling.picture import picture
from shoal.cost.scaling.read import read_curve
from shoal.ir import Explanation, Progress


@part
class ScalingStudy:
    """Fit a learning curve, and compute the data needed for a target error.

    **Examples**

        shoal explain scaling curve.csv

        shoal explain scaling curve.csv --target 1.9 --picture curve.svg

    Args:
        curve: CSV with columns size,value[,spread,trials].
        target: target error for which the required data is computed.
        law: power, power_floor or three_regime; the best of them if not given.
    """

    subject: ClassVar = "curve"
    machine: ClassVar = None

    curve: Path
    target: float | None = None
    law: str | None = None

    def explain(self, machine: None, progress: Progress) -> Explanation:
        """The law's numbers, and the examples that the target needs."""
        points = read_curve(self.curve)
        fitted = fit_best(points) if self.law is None else fit(self.law, points)
        needed = None if self.target is None else data_needed(fitted, self.target)
        blocks: list[Table | str] = [
            Table(
                title=f"law {fitted.law}, R2 {fitted.r2:.4f}",
                columns=("parameter", "value", "low", "high"),
                rows=tuple(
                    (name, *(f"{number:.4g}" for number in (i.value, i.low, i.high)))
                    for name, i in fitted.parameters.items()
                ),
                right=" rrr",
            )
        ]
        if needed is not None:
            blocks.append(
                f"an error of {self.target:g} needs {needed.value:.4g} examples "
                f"({needed.low:.4g} to {needed.high:.4g})"
            )
        elif self.target is not None:
            blocks.append(
                f"an error of {self.target:g} is below the floor of this law: no data is enough"
            )
        return Explanation(
            blocks=tuple(blocks),
            data={
                "fit": fitted.model_dump(mode="json", exclude={"samples"}),
                "data_needed": needed and needed.model_dump(mode="json"),
            },
            picture=lambda: picture({self.curve.stem: (points, fitted)}),
        )
