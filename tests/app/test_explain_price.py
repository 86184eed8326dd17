"""``shoal explain price`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError
from shoal.cost.shapes import resolve
from shoal.cost.training.step import estimate
from shoal.ir import ServeJob, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.plan.serving.simulation import sharded_costs


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["price", *map(str, words)])


def tables(*words: object) -> dict[str, list[dict[str, Any]]]:
    done = shoal(*words, "-o", "json")
    assert done.exit_code == 0, done.output
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return result


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]


def test_the_chain_of_a_saved_plan_adds_up_to_its_step(tmp_path: Path) -> None:
    job = TrainJob(model="Llama-3-8B", seq_len=4096, global_batch=16, microbatch=2, shard="zero3")
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"dp": 8})})
    machine, shape = load("8xA100@IB200"), resolve("Llama-3-8B")
    cost = estimate(Work(shape=shape, job=job), machine)
    plan = TrainPlan(job=job, machine=machine, shape=shape, fits=True, estimate=cost)
    plan.save(tmp_path / "plan.yaml")
    rates, operators, step = tables(tmp_path / "plan.yaml").values()
    by = {row["number"]: row for row in rates}
    assert by["read hbm"]["value"] == "2,040 GB/s" and "data sheet" in by["read hbm"]["from"]
    assert by["link node"]["from"].startswith("the shorthand 8xA100@IB200")
    assert "five published rows" in by["gemm"]["from"]
    products = sum(
        milliseconds(row["forward"]) + milliseconds(row["backward"])
        for row in operators
        if "] x [" in row["size"]
    )
    terms = {row["cause"]: row["seconds"] for row in step}
    assert products == pytest.approx(milliseconds(terms["matmul"]), rel=0.01)
    assert products == pytest.approx(1e3 * cost.terms_s["matmul"], rel=0.01)


@pytest.mark.parametrize("words", [("-m", "8xH100"), ("-m", "1xH100", "--job", "serve")])
def test_the_default_length_is_one_that_the_model_has(words: tuple[str, ...]) -> None:
    blocks = "".join(tables("shoal-4m", *words))
    assert f" {resolve('shoal-4m').max_position} tokens" in blocks
    assert "longest sequence" in str(shoal("shoal-4m", "--seq-len", 4096, *words).exception)


def test_kernels_of_serving_are_those_of_the_step() -> None:
    blocks = tables(
        "Llama-3.1-8B", "-m", "H100", "--job", "serve", "--batch", 16, "--engine", "vllm"
    )
    titles = list(blocks)
    kernels, terms = blocks[titles[3]], blocks[titles[4]]
    assert "16 sequences with 4096 tokens each" in titles[3]
    decode = next(row for row in kernels if row["kernel"] == "decode")
    assert "batch=16 heads=32 kv_heads=8 before=4097" in decode["asked for"]
    job = ServeJob(model="Llama-3.1-8B", engine="vllm")
    whole = sharded_costs(job, load("H100"))(1, 1).terms([(4096, 1)] * 16)
    shown = {row["cause"]: milliseconds(row["seconds"]) for row in terms}
    assert shown["attention"] == pytest.approx(1e3 * whole.attention, rel=0.01)
    assert sum(shown.values()) == pytest.approx(1e3 * whole.total, rel=0.01)
    assert "measured on h100_sxm" in shoal("Llama-3.1-8B", "-m", "H100", "--job", "serve").stdout
    scaled = shoal("Llama-3.1-8B", "-m", "RTX-4090", "--job", "serve").stdout
    assert "the nearest device" in " ".join(scaled.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("Llama-3-9B", "-m", "8xH100"), "Llama-3-8B"),
        (("none.yaml", "-m", "8xH100"), "none.yaml"),
        (("Llama-3-8B", "-m", "8xH100", "--engine", "megatronn"), "engine"),
        (("Llama-3-8B", "-m", "H100", "--job", "serve", "--tp", 3), "divisor"),
    ],
)
def test_bad_input(words: tuple[object, ...], named: str) -> None:
    done = shoal(*words)
    assert isinstance(done.exception, ShoalError), done.output
    assert named in str(done.exception)
