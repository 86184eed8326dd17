"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from shoal.claims.bench.attention.values import AttentionReport, ContextRow, KernelRow
from shoal.core.svg import Chart, Series
from shoal.core.tables import Table, table_of
from shoal.core.web import WebSite


def best_kernels(report: AttentionReport) -> list[tuple[KernelRow, int]]:
    """Of each mask and length the fastest kernel forward, and how many were timed."""
    groups: dict[tuple[int, str], list[KernelRow]] = {}
    for row in report.kernels:
        if row.forward is not None:
            groups.setdefault((row.length, row.mask), []).append(row)
    return [
        (min(rows, key=lambda row: row.forward.median_s if row.forward else 0.0), len(rows))
        for rows in groups.values()
    ]


def best_methods(report: AttentionReport) -> list[tuple[ContextRow, int]]:
    """Of each mask, length and number of ranks the fastest method, and how many could run."""
    groups: dict[tuple[int, int, str], list[ContextRow]] = {}
    for row in report.context:
        if row.status == "ok":
            groups.setdefault((row.length, row.ranks, row.mask), []).append(row)
    return [(min(rows, key=lambda row: row.step_s or 0.0), len(rows)) for rows in groups.values()]


def tables(report: AttentionReport) -> Iterable[Table | str]:
    """What is wrong, and the fastest of each case."""
    broken = [
        (row.kernel, row.mask, row.length, "", row.status, row.reason)
        for row in report.kernels
        if row.status in ("wrong", "failed")
    ] + [
        (row.method, row.mask, row.length, str(row.ranks), row.status, row.reason)
        for row in report.context
        if row.status in ("wrong", "failed")
    ]
    if broken:
        yield table_of("", ("what", "mask", "tokens", "ranks", "", "why"), broken, "  rr")
    if report.kernels:
        yield table_of(
            "fastest kernel",
            ("tokens", "mask", "kernel", "TFLOP/s", "of"),
            [
                (
                    row.length,
                    row.mask,
                    row.kernel,
                    "" if row.forward is None else f"{row.forward.tflops:.3g}",
                    count,
                )
                for row, count in best_kernels(report)
            ],
            "r  rr",
        )
    if report.context:
        yield table_of(
            "fastest context-parallel method, in simulated link time",
            ("tokens", "ranks", "mask", "method", "step", "exposed", "of"),
            [
                (
                    row.length,
                    row.ranks,
                    row.mask,
                    row.method,
                    f"{1e6 * (row.step_s or 0.0):,.4g} µs",
                    f"{1e6 * (row.exposed_s or 0.0):,.4g} µs",
                    count,
                )
                for row, count in best_methods(report)
            ],
            "rr  rrr",
        )


def to_html(report: AttentionReport, *, title: str = "Attention, compared") -> str:
    """One page: what was asked, what was found, every row."""
    site = WebSite("shoal.claims.bench")
    return site.render(
        "attention.html",
        title=title,
        # Our own file, in which an escaped quote would be no quote.
        css=Markup(site.asset("style.css").decode()),  # noqa: S704
        report=report,
        counts=report.counts(),
        kernel_charts=list(_kernel_charts(report)),
        context_charts=list(_context_charts(report)),
        best_kernels=best_kernels(report),
        best_methods=best_methods(report),
    )


def _kernel_charts(report: AttentionReport) -> Iterable[Chart]:
    """TFLOP/s over length, a chart for each mask, where several lengths were timed."""
    for mask in report.settings.masks:
        series = _series(
            (
                kernel,
                [
                    (row.length, row.forward.tflops)
                    for row in report.kernels
                    if (row.kernel, row.mask) == (kernel, mask) and row.forward is not None
                ],
            )
            for kernel in report.settings.kernels
        )
        if series:
            yield _chart(f"Forward, {mask}", "tokens", "TFLOP/s of unmasked cells", series)


def _context_charts(report: AttentionReport) -> Iterable[Chart]:
    """Step time over ranks, a chart for each mask and length."""
    for length in report.settings.context_lengths:
        for mask in report.settings.masks:
            series = _series(
                (
                    method,
                    [
                        (row.ranks, 1e6 * row.step_s)
                        for row in report.context
                        if (row.method, row.mask, row.length) == (method, mask, length)
                        and row.step_s is not None
                    ],
                )
                for method in report.settings.methods
            )
            if series:
                title = f"Step time on the links, {mask}, {length:,} tokens"
                yield _chart(title, "ranks", "µs", series)


def _series(named: Iterable[tuple[str, Sequence[tuple[float, float]]]]) -> list[Series]:
    """A line for each name that has more than one point."""
    series = []
    for name, rows in named:
        if len(rows) > 1:
            x, y = zip(*rows, strict=True)
            series.append(Series(name, x, y, points=True))
    return series


def _chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> Chart:
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=series,
        log_x=True,
        log_y=True,
        width=480,
        height=300,
    )
