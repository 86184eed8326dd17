"""What the bench of decoding kept is cited where it holds, and nowhere else."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.core.files import shoal_home
from shoal.core.parts import Choice
from shoal.ir import ServeJob
from shoal.machine.described import load
from shoal.plan.serving.decode_measured import (
    MeasuredRow,
    MeasuredTable,
    decoding_notes,
    find,
    keep,
    sentence,
)

HERE = {"cpu": "A", "isa": "avx2", "cores": "2", "kernel": "6.1"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return tmp_path


def row(method, batch, speedup, date="2026-11-23"):
    return MeasuredRow(
        method=method, batch=batch, speedup=speedup, low=speedup - 0.05, high=speedup + 0.05,
        tokens_per_step=1.5, date=date,
    )  # fmt: skip


def table(*rows, target="t", machine=HERE, precision="bf16", models=("shoal-4m",)):
    return MeasuredTable(
        target=target, models=models, machine=machine, precision=precision, rows=rows
    )


def test_new_rows_replace_those_of_their_method_and_batch_alone():
    keep(table(row("medusa", 1, 1.2, "2026-11-01"), row("ngram", 1, 0.99, "2026-11-01")))
    keep(table(row("medusa", 4, 1.1), row("medusa", 1, 1.6)))
    keep(table(row("medusa", 1, 9.0), target="another"))
    keep(table(row("medusa", 1, 8.0), machine=HERE | {"cores": "64"}))
    position = find({**HERE, "kernel": "6.2"}, target="t")
    assert [(one.batch, one.speedup) for one in position.of("medusa")] == [(1, 1.6), (4, 1.1)]
    assert [one.date for one in position.of("ngram")] == ["2026-11-01"]
    assert position.paying() == ("medusa",)
    assert find({"cpu": "A"}, target="t") is None
    assert find({}, target="t") is None
    assert find(HERE, target="other") is None
    assert find(HERE | {"cores": "64"}, target="t").of("medusa")[0].speedup == 8.0


def test_a_sentence_names_every_batch():
    result = sentence("medusa", [row("medusa", 1, 1.642), row("medusa", 16, 0.998)])
    assert result == (
        "medusa over plain decoding, measured on this machine: 1.64x with 1 request, "
        "1.00x with 16 requests (2026-11-23)"
    )


def test_plans_cite_it():
    machine = load("laptop").model_copy(update={"fingerprint": HERE})
    plain = ServeJob(model="shoal-4m")
    guessing = plain.model_copy(update={"speculative": Choice(name="ngram")})
    assert decoding_notes(plain, machine) == ()
    (unknown,) = decoding_notes(guessing, machine)
    assert "shoal bench decode --model shoal-4m --methods ngram" in unknown
    keep(table(row("ngram", 1, 0.97), row("medusa", 1, 1.6)))
    (result,) = decoding_notes(guessing, machine)
    assert "0.97x with 1 request" in result
    (advice,) = decoding_notes(plain, machine)
    assert "speculative decoding would be faster: medusa" in advice
    assert decoding_notes(plain, load("H100")) == ()


@pytest.mark.parametrize("text", ["{", "{}", '[{"target": 3}]'])
def test_a_damaged_file_is_named(text):
    (shoal_home() / "decoding.json").write_text(text)
    with pytest.raises(ConfigError, match="decoding"):
        find(HERE, target="t")
