"""``shoal bench decode``: batches of prompts, loops left out, tables kept, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from own_home import own_home

torch = pytest.importorskip("torch")

from shoal.app.cli import app  # noqa: E402
from shoal.claims.bench import decode as bench_of  # noqa: E402
from shoal.claims.bench.decode import (  # noqa: E402
    PLAIN,
    Bench,
    DecodeRow,
    advice,
    batches,
    compared,
    lively,
)
from shoal.core.errors import ConfigError, ModelError  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.plan.trees.drafting import RowCosts  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

CONFIG = ModelConfig(
    name="tiny", vocab_size=160, hidden=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, ffn_hidden=48, max_position=128, initializer_range=0.3,
)  # fmt: skip
PROMPTS = [[number, 7, 9, number + 3, 7, 9] for number in range(5)]


@pytest.fixture
def bench(monkeypatch):
    costs = RowCosts(rows=(1, 64), seconds_of=(1.0, 1.1))
    monkeypatch.setattr("shoal.serve.decode.build.measure_costs", lambda *_: costs)
    return Bench(
        Path("tiny"),
        {PLAIN: None, "ngram": {"name": "ngram"}},
        precision="fp32",
        threads=1,
        max_running=4,
        kv_tokens=1024,
        loaded=random(CONFIG, 1).requires_grad_(False).eval(),
    )


def test_batches_are_whole():
    assert batches(PROMPTS, 2) == [PROMPTS[:2], PROMPTS[2:4]]
    assert batches(PROMPTS[:2], 3) == [[*PROMPTS[:2], PROMPTS[0]]]
    with pytest.raises(ConfigError, match="batch = 0"):
        batches(PROMPTS, 0)


def test_every_method_answers_the_same_batches_together(bench):
    assert lively(bench, PROMPTS, 12) == PROMPTS
    rows = compared(bench, PROMPTS, 12, rounds=2, batch=2, loops=3)
    assert [(row.method, row.batch, row.answers, row.loops) for row in rows] == [
        (PLAIN, 2, 4, 3),
        ("ngram", 2, 4, 3),
    ]
    plain, ngram = rows
    assert plain.speedup == plain.tokens_per_step == plain.agreement == ngram.agreement == 1.0
    assert plain.memory_bytes == 0 < ngram.memory_bytes
    assert ngram.tokens_per_step >= 1.0


def test_loops_are_left_out(bench, monkeypatch):
    said = bench.answer(PLAIN, PROMPTS[:4], 12).tokens
    looping = tuple(said[1])
    real = bench_of.distinct_runs
    monkeypatch.setattr(
        bench_of, "distinct_runs", lambda tokens: 0.1 if tuple(tokens) == looping else real(tokens)
    )
    assert lively(bench, PROMPTS, 12) == [PROMPTS[0], *PROMPTS[2:]]
    monkeypatch.setattr(bench_of, "distinct_runs", lambda _: 0.1)
    with pytest.raises(ConfigError, match="all 5 answers of the model repeat themselves"):
        lively(bench, PROMPTS, 12)


def row(method, batch, speedup, agreement=1.0):
    return DecodeRow(
        method,
        batch,
        1.0,
        speedup,
        speedup - 0.02,
        speedup + 0.02,
        1.0,
        1.0,
        0,
        agreement,
        1.0,
        1,
        0,
    )


def test_advice_is_for_every_size_of_batch_and_for_the_model_itself():
    result = advice(
        [row(PLAIN, 1, 1.0), row("medusa", 1, 1.6), row("diffusion", 1, 3.0, None),
         row(PLAIN, 16, 1.0), row("medusa", 16, 0.99)]
    )  # fmt: skip
    first, second = result.splitlines()
    assert first.startswith("with 1 request medusa is fastest: 1.60 times")
    assert second.startswith("with 16 requests no method is faster")
    assert advice([row(PLAIN, 4, 1.0)]).startswith("no method is faster")


def test_rows_are_kept_and_drawn(tmp_path, monkeypatch):
    from shoal.claims.bench.decode_methods import drawn, keep_rows
    from shoal.machine.fingerprint import fingerprint
    from shoal.model.drafters.files import fingerprint as target_of
    from shoal.plan.serving.decode_measured import find

    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    place = tmp_path / "target"
    huggingface.write(place, random(CONFIG, 1), None)
    rows = [row(PLAIN, 1, 1.0), row("medusa", 1, 1.6), row("duo", 1, 2.0, None)]
    keep_rows(rows, place, str(place), "bf16")
    position = find(fingerprint(), target=target_of(place))
    assert position == find(fingerprint(), model=str(place))
    assert [(one.method, one.speedup) for one in position.rows] == [("medusa", 1.6)]
    for name, some in (("one", rows), ("two", [*rows, *(row(n, 8, 1.0) for n in
                       (PLAIN, "medusa", "duo"))])):  # fmt: skip
        assert "medusa" in drawn(some).render(), name


def run(*words):
    return CliRunner().invoke(app, ["bench", "decode", *words], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "0"), "--batch = '0'"),
        (("--batch", "1,x"), "--batch = '1,x'"),
        (("--also", "diffusion"), "NAME=DIRECTORY"),
        (("--also", "hogwild=/nowhere"), "one of diffusion"),
    ],
)
def test_bad_input_is_named(words, message):
    result = run(*words).exception
    assert isinstance(result, ConfigError)
    assert message in str(result)


def test_a_model_of_its_own_must_be_what_it_is_said_to_be(tmp_path):
    huggingface.write(tmp_path / "plain", random(CONFIG, 1), None)
    result = run("--also", f"ladder={tmp_path / 'plain'}").exception
    assert "is a plain model" in str(result)
    assert isinstance(run("--also", f"duo={tmp_path}").exception, ModelError)


def test_models_of_their_own_get_a_row(tmp_path, monkeypatch):
    """Their prompts are their own, and nobody says that they agree."""
    changed = CONFIG.model_copy(
        update={"architecture": type(CONFIG.architecture).model_validate({"residual": "ladder"})}
    )
    huggingface.write(tmp_path / "ladder", random(changed, 2), None)
    result = Bench(
        Path("tiny"),
        {PLAIN: None},
        precision="fp32",
        threads=1,
        max_running=4,
        kv_tokens=1024,
        loaded=random(CONFIG, 1).requires_grad_(False).eval(),
        own={"ladder": (tmp_path / "ladder", PROMPTS)},
    )
    _, ladder = compared(result, PROMPTS, 12, rounds=1, batch=2)
    assert (ladder.method, ladder.agreement, ladder.answers) == ("ladder", None, 4)
    assert ladder.tokens_per_step == 1.0
