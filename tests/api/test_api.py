"""The functions of the package: what they answer, and how they refuse."""

from __future__ import annotations

import inspect
import io
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import shoal
import shoal.api
from shoal.core.errors import ConfigError, MachineError, ModelError, ShoalError, UnknownPartError
from shoal.ir import ServePlan, TrainPlan
from shoal.plan.saved import read_plan


@pytest.fixture(scope="module")
def plans() -> shoal.Plans[TrainPlan]:
    return shoal.plan("Llama-3.1-8B", machine="8xH100", tokens="2B")


def test_plans_are_read_in_a_terminal_and_a_notebook(plans: shoal.Plans[TrainPlan]) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(plans)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "seq_len 4,096",
        "plans, best first",
        "devices",
        "MFU",
        "hours",
        "USD",
        "step time",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("1 ")]
    assert len(rows) == 2 and rows[0][1] == "8", "a row does not wrap"
    assert repr(plans).startswith(f"<{len(plans)} plans on 8xH100; best: dp")
    assert str(plans.best).startswith("<train plan on 8xH100: dp") and len(str(plans.best)) < 200
    assert "per rank" in repr(plans.best)
    explanation = plans.explain()
    assert str(explanation) == repr(explanation) and len(str(explanation)) < 200
    page = plans._repr_html_()
    assert page.count("<table") == 2 and "<svg" in page
    more = "\n".join(map(str, plans.tables(verbose=True)))
    assert "step time by cause" in more and "time of the job by cause" in more


def test_plans_are_a_sequence_with_a_best(plans: shoal.Plans[TrainPlan]) -> None:
    assert plans.best is plans[0] and list(plans)[:2] == list(plans[:2])
    assert plans.job.tokens == 2_000_000_000 and plans.machine.num_devices == 8
    taken = {name: why for name, _, why in plans.taken()}
    assert taken["tokens"].startswith("flag") and "default" in taken["global_batch"]
    assert {"precision", "optimizer.lr", "recompute", "engine"} <= set(taken)


def test_plans_are_a_data_frame(plans: shoal.Plans[TrainPlan]) -> None:
    pytest.importorskip("pandas")
    frame = plans.to_pandas()
    assert len(frame) == len(plans)
    assert (frame.step_s_low <= frame.step_s).all() and (frame.step_s <= frame.step_s_high).all()
    assert frame.tokens_per_s[0] == pytest.approx(plans.best.estimate.tokens_per_s)


