from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.claims.catalogue import catalogue
from shoal.claims.gallery import GalleryPaths, index_rows, render_index, render_row, write_gallery
from shoal.claims.gallery.pages import GROUPS, facets
from shoal.claims.gallery.papers import MEANINGS, MeasuredMetric, counts, needs, per_sample
from shoal.claims.gallery.pictures import MetricOverview, samples_chart
from shoal.claims.protocols import Metric, MetricVerdict, PairedSamples
from shoal.claims.record import ClaimRecord, inspect, read, sealed, verdict_of, write
from shoal.claims.standing import listing, standings
from shoal.core.errors import ConfigError
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving_scoreboard import score_serving

RESULTS = Path("results")
VOID = {"meta", "link", "br", "input", "hr", "img"}


class Page(HTMLParser):
    """What a browser would make of a page: elements with attributes, text, and its outline."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @functools.cached_property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gallery(RESULTS, tmp_path_factory.mktemp("gallery") / "out").parent


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.name: Page(path.read_text()) for path in sorted(site.glob("*.html"))}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A few results: all of them are judged anew whenever a gallery is written."""
    directory = tmp_path / "results"
    directory.mkdir()
    for claim in ("dissect", "learning_curves", "gpipe"):
        shutil.copy(RESULTS / f"{claim}.json", directory)
    return directory


def _changed(path: Path, **update: Any) -> ClaimRecord:
    """The record with other samples or texts, judged and sealed again."""
    raw = read(path).model_dump(mode="json")
    for where, value in update.items():
        keys = where.split("__")
        place = raw
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    record = ClaimRecord.model_validate(raw)
    record = sealed(record.model_copy(update={"verdict": verdict_of(record)}))
    write(record, path)
    return record


# --- the catalogue ---


def test_every_paper_says_what_it_claims_and_what_is_checked() -> None:
    rows = catalogue()
    assert len(rows) == 146
    for row in rows:
        text = f"{row.says} {row.checks}"
        assert 40 <= len(text) <= 400, row.id
        for sentence in (row.says, row.checks):
            assert sentence[0] == sentence[0].upper(), row.id
            assert sentence.endswith("."), row.id
            assert "  " not in sentence, row.id
    for field in ("says", "checks"):
        assert max(Counter(getattr(row, field) for row in rows).values()) == 1


@pytest.mark.parametrize("says", ["", "Short.", "x" * 500])
def test_a_claim_text_of_no_use_is_refused(says: str) -> None:
    from shoal.claims.catalogue import CatalogueRow
    from shoal.core.config import parse

    raw = catalogue()[0].model_dump(mode="json") | {"says": says}
    with pytest.raises(ConfigError, match="says"):
        parse(CatalogueRow, raw, where="catalogue")


# --- what is shown ---


def test_every_paper_is_there_newest_results_first() -> None:
    papers = index_rows(RESULTS)
    assert sorted(paper.row.id for paper in papers) == list(range(146))
    stamps = [paper.started for paper in papers if paper.started]
    assert stamps == sorted(stamps, reverse=True)
    assert len(stamps) >= 2
    shown = [paper for paper in papers if paper.fault is None]
    assert [paper.started != "" for paper in shown] == [True] * len(stamps) + [False] * (
        len(shown) - len(stamps)
    )
    result = counts(papers)
    assert sum(result.values()) == 146
    by_listing = Counter(row.status for row in listing(RESULTS))
    assert {status: result[status] for status in by_listing if status != "skipped"} == {
        status: number for status, number in by_listing.items() if status != "skipped"
    }


def test_no_results_are_146_plans(tmp_path: Path) -> None:
    papers = index_rows(tmp_path)
    assert counts(papers)["planned"] == 146
    assert [paper.row.id for paper in papers] == list(range(146))
    page = Page(render_row(papers[48]))
    assert "shoal claims run dissect" in page.words
    assert "cache size error" in page.words  # what it needs, before anybody ran it


