"""Prediction beside measurement: the report of a run, as data and as a page."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import StoreError
from shoal.core.files import write_atomic
from shoal.core.meter import read_events
from shoal.cost.pipeline.picture import svg
from shoal.cost.training.memory import ARENAS, TIERS
from shoal.ir import TrainPlan, TrainReport, compared, errors_of
from shoal.plan.saved import read_report
from shoal.plan.table import spell
from shoal.train.device import computes_on
from shoal.train.layout import RunDir
from shoal.train.timeline import timelines

# The first steps after a start pay for page faults, thread pools and compilation.
_WARM_UP = 5


def make_report(plan: TrainPlan, directory: RunDir) -> TrainReport:
    """Put what the events of a run say beside its plan.

    Raises:
        StoreError: the run has no steps.
    """
    from shoal.machine.fingerprint import versions

    events = list(read_events(directory.events))
    steps = _kept_steps(events)
    if not steps:
        raise StoreError(f"{directory.events}: no step was finished, so there is no report")
    steady = _steady(events)
    measured: dict[str, float] = {
        "step_s": statistics.median(event["step_s"] for event in steady),
        "steps": float(len(steps)),
        "total_s": sum(event["step_s"] for event in steps.values()),
        "memory_bytes": max(event["memory_bytes"] for event in steps.values()),
        "mfu": statistics.median(event["mfu"] for event in steady),
        "loss": steps[max(steps)]["loss"],
        "lost_s": _lost_seconds(events),
        "starts": float(sum(event["kind"] == "start" for event in events)),
        "finished": float(_ended(events)),
    }
    tokens = plan.job.global_batch * plan.job.seq_len
    measured["tokens_per_s"] = tokens / measured["step_s"]
    targets = [event["targets"] for event in steps.values() if "targets" in event]
    if targets and statistics.mean(targets) < tokens:
        measured["targets"] = statistics.mean(targets)
    finals = [event for event in events if event["kind"] == "eval" and event["final"]]
    if finals:
        measured["bits_per_byte"] = finals[-1]["bits_per_byte"]
        measured["heldout_loss"] = finals[-1]["loss"]
    for tier in TIERS:
        most = [event.get("tier_bytes", {}).get(tier) for event in steps.values()]
        if any(most):
            measured[f"{tier}_bytes"] = float(max(filter(None, most)))
    for event in events:
        if event["kind"] == "arenas":
            measured |= {f"{arena}_bytes": float(event[arena]) for arena in ARENAS}
    exposed = [event["outer_exposed_s"] for event in steps.values() if "outer_exposed_s" in event]
    if exposed:
        measured["outer_exposed_s"] = sum(exposed)
        measured["outer_exposed"] = sum(exposed) / measured["total_s"]
    sent = [event["wire_bytes"] for event in steady if event.get("wire_bytes")]
    if sent:
        measured["wire_bytes"] = statistics.median(sent)
    device = computes_on(plan.machine)
    return TrainReport(
        plan=plan,
        measured=measured,
        # Times of a CPU say nothing about what was predicted for GPUs.
        errors=errors_of(plan, measured) if device == plan.machine.device.kind else {},
        details={"plans": 1 + len(directory.past_plans()) + _changed(events)},
        versions=versions(),
        device=device,
    )


def report_of_ended(plan: TrainPlan, directory: RunDir) -> TrainReport | None:
    """The report of a run that has done every step of ``plan``; None while one is left.

    None, too, where the run was of another job; resuming it is then checked as usual.
    """
    if not directory.events.exists() or not directory.plan.exists():
        return None
    if TrainPlan.load(directory.plan).job != plan.job:
        return None
    events = list(read_events(directory.events))
    if not _ended(events):
        return None
    done = next(event["step"] for event in reversed(events) if event["kind"] == "end")
    report = read_report(directory.report, plan)
    if not isinstance(report, TrainReport) or not report.measured.get("finished"):
        return None
    return report if done >= (plan.job.steps or 0) else None


def _ended(events: Sequence[dict[str, Any]]) -> bool:
    """The newest start has reached the last step of its plan."""
    kinds = [event["kind"] for event in events if event["kind"] in ("start", "end")]
    return kinds[-1:] == ["end"]


def _changed(events: Sequence[dict[str, Any]]) -> int:
    """How often the run went over to another plan between two steps."""
    return sum(event["kind"] == "replan" for event in events)


def _kept_steps(events: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Step -> its event; a step that was lost and done again counts once."""
    return {event["step"]: event for event in events if event["kind"] == "step"}