def test_plans_are_written(plans: shoal.Plans[TrainPlan], tmp_path: Path) -> None:
    plans.save(tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plans.best
    chosen, files = plans.emit("torchtitan")
    assert not list(tmp_path.glob("launch*")) and "launch.sh" in files
    again, _ = plans.emit("torchtitan", tmp_path / "files")
    assert again == chosen == read_plan(tmp_path / "files" / "plan.yaml")
    assert (tmp_path / "files" / "launch.sh").read_text() == files["launch.sh"]
    with pytest.raises(UnknownPartError, match="torchtitan"):
        plans.emit("torchtitanic")
    assert any("operator" in getattr(b, "columns", ()) for b in plans.explain().blocks)


def test_a_serving_plan_has_its_competitors() -> None:
    plans = shoal.plan("Qwen3-0.6B", "1xH100", kind="serve", workload="chat", requests=12, rate=4)
    assert isinstance(plans.best, ServePlan)
    names = [plan.job.model_dump_json() for plan in plans]
    assert len(names) == len({*names}) > 1
    text = "\n".join(map(str, plans.tables()))
    assert "TTFT" in text and "TPOT" in text
    one = shoal.plan("Qwen3-0.6B", "1xH100", kind="serve", requests=12, compare=False)
    assert len(one) == 1


def test_any_kind_of_job_is_planned() -> None:
    plans = shoal.plan({"job": "cluster", **_cluster()}, "laptop")
    assert plans.best.job.job == "cluster"
    assert "predicted" in "\n".join(map(str, plans.tables()))


def _cluster() -> dict[str, object]:
    from shoal.ir import kind_named

    return dict(kind_named("cluster").example)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: shoal.plan("Qwen4-1T", "8xH100"), ModelError, "expected one of the"),
        (lambda: shoal.plan("shoal-4m", "8xH1000"), MachineError, "H100"),
        (lambda: shoal.plan("shoal-4m", "laptop", tokns="2M"), ConfigError, "tokens"),
        (lambda: shoal.plan("shoal-4m", "laptop", tokens="many"), ConfigError, "such as 300M"),
        (lambda: shoal.plan("shoal-4m", kind="trian"), UnknownPartError, "train"),
        (
            lambda: shoal.plan("shoal-4m", "laptop", kind="serve", planner="search"),
            ConfigError,
            "planner",
        ),
        (lambda: shoal.plan({"job": "serve", "model": "x"}, kind="train"), ConfigError, "serve"),
        (lambda: shoal.plan("nowhere.yaml"), ShoalError, "nowhere.yaml"),
        (lambda: shoal.plan("shoal-4m", "laptop", finetune="lorra"), ShoalError, "lora"),
        (lambda: shoal.explain("schedul"), UnknownPartError, "schedule"),
        (lambda: shoal.run(resume=True), ConfigError, "directory"),
        (lambda: shoal.train(resume=True, directory="/nowhere"), ConfigError, "no run to resume"),
    ],
)
def test_a_mistake_is_named(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_rooms_are_called_and_imported() -> None:
    """In a process of its own, where nothing is imported yet; torch never is."""
    text = """
import sys, shoal
import shoal.plan.table
assert shoal.plan.table.spell
print(shoal.plan("shoal-4m", "laptop", steps=3).best.job.steps)
from shoal import plan, train, serve
assert callable(plan) and callable(train) and callable(serve)
assert "plan" in dir(shoal) and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"


@pytest.mark.slow
@pytest.mark.multi
def test_train_resume_serve(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import json
    import urllib.request

    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number} of a text" for number in range(2000)))
    events: list[str] = []
    report = shoal.train(
        "shoal-0.3m",
        machine="laptop",
        steps=4,
        seq_len=64,
        global_batch=4,
        threads=1,
        data=str(text),
        directory=run,
        watch=lambda event: events.append(event["kind"]),
    )
    assert report.measured["step_s"] > 0 and "step_s" in report.errors
    assert events.count("step") == 4
    with pytest.raises(ConfigError):
        shoal.train("shoal-0.3m", machine="laptop", steps=4, data=str(text), directory=run)
    more = shoal.train(machine="laptop", directory=run, resume=True, steps=6)
    assert more.plan.job.steps == 6
    with (
        shoal.serve(run / "export", threads=1) as server,
        urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer,
    ):
        assert json.load(answer)["data"]


@pytest.mark.parametrize("name", ["plan", "train", "serve"])
def test_help_of_a_room_begins_with_its_function(name: str) -> None:
    room, function = getattr(shoal, name), getattr(shoal.api, name)
    assert inspect.signature(room) == inspect.signature(function)
    page = pydoc.render_doc(room, renderer=pydoc.plaintext)
    first = page[page.index("NAME") : page.index("Args:")]
    assert f"shoal.{name}(" in first and "'str" not in first
    assert inspect.getdoc(function).splitlines()[0] in first


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"job": "Qwen3-14B", "tokens": "20Q"}, r"^tokens = '20Q': expected a number"),
        ({"job": ""}, r"^model = '': is empty"),
    ],
)
def test_errors_name_the_argument(values: dict[str, str], said: str) -> None:
    with pytest.raises(ShoalError, match=said):
        shoal.plan(machine="16xH100", **values)


def test_files_of_an_engine_are_of_plans_that_are_priced_as_it_runs_them():
    plans = shoal.plan("Qwen3-14B", machine="16xH100", tokens="20B")
    plan, files = plans.emit("torchtitan")
    searched = shoal.plan("Qwen3-14B", machine="16xH100", tokens="20B", engine="torchtitan").best
    assert plan.job.engine == "torchtitan"
    assert plan.estimate == searched.estimate != plans.best.estimate
    assert f"{searched.estimate.step_s.value:.3f} s a step" in files["shoal_plan.py"]
    stated = shoal.plan("Qwen3-14B", machine="16xH100", tokens="20B", engine="shoal")
    assert stated.emit("torchtitan")[0].job.engine == "shoal"


def test_the_file_of_a_shape_is_a_model(tmp_path):
    shape = tmp_path / "mine.yaml"
    shape.write_text(
        "name: mine\nnum_layers: 32\nhidden: 4096\nnum_heads: 32\nnum_kv_heads: 8\n"
        "head_dim: 128\nffn_hidden: 14336\nvocab_size: 128256\n"
    )
    assert shoal.plan(str(shape), machine="8xH100").best.shape.name == "mine"
    assert shoal.plan(shape, machine="H100", kind="serve").best.shape.num_layers == 32


def test_a_misspelled_subject_is_named_and_not_a_missing_one():
    with pytest.raises(ConfigError, match=r"dta: not a setting .* did you mean 'data'"):
        shoal.plan(kind="cluster", dta="points.npy")
    with pytest.raises(ConfigError, match="data: missing"):
        shoal.plan(kind="cluster")
