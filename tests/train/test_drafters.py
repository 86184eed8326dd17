"""Training drafters: what stands still, what goes on, what is refused, how guesses are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError, NonFiniteError, PlanError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.corpora.tokenizer import train as learn  # noqa: E402
from shoal.cost.score import Score  # noqa: E402
from shoal.ir import DrafterJob, DrafterReport, Machine  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.drafters.files import fingerprint, read, tokenizer_hash  # noqa: E402
from shoal.plan.drafting import plan_drafter  # noqa: E402
from shoal.train.drafters.calibrate import judged, places_of, right  # noqa: E402
from shoal.train.drafters.execute import execute  # noqa: E402
from shoal.train.drafters.features import open_features, prepare_features  # noqa: E402
from shoal.train.drafters.protocols import TargetRows  # noqa: E402
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
    assert [list(level) for level in config.calibration] == report.details["calibration"]
    assert [len(level) for level in report.details["calibration"]] == [16] * 3
    assert all(0 <= sum(level) <= 1 for level in report.details["calibration"])
    assert (
        sum(value.numel() for value in stored.state.values())
        == report.plan.predicted["parameters"].value
    )
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
    loss = learner.loss(TargetRows(tokens, hidden), step=0, total=1)
    torch.testing.assert_close(loss, expected)


def test_resume_equals_uninterrupted(make: Make, machine: Machine, tmp_path: Path) -> None:
    whole = run(make(), machine, tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 4:
            raise StopError

    with pytest.raises(StopError):
        run(make(), machine, tmp_path / "parts", watch=stop)
    seen: list[dict[str, Any]] = []
    again = run(make(), machine, tmp_path / "parts", resume=True, watch=seen.append)
    assert [event["step"] for event in seen if event["kind"] == "start"] == [3]
    assert again.details == whole.details
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
    features = prepare_features(
        job,
        model,
        fingerprint="f",
        tokenizer="t",
        root=tmp_path,
        progress=lambda *s: said.append(s),
    )
    with torch.no_grad():
        for part, count in (("train", 16), ("judged", 4)):
            rows = features.rows(part, range(count), torch.float32)
            torch.testing.assert_close(rows.hidden, model.hidden(rows.tokens), rtol=0, atol=1e-5)
    # Behind its prompt, a judged sequence is what the target says greedily.
    best = model.logits(rows.hidden).argmax(-1)
    assert torch.equal(best[:, 7:-1], rows.tokens[:, 8:])
    # Nobody computes them twice, and other text is other features.
    said.clear()
    again = prepare_features(job, model, fingerprint="f", tokenizer="t", root=tmp_path)
    assert again.path == features.path
    assert not said
    other = prepare_features(make(text="own"), model, fingerprint="f", tokenizer="t", root=tmp_path)
    assert other.path != features.path
    # What was cut off is not read.
    (features.path / "train.hidden.bin").write_bytes(b"short")
    with pytest.raises(Exception, match="5 bytes, not the"):
        open_features(features.path)


def test_the_target_writes_where_there_is_no_data(make: Make, target: Path, tmp_path: Path) -> None:
    model = huggingface.read(target).eval()
    job = make(data=None, read_tokens=8 * 32, temperatures=(0.0, 1.0))
    features = prepare_features(job, model, fingerprint="f", tokenizer="t", root=tmp_path)
    rows = features.rows("train", range(8), torch.float32)
    assert (rows.tokens[:, 0] == 0).all()
    best = model.logits(rows.hidden).argmax(-1)
    greedy = (best[:, 7:-1] == rows.tokens[:, 8:]).all(1)
    assert greedy[0::2].all()
    assert not greedy[1::2].any()


def test_guesses_are_judged_by_the_right_tokens() -> None:
    """Level k at place t is judged by token t + 2 + k."""
    tokens = torch.arange(20).view(2, 10)
    assert places_of(10, 5, 2) == [4, 5, 6]
    truth = judged(tokens, [4, 5, 6], 2)
    assert truth.tolist() == [[6, 7, 8, 16, 17, 18], [7, 8, 9, 17, 18, 19]]
    logits = torch.zeros(2, 6, 32)
    logits[0, :, :] = -torch.arange(32.0)
    logits[0, 0, 6] = 1.0  # right at once, at one of six places
    logits[1, torch.arange(6), truth[1]] = 1.0
    counts = right(logits, truth)
    assert counts[1].tolist() == [6.0, *[0.0] * 15]
    # 7 is the eighth best of level 0, 8 the ninth; from 16 on they are not counted.
    assert counts[0].nonzero().flatten().tolist() == [0, 7, 8]
    assert places_of(256, 64, 4, most=3) == [63, 156, 250]


NETS = [
    {"name": "falcon", "k": 1, "forwards": 3},
    {"name": "falcon", "k": 2, "forwards": 2},
    {"name": "falcon", "k": 3, "forwards": 1, "lstm_layers": 1},
    {"name": "dovetail", "layers": 2, "depth": 3},
]


@pytest.mark.parametrize("options", NETS, ids=lambda options: f"{options['name']}")
def test_guesses_of_features_are_those_of_each_path_alone(
    make: Make, target: Path, options: dict[str, Any]
) -> None:
    """All places at once beside one path after the other, each from the beginning."""
    model = huggingface.read(target).double()
    learner = table("drafter").build(options).begin(model, make())
    net = learner.net.double()
    tokens = torch.randint(0, VOCAB, (2, 20))
    places, k = [5, 8, 9], net.k
    rounds = options.get("forwards", options.get("depth"))
    with torch.no_grad():
        hidden = model.hidden(tokens)
        result = learner.guesses(TargetRows(tokens, hidden), places).unflatten(1, (2, 3))
        for row in range(2):
            for number, place in enumerate(places):
                features, words = hidden[row : row + 1, : place + 1], tokens[row : row + 1]
                for turn in range(rounds):
                    count = features.shape[1]
                    x, _ = net.mixed(features, model.embed(words[:, 1 : count + 1]))
                    # Only blocks that lie behind the place see all of themselves.
                    mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu_(1)
                    for first in range(place - k + 1, count, k):
                        if first > place - k or turn == 0:
                            mask[first : first + k, first : first + k] = 0
                    if turn:
                        # Behind an accepted token, the block before is as it was read.
                        head = slice(place - k + 1, place + 1)
                        mask[head, head] = torch.full((k, k), float("-inf")).triu_(1).to(x.dtype)
                    out = net.seen(x, torch.arange(count), mask[None, None])
                    for level, feature in enumerate(out[0, -k:]):
                        logits = model.logits(feature.unsqueeze(0))[0]
                        torch.testing.assert_close(result[turn * k + level, row, number], logits)
                    features = torch.cat((features, out[:, -k:]), 1)


def test_no_glancing_is_the_plain_loss(make: Make, target: Path) -> None:
    """A share of 0 shows nothing and makes no first pass; the loss is its definition."""
    model = huggingface.read(target)
    plain = {"name": "falcon", "k": 2, "glance_from": 0.0, "glance_to": 0.0}
    learner = table("drafter").build(plain).begin(model, make())
    tokens = torch.randint(0, VOCAB, (3, 15))
    hidden = model.hidden(tokens).detach()
    calls: list[int] = []
    learner.net.register_forward_hook(lambda *_: calls.append(1))
    loss = learner.loss(TargetRows(tokens, hidden), step=0, total=10)
    assert len(calls) == 1
    made = learner.net(hidden[:, :12], model.embed(tokens[:, 1:13]))
    wanted, word = hidden[:, 2:14], tokens[:, 3:15]
    said = torch.log_softmax(model.logits(made), -1)
    true = torch.softmax(model.logits(wanted), -1)
    apart = (true * (true.log() - said)).sum(-1).mean()
    cross = -said.gather(-1, word.unsqueeze(-1)).mean()
    near = torch.nn.functional.smooth_l1_loss(made, wanted)
    torch.testing.assert_close(loss, near + 0.1 * (0.9 * apart + 0.1 * cross))
    # A share that reaches 0 at the end is the plain loss there.
    ending = table("drafter").build({**plain, "glance_from": 0.6}).begin(model, make())
    last = ending.loss(TargetRows(tokens, hidden), step=8, total=9)
    torch.testing.assert_close(last, learner.loss(TargetRows(tokens, hidden), step=8, total=9))


def test_glancing_shows_whole_blocks_and_leaves_them_out(make: Make, target: Path) -> None:
    model = huggingface.read(target)
    part = table("drafter").build({"name": "falcon", "k": 2, "glance_from": 0.5, "glance_to": 0.5})
    learner = part.begin(model, make())
    tokens = torch.randperm(VOCAB)[: 4 * 23].view(4, 23)  # no two are the same
    hidden = model.hidden(tokens).detach()
    seen: list[tuple[Any, ...]] = []
    learner.net.register_forward_pre_hook(lambda _, given: seen.append(given))
    learner.loss(TargetRows(tokens, hidden), step=0, total=10)
    (before, words), (after, later) = seen
    shown = (before != after).any(-1)
    assert torch.equal(shown, (words != later).any(-1))
    # Nothing is learned yet, so nearly all places are wrong, and half of them are shown.
    assert 0.4 <= shown.double().mean() <= 0.5
    assert torch.equal(shown[:, 0::2], shown[:, 1::2])
    ahead = hidden[:, 2:22]
    torch.testing.assert_close(after[shown], ahead[shown], rtol=0, atol=0)
    torch.testing.assert_close(later[shown], model.embed(tokens[:, 3:23])[shown], rtol=0, atol=0)


def test_prompt_tokens_learn_what_the_target_says_later(make: Make, target: Path) -> None:
    """The loss by its definition; nothing but the embeddings has a gradient."""
    model = huggingface.read(target)
    part = table("drafter").build({"name": "ppd", "prompts": 2, "ensemble": 2, "points": 50})
    learner = part.begin(model, make())
    tokens = torch.randint(0, VOCAB, (2, 12))
    rows = TargetRows(tokens, model.hidden(tokens).detach())
    value = learner.loss(rows, step=0, total=1)
    said = learner.guesses(rows, list(range(9))).unflatten(1, (2, 9))  # all places with a truth
    expected = torch.zeros(())
    for ahead in (1, 2):
        true = torch.softmax(model.logits(rows.hidden[:, ahead : ahead + 9]), -1)
        apart = true * (true.log() - torch.log_softmax(said[ahead - 1], -1))
        expected = expected + 0.8 ** (ahead - 1) * apart.sum(-1).mean()
    torch.testing.assert_close(value, expected)
    value.backward()
    assert [name for name, _ in learner.net.named_parameters()] == ["embeddings"]
    assert learner.prompts.embeddings.grad is not None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["falcon", "ppd", "dovetail"])
def test_other_kinds_from_plan_to_drafter(
    make: Make, machine: Machine, tmp_path: Path, name: str
) -> None:
    """In reduced precision, as on a real run: it learns, and its parameters are those planned."""
    job = make(drafter={"name": name}, precision="bf16", tokens=20 * 128)
    seen: list[float] = []
    report = run(
        job, machine, tmp_path, watch=lambda e: seen.append(e["loss"]) if e["kind"] == "step" else 0
    )
    stored = read(tmp_path / "drafter")
    assert stored.config.name == name
    assert (
        sum(value.numel() for value in stored.state.values())
        == report.plan.predicted["parameters"].value
    )
    assert {value.dtype for value in stored.state.values()} == {torch.bfloat16}
    assert len(report.details["calibration"]) == {"falcon": 4, "ppd": 3, "dovetail": 5}[name]
    assert sum(seen[-5:]) < sum(seen[:5])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"drafter": {"name": "medusa", "heads": 0}}, ConfigError, "drafter.medusa.heads = 0"),
        ({"drafter": {"name": "medusa", "heads": 40}}, PlanError, "fewer than 23"),
        ({"drafter": {"name": "falcon", "k": 0}}, ConfigError, "drafter.falcon.k = 0"),
        ({"drafter": {"name": "falcon", "k": 4, "forwards": 6}}, PlanError, "fewer than 23"),
        ({"drafter": {"name": "falcon", "k": 9, "forwards": 1}}, ConfigError, "at least k = 9"),
        ({"drafter": {"name": "ppd", "prompts": 0}}, ConfigError, "drafter.ppd.prompts = 0"),
        ({"drafter": {"name": "dovetail", "layers": 0}}, ConfigError, "layers = 0"),
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
    with pytest.raises(ConfigError, match="already contains a run"):
        run(job, machine, tmp_path / "run")
    with pytest.raises(ConfigError, match="a run of another job"):
        run(make(tokens=256), machine, tmp_path / "run", resume=True)


def test_a_loss_that_is_not_finite_ends_the_run(
    make: Make, machine: Machine, tmp_path: Path
) -> None:
    # The first update makes weights too large for a finite loss.
    with pytest.raises(NonFiniteError, match=r"step \d+: the loss is (nan|inf) and the norm"):
        run(make(drafter={"name": "medusa", "lr": 2e37}), machine, tmp_path / "run")
    assert not (tmp_path / "run" / "drafter").exists()