def test_an_edited_file_is_told_and_the_others_go_on(results: Path) -> None:
    path = results / "dissect.json"
    raw = json.loads(path.read_text())
    raw["samples"]["metrics"]["level_ratio"]["method"] = [1.0, 1.0, 1.0]
    path.write_text(json.dumps(raw))
    papers = {paper.row.id: paper for paper in index_rows(results)}
    assert papers[48].status == "edited"
    assert papers[48].measured == ()
    assert papers[77].status == "works"
    page = Page(render_row(papers[48]))
    assert "Edited: its verdict 'noisy' does not follow from its samples" in page.words
    assert "What we measured" not in page.words
    index = Page(render_index(list(papers.values())))
    assert "edited: its verdict 'noisy' does not follow from its samples" in index.words
    listed = next(row for row in listing(results) if row.id == 48)
    assert (listed.status, listed.measured) == ("skipped", {})
    assert listed.reason.startswith("its results file is edited: its verdict")


def test_a_changed_text_a_changed_threshold_and_rubbish_are_told(results: Path) -> None:
    path = results / "dissect.json"
    original = path.read_text()
    raw = json.loads(original)
    raw["command"] = "shoal claims run something-else"
    path.write_text(json.dumps(raw))
    assert index_rows(results)[0].status == "edited"
    assert "was edited after it was written" in index_rows(results)[0].reason

    raw = json.loads(original)
    raw["metrics"][0]["threshold"] = 0.9
    record = ClaimRecord.model_validate(raw)
    write(sealed(record.model_copy(update={"verdict": verdict_of(record)})), path)
    first = index_rows(results)[0]
    assert (first.row.id, first.status) == (48, "outdated")
    assert "thresholds are not those of the claim" in first.reason

    for rubbish in ("{", "[]", '{"format": 2}', ""):
        path.write_text(rubbish)
        first = index_rows(results)[0]
        assert (first.row.id, first.status) == (48, "unreadable")
        assert str(results) not in first.reason  # no place of this machine on a page
        assert first.reason


def test_a_file_that_cannot_be_read_is_told_and_not_linked(results: Path, tmp_path: Path) -> None:
    (results / "dissect.json").unlink()
    (results / "dissect.json").mkdir()
    out = write_gallery(results, tmp_path / "gallery").parent
    page = Page((out / "paper-48.html").read_text())
    assert "unreadable" in page.words
    assert not any("results/" in a["href"] for a in page.all("a"))
    assert (out / "results" / "learning_curves.json").is_file()


def test_a_file_that_names_no_claim_is_told(results: Path) -> None:
    path = results / "dissect.json"
    record = read(path)
    write(sealed(record.model_copy(update={"claim": "nothing_like_it"})), path)
    result = inspect(path)
    assert not isinstance(result, ClaimRecord)
    assert result.kind == "outdated"


def test_a_failure_shows_its_number_limit_and_debts(results: Path) -> None:
    _changed(
        results / "dissect.json",
        samples__metrics__level_ratio__method=[1.2, 1.2, 1.2, 1.3, 1.9],
        samples__bounds={"level_ratio": 4.0},
        attempts=[],  # whatever the claim has tried so far
    )
    paper = next(p for p in index_rows(results) if p.row.id == 48)
    assert paper.status == "falls_short"
    page = Page(render_row(paper))
    assert "level_ratio is 1.2, wanted >= 2 x" in page.words
    assert "30 % of 4" in page.words
    assert "Still owed to the reader: level_ratio: 2 more recorded attempts" in page.words


def test_texts_of_a_results_file_are_escaped(results: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    _changed(
        results / "dissect.json",
        samples__skipped={"gpu_bf16_over_fp32": evil},
        samples__profile=evil,
        command=evil,
        data=evil,
        model=evil,
        commit=evil,
        fingerprint={evil: evil},
        versions={evil: evil},
        options={evil: evil},
        attempts=[{"metric": "level_ratio", "tried": evil, "value": 1.0}],
    )
    paper = next(p for p in index_rows(results) if p.row.id == 48)
    assert paper.record is not None
    for text in (render_row(paper), render_index([paper])):
        page = Page(text)
        assert not any(tag == "img" for tag, _ in page.elements)
        assert all("src" in script for script in page.all("script"))
        assert not any(name.startswith("on") for _, a in page.elements for name in a)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in render_row(paper)


def test_names_of_metrics_are_escaped_in_pictures() -> None:
    one = _measured("value", ">=", 1.0, PairedSamples(method=(2.0, 3.0)), name="<b>&")
    chart = samples_chart(one)
    assert chart is not None
    for drawing in (chart.render(), MetricOverview([one], "<i>").render()):
        assert "<b>" not in drawing
        assert "<i>" not in drawing
        assert "&lt;b&gt;&amp;" in drawing


# --- pictures ---


def _measured(
    statistic: Any,
    comparison: Any,
    threshold: float,
    samples: PairedSamples,
    *,
    name: str = "m",
    upper: float | None = None,
    value: float | None = None,
    aa: PairedSamples | None = None,
) -> MeasuredMetric:
    metric = Metric(
        name=name,
        unit="x",
        statistic=statistic,
        comparison=comparison,
        threshold=threshold,
        upper=upper,
        baseline="b",
        evidence="mechanism",
    )
    value = samples.method[0] if value is None else value
    verdict = MetricVerdict(
        name=name, value=value, low=value, high=value, holds=metric.holds(value)
    )
    return MeasuredMetric(metric=metric, verdict=verdict, samples=samples, aa=aa)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("ratio", [0.5, 2.0]),
        ("speedup", [2.0, 0.5]),
        ("difference", [-1.0, 2.0]),
        ("relative_error", [0.5, 1.0]),
    ],
)
def test_samples_are_compared_pair_by_pair(statistic: Any, expected: list[float]) -> None:
    paired = PairedSamples(method=(1.0, 4.0), baseline=(2.0, 2.0))
    one = _measured(statistic, ">=", 1.0, paired)
    assert per_sample(one.metric, paired) == expected


