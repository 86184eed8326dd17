"""A whole claim: run, A/A run, results file, recheck, listing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from shoal.claims import dependencies
from shoal.claims import record as record_module
from shoal.claims import run as run_module
from shoal.claims import standing as standing_module
from shoal.claims.cached import CachedResult
from shoal.claims.catalogue import catalogue
from shoal.claims.dependencies import code_files
from shoal.claims.protocols import (
    Attempt,
    ClaimSamples,
    Experiment,
    ExperimentContext,
    Metric,
    PairedSamples,
)
from shoal.claims.record import judge_again, read, recheck
from shoal.claims.run import run
from shoal.claims.standing import counts, listing, standing, to_run_again
from shoal.core.errors import (
    ConfigError,
    NoisyMachineError,
    StoreError,
    UnknownKeyError,
    UnknownPartError,
)
from shoal.core.parts import PartTable, part
from shoal.core.random import generator


@part
class Sorting:
    """Merge sort compares less often than insertion sort; counted, so quick and exact.

    Args:
        length: numbers to sort.
        refuse: refuse to run.
    """

    length: int = 64
    refuse: bool = False

    rows: ClassVar[tuple[int, ...]] = (48,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="comparisons",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=0.5,
            baseline="insertion sort",
            evidence="same_regime",
        ),
    )
    attempts: ClassVar[tuple[Attempt, ...]] = ()

    def refuses(self, context: ExperimentContext) -> str | None:
        """Refuse when told to."""
        return "told to refuse" if self.refuse else None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Count comparisons of a few random lists."""
        assert context.work_dir.is_dir()
        rounds = 3 if quick else 9
        baseline = context.remember("insertion", lambda: self._counts(rounds, insertion))
        method = self._counts(rounds, insertion if as_baseline else merge)
        context.progress("sorting", 1.0)
        return ClaimSamples(
            metrics={"comparisons": PairedSamples(method=method, baseline=baseline)}
        )

    def _counts(self, rounds: int, sort: Any) -> list[float]:
        lists = [generator(0, index=n).permutation(self.length) for n in range(rounds)]
        return [float(sort(list(numbers))[1]) for numbers in lists]


def merge(numbers: list[int]) -> tuple[list[int], int]:
    if len(numbers) < 2:
        return numbers, 0
    half = len(numbers) // 2
    (left, a), (right, b) = merge(numbers[:half]), merge(numbers[half:])
    out, count = [], a + b
    while left and right:
        count += 1
        out.append((left if left[0] < right[0] else right).pop(0))
    return out + left + right, count


def insertion(numbers: list[int]) -> tuple[list[int], int]:
    out, count = [], 0
    for number in numbers:
        place = len(out)
        while place:
            count += 1
            if out[place - 1] < number:
                break
            place -= 1
        out.insert(place, number)
    return out, count