def _steady(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step events without the first few after each start, unless there are no others."""
    kept: list[dict[str, Any]] = []
    everything: list[dict[str, Any]] = []
    since = 0
    for event in events:
        if event["kind"] == "start":
            since = 0
        elif event["kind"] == "step":
            everything.append(event)
            if since >= _WARM_UP:
                kept.append(event)
            since += 1
    return kept or everything


def _lost_seconds(events: Sequence[dict[str, Any]]) -> float:
    """Time of steps that were done again after a rank was lost."""
    last: dict[int, float] = {}
    lost = 0.0
    for event in events:
        if event["kind"] == "step":
            lost += last.get(event["step"], 0.0)
            last[event["step"]] = event["step_s"]
    return lost


def write_page(report: TrainReport, directory: RunDir) -> None:
    """Write ``report.html``: curves, the comparison, what the plan said, a sample."""
    events = list(read_events(directory.events))
    evaluations = [event for event in events if event["kind"] == "eval"]
    restarts = [event["step"] for event in events if event["kind"] == "start" and event["resumed"]]
    charts = _charts(report.plan, _starts(events), evaluations)
    passes = timelines(report.plan, directory)
    samples = [event for event in events if event["kind"] == "sample"]
    job, plan = report.plan.job, report.plan
    facts = [
        ("model", f"{job.model}, {plan.shape.hidden} wide, {plan.shape.num_layers} layers"),
        ("data", str(job.data)),
        ("ranks", str(job.parallel.world)),
        ("split", spell(plan)),
        ("optimizer", str(job.optimizer)),
        ("sharding", str(job.shard)),
        ("workers agree", str(job.sync)),
        ("sequences are assigned", "by rows" if job.batching is None else str(job.batching)),
        ("precision", job.precision),
        ("batch", f"{job.global_batch} sequences of {job.seq_len} tokens"),
        ("machine", f"{plan.machine.name}: {plan.machine.device.name}"),
        ("resumed at steps", ", ".join(map(str, restarts)) or "never"),
        ("reason for this plan", plan.why),
    ]
    write_atomic(
        directory.page,
        _page(
            f"Run {job.name}",
            _table("Comparison", ("", "predicted", "measured", "error"), compared(report)),
            "".join(f'<figure class="wide" tabindex="0">{chart}</figure>' for chart in charts),
            svg(passes, title="One step of the pipeline") if passes else "",
            _table("What ran", ("", ""), facts),
            _table("Versions", ("package", "version"), sorted(report.versions.items())),
            f'<pre tabindex="0">{html.escape(samples[-1]["text"])}</pre>' if samples else "",
        ),
    )


def _starts(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The step events of each start that has any."""
    results: list[list[dict[str, Any]]] = []
    for event in events:
        if event["kind"] == "start":
            results.append([])
        elif event["kind"] == "step":
            results[-1].append(event)
    return [steps for steps in results if steps]


def _charts(
    plan: TrainPlan,
    starts: Sequence[Sequence[dict[str, Any]]],
    evaluations: Sequence[dict[str, Any]],
) -> list[str]:
    """Loss, step time with its prediction, and memory, as SVG."""
    from shoal.core.svg import Band, Chart, Series

    def curves(name: str, key: str, factor: float = 1.0) -> list[Series]:
        """One line a start: a resumed run goes back some steps, and a line must not."""
        return [
            Series(
                name if number == 0 else f"{name}, resumed at {steps[0]['step']}",
                [event["step"] for event in steps],
                [factor * event[key] for event in steps],
            )
            for number, steps in enumerate(starts)
        ]

    loss = curves("training", "loss")
    if evaluations:
        loss.append(
            Series(
                "held-out",
                [event["step"] for event in evaluations],
                [event["loss"] for event in evaluations],
                points=True,
            )
        )
    times, bands = curves("measured", "step_s", 1e3), []
    if plan.estimate is not None:
        step = plan.estimate.step_s.scaled(1e3)
        ends = [starts[0][0]["step"], starts[-1][-1]["step"]]
        times.append(Series("predicted", ends, [step.value] * 2, dashed=True))
        bands.append(Band("predicted", ends, [step.low] * 2, [step.high] * 2))
    memory = curves("rank 0", "memory_bytes", 1e-6)
    charts: list[tuple[str, str, list[Series], list[Band]]] = [
        ("Loss", "nats per token", loss, []),
        ("Step time, predicted and measured", "ms", times, bands),
        ("Memory", "MB", memory, []),
    ]
    return [
        # Legible on a phone, where a picture shrinks to some 340 px.
        Chart(
            title=title,
            x_label="step",
            y_label=unit,
            series=series,
            bands=some,
            width=460,
            height=300,
        ).render()
        for title, unit, series, some in charts
    ]


def _table(name: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table that is scrolled on a narrow screen; its name is for screen readers."""
    top = "".join(
        f"<th scope=col>{html.escape(cell)}</th>" if cell else "<td></td>" for cell in head
    )
    lines = "".join(
        "<tr>"
        + f"<th scope=row>{html.escape(str(first))}</th>"
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    )
    shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(name)}">'
        f"<table>{shown}<tbody>{lines}</tbody></table></div>"
    )


def _page(
    title: str,
    comparison: str,
    charts: str,
    passes: str,
    facts: str,
    versions: str,
    sample: str,
) -> str:
    passes = f"<h2>One step of the pipeline</h2>{passes}" if passes else ""
    written = f"<h2>Generated text</h2>{sample}" if sample else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto; padding: 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }}
.wide {{ overflow-x: auto; }}
td {{ font-variant-numeric: tabular-nums; }}
.wide td {{ white-space: nowrap; }}
th[scope=row] {{ font-weight: 500; white-space: pre-wrap; vertical-align: top; }}
.curves {{ display: grid; gap: 1rem; }}
.curves {{ grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }}
figure {{ margin: 0; }} svg {{ max-width: 100%; height: auto; }}
.curves svg {{ min-width: 30rem; }}
pre {{ overflow: auto; max-height: 24rem; border: 1px solid var(--line); padding: 1rem; }}
</style></head><body>
<main>
<h1>{html.escape(title)}</h1>
<h2>Prediction beside measurement</h2>{comparison}
<h2>Curves</h2><div class="curves">{charts}</div>
{passes}
{written}
<h2>What ran</h2>{facts}
<details><summary>Versions</summary>{versions}</details>
</main></body></html>
"""