def test_a_division_by_nothing_is_not_drawn() -> None:
    paired = PairedSamples(method=(1.0, 4.0), baseline=(0.0, 2.0))
    one = _measured("ratio", ">=", 1.0, paired, value=2.0)
    chart = samples_chart(one)
    assert chart is not None
    assert "nan" not in chart.render()
    assert "inf" not in chart.render()
    nothing = _measured(
        "ratio", ">=", 1.0, PairedSamples(method=(1.0,), baseline=(0.0,)), value=2.0
    )
    assert samples_chart(nothing) is None


def test_a_chart_has_the_threshold_and_the_aa_run_beside_the_samples() -> None:
    one = _measured(
        "value",
        "within",
        1.0,
        PairedSamples(method=(2.0, 2.5)),
        upper=3.0,
        aa=PairedSamples(method=(9.0,)),
    )
    chart = samples_chart(one)
    assert chart is not None
    assert [series.name for series in chart.series] == [
        "with the part",
        "A/A: its baseline",
        "from",
        "to",
        "median",
    ]
    assert list(chart.series[1].x) == [3.0]  # after the samples of the part
    assert "It needs 1 to 3 ×." in chart.description
    assert needs(one.metric) == "1 to 3 ×"
    alone = samples_chart(_measured("value", "<=", 1.0, PairedSamples(method=(0.5,))))
    assert alone is not None
    assert "Nothing was taken with the part replaced" in alone.description


@pytest.mark.parametrize(
    ("comparison", "threshold", "upper", "value"),
    [
        (">=", 2.0, None, 3.0),
        (">=", 2.0, None, 1e9),
        ("<=", 0.0, None, 0.0),
        ("<=", -1.0, None, -5.0),
        ("within", -0.25, -0.03, -0.1),
        ("within", 1.0, 1.0, 1.0),
    ],
)
def test_a_glance_puts_what_holds_on_the_shaded_side(
    comparison: Any, threshold: float, upper: float | None, value: float
) -> None:
    one = _measured(comparison=comparison, statistic="value", threshold=threshold,
                    upper=upper, samples=PairedSamples(method=(1.0,)), value=value)  # fmt: skip
    drawing = MetricOverview([one], "paper").render()
    assert "glance-holds" in drawing
    box = re.search(r'glance-ok" x="([\d.]+)" .*? width="([\d.]+)"', drawing)
    dot = re.search(r'cx="([\d.]+)"', drawing)
    assert box is not None
    assert dot is not None
    low, width = float(box[1]), float(box[2])
    assert low - 0.1 <= float(dot[1]) <= low + width + 0.1
    assert "1 of 1 metrics hold" in drawing


def test_a_glance_of_a_failure_is_a_cross() -> None:
    one = _measured("value", ">=", 2.0, PairedSamples(method=(1.0,)))
    drawing = MetricOverview([one], "paper").render()
    assert "glance-fails" in drawing
    assert "0 of 1 metrics hold" in drawing


# --- the site ---


