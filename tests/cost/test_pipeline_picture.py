"""Pictures, traces and text of timelines: everything is in them, and nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from shoal.core.errors import PlanError
from shoal.cost.pipeline.picture import Picture, page, svg
from shoal.cost.pipeline.simulator import Timeline, simulate
from shoal.cost.pipeline.text import lines
from shoal.cost.pipeline.trace import trace
from shoal.ir.schedule import Event, Op, OpCosts
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.vocab import with_vocabulary

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str = "1f1b", pp: int = 3, microbatches: int = 4) -> Timeline:
    part = SCHEDULES.build(name)
    vpp = part.chunks or 2
    schedule = part.build(pp, microbatches, vpp)
    return simulate(schedule, OpCosts.uniform(pp * vpp))


def late(predicted: Timeline) -> Timeline:
    """As measured: a tenth slower."""
    return Timeline.of(
        event._replace(start=1.1 * event.start, end=1.1 * event.end) for event in predicted.events()
    )


def boxes(text: str) -> list[ElementTree.Element]:
    tree = ElementTree.fromstring(text)
    return [rect for rect in tree.iter(SVG + "rect") if rect.find(SVG + "title") is not None]


def test_every_pass_is_a_box_at_its_time() -> None:
    predicted = timeline()
    result = boxes(svg({"predicted": predicted}, title="1f1b"))
    assert len(result) == len(predicted)
    scale = (1100 - 58 - 12) / predicted.makespan
    for box, event in zip(result, predicted.events(), strict=True):
        assert float(box.attrib["x"]) == pytest.approx(58 + scale * event.start, abs=0.01)
        assert float(box.attrib["width"]) == pytest.approx(
            scale * (event.end - event.start), abs=0.01
        )
        position = box.find(SVG + "title")
        assert position is not None and position.text is not None
        assert (
            f"rank {event.rank}:" in position.text
            and f"micro-batch {event.op.mb}," in position.text
        )


def test_kinds_have_colours_and_a_legend_of_those_that_occur() -> None:
    text = svg({"it": timeline("zb_h1")}, title="t")
    assert "I gradient of the input" in text and "W gradient of the weights" in text
    assert "B backward" not in text
    colours = {box.attrib["fill"] for box in boxes(text)}
    assert len(colours) == 3


def test_later_stages_of_a_rank_are_lighter() -> None:
    colours = {box.attrib["fill"] for box in boxes(svg({"it": timeline("zbv")}, title="t"))}
    assert len(colours) == 6


def test_measured_stands_below_predicted_on_one_scale() -> None:
    predicted = timeline()
    measured = late(predicted)
    text = Picture(title="both", timelines={"predicted": predicted, "measured": measured}).render()
    result = boxes(text)
    above, below = result[: len(predicted)], result[len(predicted) :]
    assert max(float(b.attrib["y"]) for b in above) < min(float(b.attrib["y"]) for b in below)
    right = max(float(b.attrib["x"]) + float(b.attrib["width"]) for b in below)
    assert right == pytest.approx(1100 - 12, abs=0.05)
    assert text.index("predicted: 18 s") < text.index("measured: 19.8 s")
    # Part of a page, it takes the page's ink; alone, the system's light or dark.
    assert "<style>" not in text
    assert "prefers-color-scheme" in svg({"predicted": predicted}, title="t")


def test_words_are_escaped() -> None:
    text = page({"<b>&": timeline()}, title="<script>alert(1)</script>")
    assert "<script>alert" not in text
    assert "<b>&" not in text
    assert boxes(svg({"<b>&": timeline()}, title="<&>"))


def test_page_needs_no_other_file() -> None:
    text = page({"predicted": timeline(), "measured": late(timeline())}, title="both")
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "url(" not in text and "@import" not in text
    assert text.count("<svg") == 1
    assert "data-theme-toggle" in text and "light-dark(" in text
    assert "18 s" in text and "19.8 s" in text


def test_microbatch_is_told_where_it_fits() -> None:
    def numbers(microbatches: int) -> int:
        tree = ElementTree.fromstring(svg({"": timeline("1f1b", 2, microbatches)}, title="t"))
        return sum(text.attrib.get("font-size") == "10" for text in tree.iter(SVG + "text"))

    assert numbers(4) == 16
    assert numbers(400) == 0


def test_vocabulary_is_drawn_with_its_shards() -> None:
    schedule = with_vocabulary(SCHEDULES.build("1f1b").build(2, 3), 2)
    seconds = OpCosts.uniform(2).seconds | dict.fromkeys(("EF", "EB", "S", "T"), (0.5, 0.5))
    text = svg({"it": simulate(schedule, OpCosts(seconds=seconds))}, title="t")
    assert "output layer, S, shard 1, micro-batch 2" in text
    assert "EB gradient of the embedding" in text


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(PlanError, match="0 passes"):
        svg({"none": Timeline.of([])}, title="t")
    with pytest.raises(PlanError, match="trace for Perfetto"):
        svg({"many": timeline("gpipe", 16, 800)}, title="t")
    assert boxes(svg({"no time": Timeline.of([Event(0, Op("F", 0, 0), 0.0, 0.0)])}, title="t"))


def test_trace_has_a_process_a_timeline_and_a_thread_a_rank() -> None:
    predicted = timeline()
    result = trace({"predicted": predicted, "measured": late(predicted)}, unit_s=1e-3)
    events = result["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    threads = [e for e in events if e["name"] == "thread_name"]
    assert [(e["pid"], e["tid"]) for e in threads] == [(p, r) for p in (0, 1) for r in range(3)]
    passes = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    for got, event in zip(passes, predicted.events(), strict=True):
        assert got["name"] == str(event.op)
        assert got["tid"] == event.rank
        assert got["ts"] == pytest.approx(1e3 * event.start)
        assert got["dur"] == pytest.approx(1e3 * (event.end - event.start))
        assert got["args"]["microbatch"] == event.op.mb


def test_text_says_who_does_what() -> None:
    assert lines(timeline("1f1b", 2, 2)) == [
        "F0-F1-......B0----...B1----",
        "...F0-B0----F1-B1----......",
    ]


def test_text_fits_and_shows_the_ranks_that_are_asked_for() -> None:
    many = timeline("1f1b", 8, 64)
    shown = lines(many, 50, [0, 7])
    assert len(shown) == 2 and all(len(line) == 50 for line in shown)
    assert set("".join(shown)) <= set("FB.-")
    assert lines(Timeline.of([]), 50) == []
    assert lines(Timeline.of([Event(0, Op("F", 0, 0), 0.0, 0.0)]), 50) == [""]
