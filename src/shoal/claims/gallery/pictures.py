"""Pictures of a claim: its samples against the threshold, and all its metrics at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.claims.gallery.papers import MeasuredMetric, per_sample
from shoal.claims.protocols import Metric
from shoal.core.svg import Band, Chart, Series
from shoal.core.web.site import number

_WIDTH, _ROW, _PAD = 132, 13, 5
_MIDDLE = _WIDTH / 2


def samples_chart(measured: MeasuredMetric) -> Chart | None:
    """Each sample in the order taken, the part first and its A/A run beside it.

    Returns:
        Chart: with the threshold, the number and its interval; None when no sample is
            there, or none is finite.
    """
    metric, verdict = measured.metric, measured.verdict
    if measured.samples is None:
        return None
    part = per_sample(metric, measured.samples)
    replaced = per_sample(metric, measured.aa) if measured.aa is not None else []
    x_part = [float(i + 1) for i in range(len(part))]
    x_aa = [float(len(part) + i + 1) for i in range(len(replaced))]
    ends = [0.5, (x_aa or x_part)[-1] + 0.5]
    own = [0.5, len(part) + 0.5]
    finite = [v for v in (*part, *replaced) if math.isfinite(v)]
    if not finite:
        return None
    levels = [metric.threshold] + ([metric.upper] if metric.upper is not None else [])
    log = min([*finite, *levels]) > 0 and max(finite) > 50 * min(finite)
    names = ["from", "to"] if len(levels) == 2 else ["threshold"]
    statistic = metric.statistic if metric.statistic in ("mean", "max", "min") else "median"
    series = [
        Series("with the part", x_part, part, line=False, points=True),
        Series("A/A: its baseline", x_aa, replaced, line=False, points=True),
        *(Series(n, ends, [at, at], dashed=True) for n, at in zip(names, levels, strict=True)),
        Series(statistic, own, [verdict.value] * 2),
    ]
    if not replaced:
        del series[1]
    wanted = f"It needs {measured.needs}."
    aa = "Nothing was taken with the part replaced by its baseline."
    if replaced:
        shown = [v for v in replaced if math.isfinite(v)]
        spread = f"{number(min(shown))} to {number(max(shown))}" if shown else "not finite"
        aa = f"With the part replaced by its baseline, {len(replaced)} samples: {spread}."
    return Chart(
        title=measured.title,
        description=(
            f"{len(part)} samples of {measured.title}; {measured.statistic} "
            f"{number(verdict.value)} {measured.unit}".rstrip()
            + f". {wanted} {aa}"
        ),
        x_label="sample, in the order taken",
        y_label=measured.unit or ("relative error" if "error" in metric.name else "value"),
        series=series,
        bands=[Band(statistic, own, [verdict.low] * 2, [verdict.high] * 2)]
        if measured.interval
        else [],
        log_y=log,
        width=560,
        height=300,
    )


@dataclass(frozen=True)
class MetricOverview:
    """All metrics of a claim as a strip each: the shaded side is where it holds.

    A dot holds, a cross does not, so nothing depends on colour.

    Args:
        measured: the metrics.
        name: of the paper, for screen readers.
    """

    measured: Sequence[MeasuredMetric]
    name: str

    def render(self) -> str:
        """The SVG element as text."""
        height = _ROW * len(self.measured) + 2 * _PAD
        holds = sum(one.verdict.holds for one in self.measured)
        text = "; ".join(
            f"{one.title} {number(one.verdict.value)}, needs {one.needs}" for one in self.measured
        )
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="glance" role="img" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}">',
            f"<title>{escape(self.name)}: {holds} of {len(self.measured)} metrics hold</title>",
            f"<desc>{escape(text)}</desc>",
        ]
        for index, one in enumerate(self.measured):
            out += self._strip(one, _PAD + _ROW * (index + 0.5))
        return "".join([*out, "</svg>"])

    def _strip(self, one: MeasuredMetric, y: float) -> list[str]:
        metric = one.metric
        low, high = {">=": (_MIDDLE, _WIDTH), "<=": (0.0, _MIDDLE)}.get(
            metric.comparison, (0.3 * _WIDTH, 0.7 * _WIDTH)
        )
        marks = [v for v in (low, high) if 0 < v < _WIDTH]
        x = min(max(_place(metric, one.verdict.value) * _WIDTH, 5), _WIDTH - 5)
        out = [
            f'<rect class="glance-ok" x="{low:.1f}" y="{y - 4:.1f}" width="{high - low:.1f}" '
            'height="8" rx="2"/>',
            f'<path class="glance-line" d="M0 {y:.1f}H{_WIDTH}"/>',
            *(f'<path class="glance-mark" d="M{m:.1f} {y - 5:.1f}v10"/>' for m in marks),
        ]
        if one.verdict.holds:
            out.append(f'<circle class="glance-holds" cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>')
        else:
            out.append(
                f'<path class="glance-fails" d="M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7"/>'
            )
        return out


def _place(metric: Metric, value: float) -> float:
    """Where a number lies on its strip, 0 to 1; a single threshold is in the middle."""
    if metric.upper is not None:
        width = metric.upper - metric.threshold
        share = (value - metric.threshold) / width if width else 0.5
        return 0.3 + 0.4 * share
    if metric.threshold > 0 and value >= 0:
        return 0.5 * value / metric.threshold
    size = max(abs(value), abs(metric.threshold))
    return 0.5 + 0.4 * ((value - metric.threshold) / size if size else 0.0)