@pytest.mark.slow
def test_there_is_a_page_for_every_paper_and_group(pages: dict[str, Page]) -> None:
    papers = index_rows(RESULTS)
    places = GalleryPaths()
    assert {places.of_paper(paper) for paper in papers} <= set(pages)
    for kind, values in facets(papers).items():
        for value, number in values.items():
            page = pages[places.of_group(kind, value)]
            listed = [a for a in page.all("li") if a.get("class") == "paper"]
            assert len(listed) == number, (kind, value)
    for paper in papers:
        page = pages[places.of_paper(paper)]
        assert paper.row.title in page.words
        assert paper.row.says.replace(" %", "\N{NO-BREAK SPACE}%").split()[0] in page.words
        assert str(paper.row.year) in page.words


def test_published_runs_stand_beside_what_was_predicted(pages: dict[str, Page]) -> None:
    page = pages["scoreboard.html"]
    for board in (score_training(), score_serving()):
        assert f"{100 * board.median_error():.1f} %" in page.words.replace(
            "\N{NO-BREAK SPACE}", " "
        )
        rows = [row.id for row in board.rows]
        assert [row_id for row_id in rows if row_id not in page.words] == []
        assert all(name in page.words for name in board.skipped)
        worst = max(board.rows, key=lambda row: abs(row.error))
        assert worst.reason
        assert worst.reason in page.words
    assert "scoreboard.html" in {a.get("href") for a in pages["index.html"].all("a")}


def test_the_index_lists_everything_it_promises(pages: dict[str, Page]) -> None:
    index = pages["index.html"]
    listed = {int(a["data-id"]): a for a in index.all("li") if a.get("class") == "paper"}
    assert set(listed) == set(range(146))
    for row in catalogue():
        assert row.name in index.words
        assert row.title in index.words
        assert listed[row.id]["data-room"] == row.room
    links = {a["data-value"]: a["href"] for a in index.all("a") if a.get("data-kind") == "status"}
    for name in ("works", "modelled", "falls_short", "noisy", "skipped", "edited", "planned"):
        assert links[name] == GalleryPaths().of_group("status", name)
    # The filters wait for the script; without it the list is whole and links lead on.
    form = next(a for a in index.all("form") if "data-find" in a)
    assert "hidden" in form
    assert not any("hidden" in a for a in listed.values())
    selects = {a["name"] for a in index.all("select")}
    assert {*GROUPS, "sort"} == selects


def test_a_results_page_has_everything_needed_to_repeat_it(pages: dict[str, Page]) -> None:
    paper = next(p for p in index_rows(RESULTS) if p.row.id == 48)
    record = paper.record
    assert record is not None
    words = pages["paper-48.html"].words
    for part in (
        record.command,
        record.commit[:12],
        record.started[:10],
        record.fingerprint["cpu"],
        f"torch {record.versions['torch']}",
        "shoal claims check results/dissect.json",
        "no NVIDIA driver",
        *(attempt.tried for attempt in record.attempts),
    ):
        assert part in words
    assert len(pages["paper-48.html"].all("svg")) == 1 + len(paper.measured)  # with the fish


