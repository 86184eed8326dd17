"""The job datastore: windows that readers score, and runs from a plan to a report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from own_home import own_home
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.parts import Choice
from shoal.fields.retrieve.datastore import RetrievalOptions, build_datastore
from shoal.fields.retrieve.datastore.execute import SizePoint, curve_of, execute, front_of
from shoal.fields.retrieve.datastore.job import DatastoreJob
from shoal.fields.retrieve.datastore.passages import TextFile, text_files
from shoal.fields.retrieve.datastore.planning import divided, plan_datastore
from shoal.fields.retrieve.datastore.protocols import DatastoreError
from shoal.fields.retrieve.datastore.windows import PassageReader, eval_windows, prompt_of
from shoal.fields.running import RunProgress
from shoal.machine.described import load

torch = pytest.importorskip("torch")


def sentences(seed: int, count: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(f"word{n}" for n in draw.zipf(1.3, count) % 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files, of which some are held out by their names."""
    place = tmp_path_factory.mktemp("text")
    for at in range(40):
        (place / f"{at:02}.txt").write_text(sentences(at, 120))
    return place


@pytest.fixture(scope="module")
def reader(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fresh weights and a tokenizer of the text."""
    from shoal.corpora import tokenizer
    from shoal.model import huggingface
    from shoal.train import zoo

    place = tmp_path_factory.mktemp("readers")
    made = tokenizer.train((path.read_text() for path in folder.iterdir()), 300)
    made.save(str(place / "tokenizer.json"))
    config = zoo.config("shoal-0.3m")
    huggingface.write(place / "model", zoo.random(config), place / "tokenizer.json")
    return place / "model"


def job_of(folder: Path, **fields: Any) -> DatastoreJob:
    given = {"data": str(folder), "passage_words": 40, "shares": (0.25, 0.5, 1.0), "seeds": 2}
    return DatastoreJob.model_validate({**given, "windows": 6, **fields})


def run(job: DatastoreJob, place: Path) -> Any:
    progress = RunProgress(place, None, lambda *_, **__: None, None)
    return execute(job, job.method or Choice(name="bm25"), progress)


def test_windows_overlap_by_their_stride_and_the_first_half_is_the_query(
    folder: Path, reader: Path
) -> None:
    tokens = PassageReader(reader).tokenizer
    files = text_files(str(folder))[:2]
    windows = eval_windows(files, tokens, window=64, stride=32, most=1000)
    text = files[0].path.read_text()
    assert np.array_equal(windows[0].tokens[32:], windows[1].tokens[:32])
    assert text.startswith(windows[0].query) and text.startswith(windows[0].text)
    assert len(eval_windows(files, tokens, window=64, stride=32, most=3)) == 3
    with pytest.raises(ConfigError, match="even"):
        eval_windows(files, tokens, window=63, stride=32, most=3)
    with pytest.raises(DatastoreError, match="none of 2 files has 8000 tokens"):
        eval_windows(files, tokens, window=8000, stride=32, most=3)


def test_only_the_second_half_is_scored_behind_passages_in_reverse_order(
    folder: Path, reader: Path
) -> None:
    from shoal.model import huggingface

    scorer = PassageReader(reader)
    (window,) = eval_windows(
        text_files(str(folder))[:1], scorer.tokenizer, window=64, stride=64, most=1
    )
    prompt = prompt_of(scorer.tokenizer, window, ["best", "second"], 1000)
    text = scorer.tokenizer.decode(prompt.tolist())
    assert text.startswith("second\n\nbest\n\n" + window.text[:20])
    model = huggingface.read(reader, torch.float32).eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.from_numpy(prompt)[None, :-1]).float()[0]
    every = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(prompt)[1:], reduction="none"
    )
    ours = scorer.losses([window], [["best", "second"]])
    assert ours[0] == pytest.approx(float(every[-32:].mean()), rel=1e-4)
    # The farthest are cut where the model reads no more; nothing of the window is.
    long = scorer.losses([window], [["best", "words " * 2000]])
    assert scorer.cut == 1 and np.isfinite(long).all()


@pytest.mark.slow
def test_a_run_measures_every_size_and_reads_with_every_reader(
    folder: Path, reader: Path, tmp_path: Path
) -> None:
    job = job_of(
        folder, readers=(str(reader),), window=64, stride=32, training_tokens=(1000,),
        filters=("gopher_repetition",), k=2, depth=50,
    )  # fmt: skip
    outcome = run(job, tmp_path)
    points = outcome.details["points"]
    assert {(one["filters"], one["share"], one["seed"]) for one in points} == {
        (filters, share, seed)
        for filters in ("all", "filtered")
        for share in (0.25, 0.5, 1.0)
        for seed in range(2 if share < 1 else 1)
    }
    tokens = [one["tokens"] for one in points if one["filters"] == "all"]
    assert tokens == sorted(tokens) and (tmp_path / "curve.svg").read_text().startswith("<svg")
    assert outcome.measured["perplexity"] == pytest.approx(math.exp(points[4]["loss"]))
    assert outcome.details["laws"] and outcome.details["front"][0]["flops"] > 6e6
    # Another run asks the datastore that is there, with the tokenizer that it was counted with.
    again = run(job.model_copy(update={"store": str(tmp_path / "store")}), tmp_path / "again")
    assert [one["loss"] for one in again.details["points"]] == [one["loss"] for one in points]
    other = tmp_path / "other"
    other.mkdir()
    for path in reader.iterdir():
        data = path.read_bytes()
        (other / path.name).write_bytes(data + b"\n" if path.name == "tokenizer.json" else data)
    wrong = job.model_copy(update={"store": str(tmp_path / "store"), "readers": (str(other),)})
    with pytest.raises(DatastoreError, match="another tokenizer"):
        run(wrong, tmp_path / "wrong")


def test_a_plan_tries_every_index_and_says_what_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    plans = plan_datastore(job_of(folder), load("laptop"))
    assert {plan.job.method.name for plan in plans if plan.job.method} == {"bm25", "dense"}
    report = shoal.run(plans[0], directory=tmp_path / "run")
    assert {"total_s", "build_s", "sweep_s", "query_s", "index_bytes", "passages"} <= set(
        report.measured
    )
    assert set(plans[0].predicted) <= set(report.measured)
    said = plans[0].predicted["passages"]
    assert said.low <= report.measured["passages"] <= said.high


def test_held_out_files_are_not_stored(folder: Path, tmp_path: Path) -> None:
    stored, heldout = divided(job_of(folder))
    assert heldout and not {one.path for one in stored} & {one.path for one in heldout}
    named, apart = divided(job_of(folder, heldout=str(folder / "03.txt")))
    assert [one.path.name for one in apart] == ["03.txt"] and len(named) == 39
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.txt").write_text("a b")
    with pytest.raises(DatastoreError, match="1 files to store and 0 held out"):
        divided(job_of(one))
    with pytest.raises(ConfigError, match="2 numbers for 0 readers"):
        divided(job_of(folder, training_tokens=(1, 2)))
    with pytest.raises(ShoalError, match="no such file"):
        divided(job_of(tmp_path / "gone"))


def test_the_front_has_only_what_nothing_cheaper_beats() -> None:
    points = [
        SizePoint(reader, "all", share, 0, tokens, loss)
        for reader, losses in {"small": (3.0, 2.0), "large": (2.5, 1.5), "huge": (2.4, 1.6)}.items()
        for (share, tokens), loss in zip(((0.5, 10), (1.0, 20)), losses, strict=True)
    ]
    sizes = {"small": 1, "large": 3, "huge": 9}
    readers: Any = {name: type("Reader", (), {"parameters": n}) for name, n in sizes.items()}
    job = job_of(Path("text"), readers=tuple(sizes), training_tokens=(100, 100, 100))
    front = front_of(job, points, readers)
    assert [(one["reader"], one["tokens"]) for one in front] == [("small", 20), ("large", 20)]
    assert [one["flops"] for one in front] == [600, 1800]
    assert len(curve_of(points)) == 6


def test_the_steps_of_a_job_are_checked_before_anything_is_read(folder: Path) -> None:
    job = job_of(folder, k=5, rerank="hashed_words")
    assert job.retrieval() == RetrievalOptions(k=5, rerank=Choice(name="hashed_words"))
    with pytest.raises(ConfigError, match="depth = 3: fewer"):
        divided(job_of(folder, k=5, depth=3))


def test_binary_files_are_left_out_with_a_pattern(tmp_path: Path) -> None:
    place = tmp_path / "text"
    place.mkdir()
    (place / "a.txt").write_text("some words")
    (place / "b.bin").write_bytes(b"\0\1")
    assert text_files(str(place), "*.txt") == [TextFile("a.txt", place / "a.txt")]
    with pytest.raises(ShoalError, match="binary"):
        build_datastore(tmp_path / "store", text_files(str(place)))