@part
class Timing(Sorting):
    """The same with a metric that is a time."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Sorting.metrics[0],
        Sorting.metrics[0].model_copy(update={"name": "seconds", "timing": True, "quick": False}),
    )


HARDER = {"threshold": 0.1}
TABLE = PartTable("claim", {"dissect": f"{__name__}:Sorting", "timing": f"{__name__}:Timing"})


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_module, "CLAIMS", TABLE)
    monkeypatch.setattr(run_module, "commit_of_code", lambda: ("1" * 40, False))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def test_the_sorts_sort() -> None:
    numbers = list(generator(1).permutation(50))
    assert merge(numbers)[0] == insertion(numbers)[0] == sorted(numbers)


def test_is_an_experiment() -> None:
    assert isinstance(Sorting(), Experiment)


def test_full_run_writes_a_record_anyone_can_recheck(tmp_path: Path) -> None:
    said: list[tuple[str, float]] = []
    result = run("dissect", results=tmp_path, progress=lambda text, done: said.append((text, done)))
    assert result.verdict.status == "works"
    assert result.path == tmp_path / "dissect.json"
    assert said == [("sorting", 0.5), ("A/A: sorting", 1.0)]
    record = recheck(result.path, Sorting.metrics)
    assert record == result.record
    assert record.command == "shoal claims run dissect"
    assert len(record.samples.metrics["comparisons"].method) == 9
    assert record.aa is not None
    assert record.aa.metrics["comparisons"].method == record.aa.metrics["comparisons"].baseline
    assert record.fingerprint
    assert record.versions


def test_quick_run_agrees_with_the_full_run(tmp_path: Path) -> None:
    run("dissect", results=tmp_path)
    before = (tmp_path / "dissect.json").read_bytes()
    quick = run("dissect", quick=True, results=tmp_path)
    assert (quick.verdict.status, quick.path, quick.disagrees) == ("works", None, ())
    assert quick.record.command == "shoal claims run dissect --quick"
    assert (tmp_path / "dissect.json").read_bytes() == before


def test_quick_run_that_disagrees_says_so(tmp_path: Path) -> None:
    # Merge sort wins little on four numbers.
    assert run("dissect", options={"length": 4}, results=tmp_path).verdict.status == "falls_short"
    assert run("dissect", quick=True, results=tmp_path).disagrees == ("comparisons",)


def test_refusal_is_skipped_with_its_reason(tmp_path: Path) -> None:
    result = run("dissect", options={"refuse": True}, results=tmp_path)
    assert (result.verdict.status, result.verdict.reason) == ("skipped", "told to refuse")
    assert result.path is not None
    assert recheck(result.path, Sorting.metrics).verdict.status == "skipped"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw["verdict"].update(status="falls_short"), "does not follow"),
        (lambda raw: raw["samples"]["metrics"]["comparisons"]["method"].reverse(), "edited"),
        (
            lambda raw: raw["samples"]["metrics"]["comparisons"].update(method=[9e9] * 9),
            "does not follow",
        ),
        (lambda raw: raw["metrics"][0].update(threshold=0.9), "edited"),
        (lambda raw: raw.update(commit="0" * 40), "edited"),
        (lambda raw: raw.update(aa=None), "does not follow"),
        (lambda raw: raw.update(surprise=1), "no such key"),
        (lambda raw: raw["samples"].update(metrics={}), "nothing of comparisons"),
    ],
)
def test_edited_file_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    path = run("dissect", results=tmp_path).path
    assert path is not None
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match=message):
        recheck(path, Sorting.metrics)


def test_file_of_changed_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "commit_of_code", lambda: ("abcdef" * 6, True))
    path = run("dissect", results=tmp_path).path
    assert path is not None
    with pytest.raises(StoreError, match="changes beside commit abcdefabcdef; commit them"):
        recheck(path, Sorting.metrics)


def test_samples_on_file_are_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run("dissect", results=tmp_path).path
    assert path is not None
    before = recheck(path, Sorting.metrics)
    monkeypatch.setattr(record_module, "CLAIMS", TABLE)
    monkeypatch.setattr(Sorting, "metrics", (Sorting.metrics[0].model_copy(update=HARDER),))
    with pytest.raises(StoreError, match="not those of the claim"):
        recheck(path)
    again = judge_again(path)
    assert (before.verdict.status, again.verdict.status) == ("works", "falls_short")
    assert recheck(path).verdict == again.verdict
    assert again.samples == before.samples
    monkeypatch.setattr(Sorting, "metrics", Timing.metrics)
    with pytest.raises(StoreError, match=r"nothing of seconds; .*run the claim again"):
        judge_again(path)
    raw = json.loads(path.read_text())
    raw["samples"]["metrics"]["comparisons"]["method"][0] += 1
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="was edited"):
        judge_again(path)


def test_file_of_other_thresholds_is_refused(tmp_path: Path) -> None:
    path = run("dissect", results=tmp_path).path
    assert path is not None
    with pytest.raises(StoreError, match="not those of the claim"):
        recheck(path, Timing.metrics)


@pytest.mark.parametrize("text", ["", "[1]", "{}", "not json", "\xff"])
def test_file_that_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match="run the claim again"):
        read(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_busy_machine_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*, wait_s: float) -> None:
        raise NoisyMachineError("busy")

    monkeypatch.setattr(run_module, "check_quiet", busy)
    with pytest.raises(NoisyMachineError):
        run("timing", results=tmp_path)
    assert not list(tmp_path.glob("*.json"))
    assert run("timing", quick=True, results=tmp_path).verdict.status == "works"


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownPartError, match="did you mean 'dissect'"):
        run("disect", results=tmp_path)
    with pytest.raises(UnknownKeyError, match="did you mean 'length'"):
        run("dissect", options={"lenght": 3}, results=tmp_path)


def test_catalogue_has_every_system_once() -> None:
    rows = catalogue()
    assert [row.id for row in rows] == list(range(146))
    assert len({row.name for row in rows}) == 146
    assert {row.status for row in rows} == {"planned"}
    assert {row.id: row.claim for row in rows if row.claim} == {
        4: "c4",
        6: "t3",
        7: "universal_checkpoint",
        9: "frontier",
        10: "parallel_algorithms",
        0: "masha",
        8: "sequential_gc",
        12: "holmes",
        13: "co2",
        16: "lifl",
        17: "energon_ai",
        19: "tempi",
        20: "bytescale",
        21: "oneflow",
        15: "guide",
        22: "megatron",
        23: "ddm",
        24: "topo3",
        26: "prosper",
        25: "flag",
        27: "ppp",
        28: "fedcompass",
        29: "redco",
        32: "grank",
        35: "fsmoe",
        36: "datastates",
        37: "gnnpipe",
        39: "infinite_llm",
        40: "distserve",
        41: "gemm_forest",
        47: "fasterpam",
        84: "curator",
        75: "hstu",
        78: "scalingnote",
        44: "squash",
        57: "graphvite",
        74: "datastore",
        59: "fastrp",
        38: "communities",
        101: "lcm",
        80: "gather",
        48: "dissect",
        51: "deep_optimizer_states",
        53: "single_path",
        62: "inmemory_ft",
        92: "moe_folding",
        65: "hecate",
        96: "flexsp",
        97: "medusa",
        63: "ladder",
        64: "zero_infinity",
        73: "r2d2",
        76: "pruning",
        77: "learning_curves",
        79: "fuyou",
        81: "megascale",
        82: "qqt",
        45: "variance_corrected",
        14: "dadao",
        83: "projektor",
        85: "longctx",
        86: "fastswitch",
        87: "itemsets",
        89: "logs",
        91: "tokenring",
        93: "skippipe",
        95: "flover",
        99: "ssdtrain",
        100: "lca_bench",
        107: "dinfer",
        102: "bytecheckpoint",
        103: "galvatron",
        108: "parscale",
        109: "tilus",
        113: "vocab_parallel",
        116: "flash_rnn",
        117: "marlin",
        119: "duo_llm",
        120: "sequence_parallel",
        122: "tune_serving",
        66: "peft",
        124: "smash",
        129: "ppd",
        104: "falcon",
        130: "bipolar_int",
        132: "ksort",
        133: "dovetail",
        134: "malloc_game",
        139: "gpipe",
        141: "superpipeline",
        143: "hogwild",
        142: "easyspec",
    }
    assert all(row.parts and 1990 < row.year < 2030 for row in rows)


def test_listing_earns_its_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = catalogue()
    ours = [
        row.model_copy(update={"metrics": Sorting.metrics}) if row.claim == "dissect" else row
        for row in shipped
    ]
    monkeypatch.setattr(standing_module, "catalogue", lambda: tuple(ours))
    empty = listing(tmp_path / "empty")
    assert counts(empty) == {("planned", None): 146}
    run("dissect", results=tmp_path)
    rows = listing(tmp_path)
    assert counts(rows) == {("works", "same_regime"): 1, ("planned", None): 145}
    row = rows[48]
    assert row.threshold == {"comparisons": "<= 0.5 x"}
    assert row.measured["comparisons"] == pytest.approx(0.3, abs=0.1)
    assert {"id", "name", "room", "status", "evidence", "threshold", "measured"} <= set(
        row.model_dump()
    )


def test_a_result_is_stale_once_its_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in catalogue() if row.claim == "dissect")
    row = row.model_copy(update={"metrics": Sorting.metrics})
    monkeypatch.setattr(standing_module, "catalogue", lambda: (row,))
    assert to_run_again(tmp_path) == ["dissect"]
    run("dissect", results=tmp_path)
    monkeypatch.setattr(standing_module, "CLAIMS", TABLE)
    assert not standing(row, tmp_path).stale
    assert to_run_again(tmp_path) == []
    monkeypatch.setattr(standing_module, "code_digest", lambda place: "of other code")
    assert standing(row, tmp_path).stale
    assert listing(tmp_path)[0].stale
    assert to_run_again(tmp_path) == ["dissect"]


def test_what_a_claim_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "shoal.claims.experiments.fasterpam:FasterPam"
    files = [file.name for file in code_files(place)]
    assert {"fasterpam.py", "search.py", "kernel.cpp"} <= set(files)
    assert not {"frame.py", "errors.py"} & set(files)
    package = tmp_path / "shoal"
    experiments = package / "claims" / "experiments"
    experiments.mkdir(parents=True)
    (experiments / "one.py").write_text("from shoal.room.a import (\n    x,\n)\n")
    (package / "room").mkdir()
    used, beside = package / "room" / "a.py", package / "room" / "b.py"
    used.write_text("from shoal.room import b\nfrom shoal.other import c\nx = b.y\n")
    beside.write_text("y = 1\n")
    (package / "other.py").write_text("c = 1\n")
    monkeypatch.setattr(dependencies, "_ROOT", package)
    monkeypatch.setattr(dependencies, "_EXPERIMENTS", experiments)

    def digest() -> str:
        dependencies.code_digest.cache_clear()
        dependencies._imports.cache_clear()
        dependencies._without_docstrings.cache_clear()
        return dependencies.code_digest("shoal.claims.experiments.one:One")

    before = digest()
    beside.write_text("'''What.\n\nIn words.\n'''\n# why\n\ny = 1\n")
    (package / "other.py").write_text("c = 2\n")
    assert digest() == before
    beside.write_text("y = 2\n")
    assert digest() != before
    dependencies.code_digest.cache_clear()
    dependencies._imports.cache_clear()
    dependencies._without_docstrings.cache_clear()


def test_remember_makes_a_thing_once(tmp_path: Path) -> None:
    context = ExperimentContext(work_dir=tmp_path)
    made = [context.remember("x", lambda: np.zeros(1)) for _ in range(2)]
    assert made[0] is made[1]


def test_what_is_kept_is_made_once_for_all_runs(tmp_path: Path) -> None:
    made: list[int] = []
    path = tmp_path / "new" / "kept.json"

    def make() -> dict[str, list[float]]:
        made.append(1)
        return {"losses": [0.1 + 0.2, 1e-300]}

    def kept(key: str = "a", given: int = 1, code: Sequence[str] = ("core",)) -> CachedResult:
        return ExperimentContext(work_dir=tmp_path, kept=path).keep(
            key, make, given=given, code=code
        )

    result = kept()
    assert result == kept()
    assert result.value == make(), "the same bits"
    assert result.details() == {"at": result.at, "seconds": result.seconds}
    assert len(made) == 2
    kept("b")
    assert result == kept()
    assert len(made) == 3, "another key leaves the first"
    kept(given=2)
    kept(given=2, code=["core", "claims/protocols.py"])
    assert len(made) == 5, "other code, or given something else"
    ExperimentContext(work_dir=tmp_path).keep("a", make, given=2, code=["core"])
    assert len(made) == 6, "nothing is kept where nobody says where"
    path.write_text("{")
    with pytest.raises(StoreError, match=r"kept.json: .*delete it"):
        kept()
    with pytest.raises(ConfigError, match=r"code = 'nothing'"):
        kept(code=["nothing"])
