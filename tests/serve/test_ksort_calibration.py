"""Channels of a served model's keys in an order by their sizes on text."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.model.ksort import SortedAttention  # noqa: E402
from shoal.serve.engine import build  # noqa: E402
from shoal.train import zoo  # noqa: E402

FORMAT = {"name": "bfp", "ksort": "pairs", "by": "calibration"}


def test_text_is_read_with_the_tokenizer_of_the_model(monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    seen = {}

    class Corpus:
        train = range(4096)

    def tokens_of(data, tokenizer, vocab):
        seen.update(data=data, tokenizer=tokenizer, vocab=vocab)
        return Corpus

    def calibration(text, *, samples, length, vocab_size):
        return torch.arange(samples * length).view(samples, length) % vocab_size

    monkeypatch.setattr("shoal.corpora.tokens.prepare", tokens_of)
    monkeypatch.setattr("shoal.train.quantize.calibration", calibration)
    job = ServeJob(model=str(tmp_path), kv_format=FORMAT, threads=1)
    model = build.prepare(job, zoo.random("shoal-0.3m"))
    assert isinstance(model.blocks[0].attention, SortedAttention)
    assert seen == {
        "data": "stdlib", "tokenizer": str(tmp_path / "tokenizer.json"), "vocab": 1024,
    }  # fmt: skip


def test_a_model_without_tokenizer_is_refused(tmp_path):
    job = ServeJob(model=str(tmp_path), kv_format=FORMAT, threads=1)
    with pytest.raises(ServeError, match=r"calibration.*tokenizer.*by: weight"):
        build.prepare(job, zoo.random("shoal-0.3m"))
