"""Training drafters: what stands still, what goes on, what is refused, how guesses are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError, PlanError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.corpora.tokenizer import train as learn  # noqa: E402
from shoal.cost.score import Score  # noqa: E402
from shoal.ir import DrafterJob, DrafterReport, Machine  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.drafters.files import fingerprint, read, tokenizer_hash  # noqa: E402
from shoal.plan.drafting import plan_drafter  # noqa: E402
from shoal.train.drafters.calibrate import judged, table as judge  # noqa: E402
from shoal.train.drafters.execute import execute  # noqa: E402
from shoal.train.drafters.features import open_features, prepare_features  # noqa: E402
from shoal.train.drafters.protocols import Rows  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

VOCAB = 300

TINY = ModelConfig(
    name="tiny",
    vocab_size=VOCAB,
    hidden=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=48,
    max_position=128,
)

Make = Callable[..., DrafterJob]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tiny model with fresh weights and a tokenizer, in a directory."""
    folder = tmp_path_factory.mktemp("target")
    texts = [path.read_text() for path in sorted(corpus.glob("*.py"))[:4]]
    tokenizer = folder / "tokenizer.json"
    learn(texts, VOCAB).save(str(tokenizer))
    huggingface.write(folder / "model", random(TINY, seed=3), tokenizer)
    return folder / "model"


@pytest.fixture(scope="module")
def make(target: Path, corpus: Path) -> Make:
    """``make(drafter="medusa", ...)`` -> a job that takes a second."""

    def made(**changes: Any) -> DrafterJob:
        return DrafterJob.model_validate(
            {
                "model": str(target),
                "data": {"name": "text", "path": str(corpus), "pattern": "*.py"},
                "seq_len": 32,
                "batch": 4,
                "tokens": 8 * 128,
                "read_tokens": 16 * 32,
                "calibration_prompts": 4,
                "prompt_tokens": 8,
                "precision": "fp32",
                "threads": 1,
                "save_every": 3,
                **changes,
            }
        )

    return made


def run(job: DrafterJob, machine: Machine, directory: Path, **options: Any) -> DrafterReport:
    return execute(plan_drafter(job, machine), directory, **options)


def test_medusa_from_plan_to_drafter(
    make: Make, machine: Machine, target: Path, tmp_path: Path
) -> None:
    """Plan, run, report, score; the directory says whom the drafter is for."""
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    job = make(drafter={"name": "medusa", "heads": 3})
    report = run(job, machine, tmp_path / "run")
    # The target stands still, bit for bit.
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    stored = read(tmp_path / "run" / "drafter")
    config = stored.config
    assert (config.name, config.options) == ("medusa", {"heads": 3})
    assert config.target == fingerprint(target)
    assert config.tokenizer == tokenizer_hash(target)
    assert (config.vocab_size, config.hidden) == (VOCAB, 32)
    assert config.calibration == report.calibration
    assert [len(level) for level in report.calibration] == [16] * 3
    assert all(0 <= sum(level) <= 1 for level in report.calibration)
    assert sum(value.numel() for value in stored.state.values()) == report.plan.parameters
    assert {"step_s", "total_s", "memory_bytes"} <= set(report.errors)
    (kept,) = [found for found in Score().reports() if found == report]
    assert kept.plan.job == job
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert kinds == ["features", "start", *["step"] * 8, *["level"] * 3, "end"]


def test_medusa_begins_as_the_targets_head(make: Make, target: Path) -> None:
    model = huggingface.read(target)
    learner = table("drafter").build("medusa").begin(model, make())
    hidden = torch.randn(5, 32)
    logits = learner.net(hidden)
    assert logits.shape == (4, 5, VOCAB)
    for head in logits:
        torch.testing.assert_close(head, model.logits(hidden))


def test_medusa_loss_is_the_weighted_sum(make: Make, target: Path) -> None:
    """lambda_k = decay^k, head k judged by the token k + 1 places ahead."""
    model = huggingface.read(target)
    learner = table("drafter").build({"name": "medusa", "heads": 2}).begin(model, make())
    tokens = torch.randint(0, VOCAB, (2, 12))
    hidden = torch.randn(2, 12, 32)
    expected = sum(
        0.8**k
        * torch.nn.functional.cross_entropy(
            model.logits(hidden[:, : -k - 1]).flatten(0, 1), tokens[:, k + 1 :].flatten()
        )
        for k in (1, 2)
    )
    found = learner.loss(Rows(tokens, hidden), step=0, total=1)
    torch.testing.assert_close(found, expected)


def test_resume_equals_uninterrupted(make: Make, machine: Machine, tmp_path: Path) -> None:
    whole = run(make(), machine, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 4:
            raise Stop

    with pytest.raises(Stop):
        run(make(), machine, tmp_path / "parts", watch=stop)
    seen: list[dict[str, Any]] = []
    again = run(make(), machine, tmp_path / "parts", resume=True, watch=seen.append)
    assert [event["step"] for event in seen if event["kind"] == "start"] == [3]
    assert again.calibration == whole.calibration
    one, other = read(tmp_path / "whole" / "drafter"), read(tmp_path / "parts" / "drafter")
    assert one.config == other.config
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name], rtol=0, atol=0)


