"""What clients waited for: numbers and pictures of a workload that was really served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.core.errors import ServeError, require
from shoal.core.svg import Chart, Series, stacked
from shoal.cost.serving.fleet import attainment
from shoal.cost.serving.simulator import ServedRequest, quantities, summary
from shoal.ir import kind_named

_NAMES = {
    "ttft": "TTFT (time to first token)",
    "tpot": "TPOT (time per output token after the first)",
    "itl": "ITL (inter-token latency)",
    "e2e": "E2E (latency of a whole request)",
}
# Points of a curve; more cannot be distinguished.
_POINTS = 400


def samples_of(served: Sequence[ServedRequest], gaps: Sequence[float]) -> dict[str, list[float]]:
    """``ttft``, ``tpot``, ``e2e`` of the requests that finished and ``itl``, in s.

    Args:
        served: requests.
        gaps: between two pieces of an answer, of all of them.
    """
    ended = [one for one in served if not math.isnan(one.finish)]
    return {
        "ttft": [one.ttft for one in ended],
        "tpot": [one.tpot for one in ended if one.n_output > 1],
        "itl": list(gaps),
        "e2e": [one.finish - one.arrival for one in ended],
    }


def measured_of(
    served: Sequence[ServedRequest],
    gaps: Sequence[float],
    *,
    targets: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Quantities of :func:`~shoal.cost.serving.simulator.quantities`, of ``itl``, and goodput.

    Returns:
        Also ``prompt_tokens_per_s``, and with targets ``slo_share`` of all requests and
        ``goodput_per_s``, the requests per second that meet both.

    Raises:
        ConfigError: no request finished.
    """
    result = quantities(served) | summary("itl", gaps)
    ended = [one for one in served if not math.isnan(one.finish)]
    result["prompt_tokens_per_s"] = sum(one.n_prompt for one in ended) / result["total_s"]
    if targets is not None:
        result["slo_share"] = attainment(served, ttft=targets[0], tpot=targets[1])
        result["goodput_per_s"] = result["slo_share"] * len(served) / result["total_s"]
    return result


def quantity_rows(measured: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values of a table, of what is there."""
    return [
        (quantity.label, quantity.text(measured[quantity.name]))
        for quantity in kind_named("serve").quantities
        if quantity.name in measured
    ]


def draw(samples: Mapping[str, Sequence[float]], title: str) -> str:
    """A picture of each quantity: the share of cases over the time they stayed within.

    Raises:
        ServeError: there are none.
    """
    charts = []
    for name, label in _NAMES.items():
        values = sorted(samples.get(name, ()))
        if values:
            chosen = sorted({round(i * (len(values) - 1) / _POINTS) for i in range(_POINTS + 1)})
            charts.append(
                Chart(
                    title=f"{title}: {name.upper()}",
                    description=f"Share of cases over {label}.",
                    x_label=f"{label}, ms",
                    y_label="share within, %",
                    series=[
                        Series(
                            name=name.upper(),
                            x=[1e3 * values[place] for place in chosen],
                            y=[100 * (place + 1) / len(values) for place in chosen],
                        )
                    ],
                    cover_x=(0.0,),
                    cover_y=(0.0, 100.0),
                    height=240,
                )
            )
    require(bool(charts), "samples", 0, expected="at least one request", error=ServeError)
    return stacked(charts)
