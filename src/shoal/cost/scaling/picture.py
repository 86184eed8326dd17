"""A learning curve with its law, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core.svg import Band, Chart, Series
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import FittedLaw


def picture(
    curves: Mapping[str, tuple[Sequence[CurvePoint], FittedLaw | None]],
    *,
    title: str = "Learning curve",
    x_label: str = "training examples",
    y_label: str = "error",
) -> str:
    """Points, fitted laws and their 95 % bands on logarithmic axes; SVG text.

    Raises:
        ConfigError: there is nothing to draw.
    """
    series, bands, words = [], [], []
    for name, (points, fitted) in curves.items():
        series.append(
            Series(
                name=name,
                x=[p.size for p in points],
                y=[p.value for p in points],
                line=False,
                points=True,
            )
        )
        if fitted is None:
            continue
        sizes = np.geomspace(fitted.smallest, 2 * fitted.largest, 40).tolist()
        value, low, high = fitted.curve(sizes)
        label = f"{name}: {fitted.law}"
        series.append(Series(name=label, x=sizes, y=value, dashed=True))
        bands.append(Band(name=label, x=sizes, low=low, high=high))
        parameters = ", ".join(f"{k} {v.value:.3g}" for k, v in fitted.parameters.items())
        words.append(f"{label} with {parameters}")
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=series,
        bands=bands,
        description="; ".join(words),
        log_x=True,
        log_y=True,
    ).render()