def test_medusa_two_writes_the_target_that_it_changed(
    make: Make, machine: Machine, target: Path, tmp_path: Path
) -> None:
    job = make(drafter={"name": "medusa", "heads": 2, "version": 2, "warmup": 0.25, "lr": 1e-2})
    run(job, machine, tmp_path / "run")
    changed = tmp_path / "run" / "target"
    assert fingerprint(changed) != fingerprint(target)
    assert read(tmp_path / "run" / "drafter").config.target == fingerprint(changed)
    old, new = huggingface.read(target), huggingface.read(changed)
    tokens = torch.randint(0, VOCAB, (1, 16))
    # It goes on saying nearly what it said.
    torch.testing.assert_close(new(tokens), old(tokens), rtol=0.5, atol=0.5)
    assert tokenizer_hash(changed) == tokenizer_hash(target)


def test_features_are_what_the_target_makes_of_the_text(
    make: Make, target: Path, tmp_path: Path
) -> None:
    model = huggingface.read(target).eval()
    said: list[tuple[int, int, str]] = []
    job = make()
    found = prepare_features(
        job,
        model,
        fingerprint="f",
        tokenizer="t",
        root=tmp_path,
        progress=lambda *s: said.append(s),
    )
    with torch.no_grad():
        for part, count in (("train", 16), ("judged", 4)):
            rows = found.rows(part, range(count), torch.float32)
            torch.testing.assert_close(rows.hidden, model.hidden(rows.tokens), rtol=0, atol=1e-5)
    # Behind its prompt, a judged sequence is what the target says greedily.
    best = model.logits(rows.hidden).argmax(-1)
    assert torch.equal(best[:, 7:-1], rows.tokens[:, 8:])
    # Nobody computes them twice, and other text is other features.
    said.clear()
    again = prepare_features(job, model, fingerprint="f", tokenizer="t", root=tmp_path)
    assert again.path == found.path
    assert not said
    other = prepare_features(make(text="own"), model, fingerprint="f", tokenizer="t", root=tmp_path)
    assert other.path != found.path
    # What was cut off is not read.
    (found.path / "train.hidden.bin").write_bytes(b"short")
    with pytest.raises(Exception, match="5 bytes, not the"):
        open_features(found.path)


def test_the_target_writes_where_there_is_no_data(make: Make, target: Path, tmp_path: Path) -> None:
    model = huggingface.read(target).eval()
    job = make(data=None, read_tokens=8 * 32, temperatures=(0.0, 1.0))
    found = prepare_features(job, model, fingerprint="f", tokenizer="t", root=tmp_path)
    rows = found.rows("train", range(8), torch.float32)
    assert (rows.tokens[:, 0] == 0).all()
    best = model.logits(rows.hidden).argmax(-1)
    greedy = (best[:, 7:-1] == rows.tokens[:, 8:]).all(1)
    assert greedy[0::2].all()
    assert not greedy[1::2].any()


def test_guesses_are_judged_by_the_right_tokens() -> None:
    """Level k at place t is judged by token t + 2 + k."""
    tokens = torch.arange(20).view(2, 10)
    assert judged(tokens, 4, 2).tolist() == [[6, 7, 8, 16, 17, 18], [7, 8, 9, 17, 18, 19]]
    logits = torch.zeros(2, 6, 32)
    logits[0, :, :] = -torch.arange(32.0)
    logits[0, 0, 6] = 1.0  # right at once, at one of six places
    logits[1, torch.arange(6), judged(tokens, 4, 2)[1]] = 1.0
    counts, places = judge(logits, tokens, 4)
    assert places == 6
    assert counts[1].tolist() == [6.0, *[0.0] * 15]
    # 7 is the eighth best of level 0, 8 the ninth; from 16 on they are not counted.
    assert counts[0].nonzero().flatten().tolist() == [0, 7, 8]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"drafter": {"name": "medusa", "heads": 0}}, ConfigError, "drafter.medusa.heads = 0"),
        ({"drafter": {"name": "medusa", "heads": 40}}, PlanError, "fewer than 23"),
        ({"text": "data", "data": None}, ConfigError, "there is no data"),
        ({"prompt_tokens": 32}, ConfigError, "prompt_tokens = 32"),
        ({"read_tokens": 100}, ConfigError, "read_tokens = 100"),
        ({"seq_len": 200, "read_tokens": 4000}, PlanError, "at most 128"),
        ({"model": "nowhere"}, ModelError, "nowhere"),
    ],
)
def test_refused(
    make: Make,
    machine: Machine,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        run(make(**changes), machine, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(make: Make, machine: Machine, tmp_path: Path) -> None:
    job = make(tokens=128)
    run(job, machine, tmp_path / "run")
    with pytest.raises(ConfigError, match="a run lies there already"):
        run(job, machine, tmp_path / "run")
    with pytest.raises(ConfigError, match="is another job"):
        run(make(tokens=256), machine, tmp_path / "run", resume=True)
