"""What is generated says what it was given; `make check` builds the site and the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, blocks, script

from shoal.claims.protocols import ClaimSamples, Metric, PairedSamples
from shoal.claims.record import ClaimRecord, verdict_of
from shoal.plan.strategy import PLANNERS


def test_the_numbers_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("results").main(["--check", "--no-output"]) == 0, capsys.readouterr().err


def test_the_readme_fits_its_limits() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    results = script("results")
    measured = text.partition(results.BEGIN)[2].partition(results.END)[0]
    rows = [line for line in measured.splitlines() if line.startswith("| ")][1:]
    assert 4 <= len(rows) <= 8
    known = {
        row["name"] for row in json.loads((ROOT / "results/benchmarks.json").read_text())["rows"]
    }
    assert set(results.HEADLINES) <= known


def test_errors_in_the_readme_are_those_of_the_pages() -> None:
    text = script("results").accuracy(ROOT)
    board = (DOCS / "how-wrong-are-we.md").read_text()
    for name, title in (
        ("training", "training: step time"),
        ("closed loops, time to first token", "serving: time to first token"),
    ):
        match = re.search(rf"^\| {name} \| (\d+) \| ([\d.]+)%", board, re.MULTILINE)
        assert match
        assert f"| {title} | {int(match[1]):,} | {match[2]} % |" in text
    assert text in (ROOT / "README.md").read_text()


def test_output_is_generated_or_called_an_example() -> None:
    pasted = [
        str(block)
        for page in PAGES
        if DOCS / "reference" not in page.parents
        for block in blocks(page)
        if block.language == "text" and not (block.printed or block.example)
    ]
    assert pasted == []


@pytest.mark.slow
def test_output_in_the_readme_has_the_format_of_today() -> None:
    """Numbers and plans follow the cost model; titles and columns are compared."""
    results = script("results")
    text = (ROOT / "README.md").read_text()
    commands = [match["command"] for match in results.OUTPUT.finditer(text)]
    assert len(commands) == 2
    shell = [block.text for block in blocks(ROOT / "README.md") if block.language == "shell"]
    for command in commands:  # each is shown to the reader, but for what shortens its output
        shown = command.partition(" >")[0]
        assert any(shown in one.splitlines() for one in shell), shown
    assert results.outputs(text, exact=False) == text


def test_output_is_compared_by_its_labels() -> None:
    results = script("results")
    old = (
        "```text\nplans, best first\n plan   fits  step\n dp8 tp2  yes  6.79 s\n"
        "memory  1 GB\n3 more\n```"
    )
    other = old.replace("dp8 tp2  yes  6.79 s", "dp4 pp4  yes  7 s\n dp2 tp8  no  1 s")
    assert (
        results.labels(old)
        == results.labels(other)
        == ["memory", "plan fits step", "plans, best first"]
    )
    for word in ("memory", "fits"):
        assert results.labels(old.replace(word, "other")) != results.labels(old)
    page = "<!-- output: echo memory 3 GB -->\n\n```text\nmemory 2 GB\n```\n\n<!-- /output -->\n"
    assert results.outputs(page, exact=False) == page
    assert "memory 3 GB\n```" in results.outputs(page, exact=True)
    changed = page.replace("memory 2 GB", "size 2 GB")
    assert "memory 3 GB\n```" in results.outputs(changed, exact=False)
    with pytest.raises(SystemExit, match="status 3"):
        results.printed("exit 3")


def test_options_of_both_styles_are_found() -> None:
    rows = {c.words: {row[0]: row for row in c.rows} for c in script("reference").commands()}
    assert "`--full`, `--fast`" in rows["shoal", "probe"]
    assert rows["shoal", "plan", "train"]["`--machine`, `-m`"][2] == "`local`"
    assert rows["shoal", "plan", "train"]["`SUBJECT`"][1] == "text"
    assert rows["shoal", "train"]["`--set`"][1] == "text, repeatable"
    assert all(name in rows["shoal", "plan", "train"]["`--planner`"][3] for name in PLANNERS)


def _place(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    for name in ("README.md", "docs/results.md"):
        (tmp_path / name).write_text("# Title\n\n<!-- results -->\n<!-- /results -->\n\nEnd.\n")
    return tmp_path


TAKEN = {
    "machine": {"cpu": "A CPU", "isa": "avx2", "cores": "2", "memory_bytes": str(8 * 2**30)},
    "date": "2026-01-02",
    "commit": "0123456789abcdef",
}
OTHER = {**TAKEN, "machine": {**TAKEN["machine"], "isa": "avx2 avx512_bf16 amx_bf16"}}
ROWS = [
    {"name": "speed | peer", "value": 1.234, "unit": "x", "threshold": 1.0, "comparison": ">=",
     "holds": True, "note": "interleaved", **TAKEN},
    {"name": "error", "value": 0.5, "unit": "", "threshold": 0.1, "comparison": "<=",
     "holds": False, "note": "", **TAKEN},
    {"name": "count", "value": 12345678, "unit": "B", "threshold": None, "comparison": None,
     "holds": None, "note": "", **TAKEN},
    {"name": "error", "value": 0.05, "unit": "", "threshold": 0.1, "comparison": "<=",
     "holds": True, "note": "", **OTHER, "date": "2026-01-01"},
]  # fmt: skip


def test_benchmarks_become_a_table(tmp_path: Path) -> None:
    root = _place(tmp_path)
    (root / "results" / "benchmarks.json").write_text(json.dumps({"rows": ROWS}))
    results = script("results")
    assert results.main(["--check"], root) == 1
    assert results.main([], root) == 0
    assert results.main(["--check"], root) == 0
    text = (root / "docs" / "results.md").read_text()
    assert text.startswith("# Title") and text.endswith("End.\n")
    vectors, tiles = (
        text.index(f"## Benchmarks on A CPU, 2 cores, 8.59 GB, {kind}\n")
        for kind in ("AVX2", "matrix tiles (AMX)")
    )
    assert "| speed \\| peer | 1.234 x | >= 1 x | yes | 2026-01-02 | interleaved |" in text
    assert vectors < text.index("| error | 0.5 | <= 0.1 | **no** | 2026-01-02 |  |") < tiles
    assert tiles < text.index("| error | 0.05 | <= 0.1 | yes | 2026-01-01 |  |")
    assert "| count | 12,345,678 B |  |  | 2026-01-02 |  |" in text


def test_headlines_become_the_rows_of_the_readme(tmp_path: Path) -> None:
    root = _place(tmp_path)
    names = list(script("results").HEADLINES)
    rows = [
        {"name": names[0], "value": 0.092, "unit": "", "threshold": 0.12, "holds": True},
        {"name": names[1], "value": 0.9925, "unit": "x", "threshold": 0.97, "holds": True},
        {"name": names[2], "value": 1.0, "unit": "", "threshold": 1, "holds": False},
        {"name": "another", "value": 3.0, "unit": "s", "threshold": None, "holds": None},
    ]
    rows = [{**row, **TAKEN} for row in rows]
    rows.append({**rows[0], "value": 0.5, "date": "2026-01-01"})  # measured before
    (root / "results" / "benchmarks.json").write_text(json.dumps({"rows": rows}))
    assert script("results").main([], root) == 0
    text = (root / "README.md").read_text()
    on = "2026-01-02, A CPU, 2 cores, 8.59 GB"
    titles = list(script("results").HEADLINES.values())
    assert f"| {titles[0]} | 9.2 % | {on} |" in text
    assert f"| {titles[1]} | 0.99x | {on} |" in text
    assert f"| {titles[2]} | **not all** | {on} |" in text
    assert "another" not in text


def test_predictions_become_a_table(tmp_path: Path) -> None:
    step = {"value": 0.2, "low": 0.15, "high": 0.25}
    both = {"job": "4m", "plan": "dp2", "step_s": step, "memory_bytes": 100.0}
    measured = {"step_s": 0.22, "memory_bytes": 90.0}
    rows = [{**both, "measured": measured}, {**both, "plan": "tp2"}]
    (tmp_path / "predictions.json").write_text(json.dumps({"machine": {}, "rows": rows}))
    text = "\n".join(script("results").predictions(tmp_path))
    assert "| 4m | dp2 | 200 ms (150 to 250) | 220 ms | +10 % | -10 % |" in text
    assert "tp2" not in text
    assert script("results").records(tmp_path) == []


def test_without_results_the_block_says_so(tmp_path: Path) -> None:
    root = _place(tmp_path)
    assert script("results").main([], root) == 0
    assert "No results are on file yet" in (root / "README.md").read_text()


def test_a_page_without_its_block_is_refused(tmp_path: Path) -> None:
    root = _place(tmp_path)
    (root / "README.md").write_text("# Title\n")
    with pytest.raises(SystemExit, match=r"README\.md: expected one block"):
        script("results").main([], root)


def test_a_claim_that_does_not_hold_is_shown_as_plainly() -> None:
    metrics = tuple(
        Metric(name=name, unit="x", statistic="ratio", comparison=">=", threshold=limit,
               baseline="plain", evidence="mechanism", paper="2 x in table 1")
        for name, limit in (("good", 1.5), ("bad", 3.0))
    )  # fmt: skip
    pairs = PairedSamples(method=(2.0, 2.0, 2.0), baseline=(1.0, 1.0, 1.0))
    equal = PairedSamples(method=(1.0, 1.0, 1.0), baseline=(1.0, 1.0, 1.0))
    draft = ClaimRecord(
        claim="example",
        rows=(1,),
        command="shoal claims run example",
        started="2026-01-02T03:04:05+00:00",
        seconds=1.0,
        seed=0,
        metrics=metrics,
        samples=ClaimSamples(metrics={"good": pairs, "bad": pairs}),
        aa=ClaimSamples(metrics={"good": equal, "bad": equal}),
        verdict={"status": "planned"},  # type: ignore[arg-type]
    )
    record = draft.model_copy(update={"verdict": verdict_of(draft)})
    text = "\n".join(script("results").metrics([record]))
    assert "| `example` | good | 2 x (2 to 2) | >= 1.5 x | mechanism | holds |" in text
    assert "| `example` | bad | 2 x (2 to 2) | >= 3 x | mechanism | **does not hold** |" in text
    assert "### example: falls_short (mechanism) {#example}" in text
    assert "`shoal claims run example`" in text
    assert "2 x in table 1" in text