def test_all_links_lead_somewhere_inside(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        ids = {a["id"] for _, a in page.elements if a.get("id")}
        links = [a[k] for _, a in page.elements for k in ("href", "src", "action") if k in a]
        assert links
        for link in links:
            parts = urlsplit(str(link))
            assert not parts.scheme and not parts.netloc, f"{name}: {link}"
            assert not parts.path.startswith("/"), f"{name}: {link}"
            if parts.path:
                assert (site / unquote(parts.path)).is_file(), f"{name}: {link}"
            elif parts.fragment:
                assert parts.fragment in ids, f"{name}: {link}"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|@import|url\(", text), path.name


def test_pages_are_made_for_everybody(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert len(page.all("h1")) == 1, name
        assert len(page.all("main")) == 1, name
        ids = [a["id"] for _, a in page.elements if a.get("id")]
        assert len(ids) == len(set(ids)), name
        labelled = {a.get("for") for a in page.all("label")}
        for tag in ("input", "select"):
            assert {a.get("id") for a in page.all(tag)} <= labelled, name
        pictures = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
        assert all(a.get("role") == "img" for a in pictures), name
        assert len(page.all("title")) == 1 + len(pictures), name
        assert len(page.all("desc")) == len(pictures), name
        assert all(a.get("scope") for a in page.all("th")), name
        for _, attributes in page.elements:
            assert "style" not in attributes, name
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), name


@pytest.mark.slow
def test_writing_it_again_gives_the_same_bytes(site: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    for _ in range(2):  # the second time in place of the first
        write_gallery(RESULTS, again)
    first = {p.relative_to(site): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    second = {p.relative_to(again): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    for claim in ("dissect", "learning_curves"):
        name = f"{claim}.json"
        assert (again / "results" / name).read_bytes() == (RESULTS / name).read_bytes()


def test_pages_link_where_they_are_told_to() -> None:
    places = GalleryPaths(
        index="/claims", paper="/claims/{id}", group="/claims?{kind}={value}", results="/r/{claim}"
    )
    paper = next(p for p in index_rows(RESULTS) if p.row.id == 48)
    hrefs = {a["href"] for a in Page(render_row(paper, places=places)).all("a")}
    assert {"/claims", "/r/dissect", "/claims?room=machine"} <= hrefs
    hrefs = {a["href"] for a in Page(render_index([paper], places=places)).all("a")}
    assert "/claims/48" in hrefs


def test_every_status_has_a_meaning_a_sign_and_a_page() -> None:
    papers = [
        paper.model_copy(update={"status": name})
        for paper, name in zip(index_rows(RESULTS), MEANINGS, strict=False)
    ]
    page = render_index(papers)
    for name in MEANINGS:
        assert f'badge badge-{name.replace("_", "-")}"' in page


# --- the command ---


def _report(*words: str) -> Any:
    return CliRunner().invoke(app, ["claims", "report", *words])


def test_the_command_writes_and_replaces_a_gallery(tmp_path: Path, results: Path) -> None:
    out = tmp_path / "deep" / "gallery"
    for _ in range(2):
        done = _report("--results", str(results), "--out", str(out))
        assert done.exit_code == 0, done.output
    assert (out / "index.html").is_file()
    assert "planned" in done.output


def test_a_page_that_is_no_longer_written_goes_away(tmp_path: Path, results: Path) -> None:
    out = tmp_path / "gallery"
    write_gallery(results, out)
    assert (out / "results" / "dissect.json").exists()
    (results / "dissect.json").unlink()
    write_gallery(results, out)
    assert not (out / "results" / "dissect.json").exists()


def test_the_command_takes_an_empty_directory(tmp_path: Path, results: Path) -> None:
    out = tmp_path / "gallery"
    out.mkdir()
    assert _report("--results", str(results), "--out", str(out)).exit_code == 0


@pytest.mark.parametrize("kind", ["file", "foreign", "mixed", "marker", "link"])
def test_the_command_replaces_nothing_but_a_gallery(
    tmp_path: Path, results: Path, kind: str
) -> None:
    out = tmp_path / "gallery"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    else:
        if kind == "mixed":
            write_gallery(results, out)
        out.mkdir(exist_ok=True)
        (out / "thesis.txt").write_text("mine")
        if kind == "marker":
            (out / "gallery.json").write_text('{"files": 3}')
    done = _report("--out", str(out))
    assert isinstance(done.exception, ConfigError)
    assert "new, empty or an older gallery" in str(done.exception)
    if kind == "file":
        assert out.read_text() == "mine"
    elif kind != "link":
        assert (out / "thesis.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {"gallery", "elsewhere", "results"}


def test_the_command_needs_a_directory_of_results(tmp_path: Path) -> None:
    for results in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        done = _report("--results", str(results), "--out", str(tmp_path / "gallery"))
        assert isinstance(done.exception, ConfigError)
        assert "a directory with results files" in str(done.exception)
        assert "--results" in str(done.exception)
        assert not (tmp_path / "gallery").exists()


def test_the_command_reports_an_edited_file(tmp_path: Path, results: Path) -> None:
    path = results / "dissect.json"
    path.write_text(path.read_text().replace('"status": "noisy"', '"status": "works"'))
    done = _report("--results", str(results), "--out", str(tmp_path / "gallery"))
    assert done.exit_code == 0
    assert "1 edited" in done.output
    assert "edited" in (tmp_path / "gallery" / "paper-48.html").read_text()


def test_standings_and_listing_agree() -> None:
    for standing, listed in zip(standings(RESULTS), listing(RESULTS), strict=True):
        status = "planned" if standing.fault is None else "skipped"
        if standing.record is not None:
            status = standing.record.verdict.status
        assert (standing.row.id, status) == (listed.id, listed.status)
