"""Training on chats: the loss is on answers, whoever computes it, and the template is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from shoal.core.meter import read_events  # noqa: E402
from shoal.corpora import tokenizer as bpe  # noqa: E402
from shoal.corpora.chat.template import CHATML, load_template  # noqa: E402
from shoal.corpora.files import corpus_at  # noqa: E402
from shoal.corpora.order import batch, check_split  # noqa: E402
from shoal.corpora.tokens import TokenSet, prepare  # noqa: E402
from shoal.ir import TrainJob, TrainPlan  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.loss import IGNORE  # noqa: E402
from shoal.parallel.tensor.rows import ReplicaSequences  # noqa: E402
from shoal.train.batches import BatchSource  # noqa: E402
from shoal.train.build import weights_source  # noqa: E402
from shoal.train.run import execute  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

Make = Callable[..., TrainPlan]

# Its heads and its blocks can be split.
SMALL = {"model": "shoal-draft-1m", "steps": 3}

# What a model is asked in the words in which it answers.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def said(*words: str) -> dict[str, list[dict[str, str]]]:
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)
    ]
    return {"messages": turns}


def write(place: Path, rows: list[dict[str, Any]]) -> Path:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred conversations of one to three short turns."""
    rows = [
        said(
            *(
                f"{word} {n * 7 % 31}"
                for word in ("one", "two", "six", "ten", "odd", "end")[: 2 + 2 * (n % 3)]
            )
        )
        for n in range(200)
    ]
    return write(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


def rows_of(job: TrainJob, tokens: TokenSet) -> ReplicaSequences:
    """The first step's rows of the only replica."""
    engine: Any = SimpleNamespace(
        reads=(0, 1),
        device=torch.device("cpu"),
        config=SimpleNamespace(mask_token_id=None),
        prepare=lambda rows: rows,
    )
    source = BatchSource(job, tokens, engine)
    try:
        return source.read(0)
    finally:
        source.close()


def test_the_loss_is_that_of_the_answers_alone(chats: Path, tmp_path: Path) -> None:
    tokens = prepare(corpus_at(str(chats)), vocab_size=300, cache=tmp_path)
    tokenizer, split = tokens.tokenizer(), tokens.train
    windows = check_split(split, "best_fit", seq_len=100, global_batch=1)
    job = TrainJob(data=corpus_at(str(chats)), seq_len=100, global_batch=windows, steps=1)
    rows = rows_of(job, tokens)
    model = random("shoal-0.3m").double()
    assert rows.documents is not None and int(rows.documents.max()) > 1, "several in a window"
    loss = model.loss_sum(rows.inputs, rows.targets, documents_BT=rows.documents)
    (loss / rows.counted).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    # By hand: every conversation alone, and of its targets those behind the assistant's name.
    tokenizer.encode_special_tokens = False
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    stop, line, end = (tokenizer.token_to_id(s) for s in ("<|im_end|>", "Ċ", "<|endoftext|>"))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(split.num_documents):
        ids = split.document(number).tolist()
        targets = [IGNORE] * (len(ids) - 1)
        for at in range(len(ids)):
            if ids[at : at + len(opening)] != opening:
                continue
            place = at + len(opening)
            while ids[place] != stop:
                targets[place - 1] = ids[place]
                place += 1
            assert ids[place + 1] == line
            targets[place - 1 : place + 1] = [stop, line]
        targets[-1] = end
        logits = model(torch.tensor([ids[:-1]]))
        wanted = torch.tensor(targets)
        total = total + F.cross_entropy(logits[0], wanted, ignore_index=IGNORE, reduction="sum")
        count += int((wanted != IGNORE).sum())
    (total / count).backward()
    assert rows.counted == count == split.num_learned
    assert loss.item() == pytest.approx(total.item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_what_the_user_says_next_changes_nothing(tmp_path: Path) -> None:
    def first(question: str, answer: str, seq_len: int) -> tuple[np.ndarray, ReplicaSequences]:
        """Windows that end with a token that is a target only."""
        file = write(tmp_path / "a.jsonl", [said("a", answer, question, "e")] * 60)
        data = corpus_at(str(file))
        tokens = prepare(data, str(tokenizer), 300, tmp_path / "cache")
        job = TrainJob(data=data, packing="padded", seq_len=seq_len, global_batch=2, steps=1)
        given = batch(tokens.train, "padded", seq_len=seq_len, global_batch=2, seed=0, step=0)
        return given.tokens, rows_of(job, tokens)

    tokenizer = tmp_path / "tokenizer.json"
    bpe.train(["a"], 300, ["<|im_start|>", "<|im_end|>"]).save(str(tokenizer))
    # Bytes are tokens: each turn has a sign, its role, a line end, its text, a sign, a line end.
    question = 1 + 4 + 1 + 1 + 2 + 1 + 9 + 1 + 1 + 2 + 1 + 4 + 1
    one, other = first("b", "c", question), first("d", "c", question)
    assert (one[0] != other[0]).sum() == 2 and (one[0][:, -1] != other[0][:, -1]).all()
    assert torch.equal(one[1].inputs, other[1].inputs)
    assert torch.equal(one[1].targets, other[1].targets) and one[1].counted == 2 * 3
    answer = 1 + 4 + 1 + 1 + 2 + 1 + 9 + 1
    one, other = first("b", "c", answer), first("b", "d", answer)
    assert torch.equal(one[1].inputs, other[1].inputs)
    assert (one[1].targets != other[1].targets).sum() == 2


def steps(run: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(make_plan: Make, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    evaluation = {"every": 0, "final": True, "sample_tokens": 0}
    execute(make_plan(**SMALL, data=corpus_at(str(chats)), evaluation=evaluation), run)
    return run


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"dp": 2}},
        {"parallel": {"dp": 2}, "shard": "zero2"},
        {"parallel": {"tp": 2}},
        {"parallel": {"pp": 2, "vocab": "pp"}},
        {"parallel": {"cp": 2}},
        {"parallel": {"dp": 2}, "batching": {"name": "bytescale", "capacity_tokens": 32}},
    ],
    ids=str,
)
def test_every_split_learns_the_same(
    changes: dict[str, Any], make_plan: Make, chats: Path, alone: Path, tmp_path: Path
) -> None:
    execute(make_plan(**SMALL, data=corpus_at(str(chats)), **changes), tmp_path / "run")
    pairs = list(zip(steps(alone), steps(tmp_path / "run"), strict=True))
    assert len(pairs) == 3
    for one, other in pairs:
        assert one["targets"] == other["targets"] < 8 * 64 / 2
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.multi
def test_a_run_says_how_much_is_learned(alone: Path) -> None:
    events = list(read_events(alone / "events.jsonl"))
    assert 0 < events[0]["learned"] < events[0]["tokens"]
    report = json.loads((alone / "report.json").read_text())["measured"]
    assert report["targets"] == pytest.approx(np.mean([one["targets"] for one in steps(alone)]))
    assert 0 < report["bits_per_byte"] < 20
    # A model without a template has learned ChatML, and says so; it ends where a turn does.
    export = alone / "export"
    assert load_template(export).source == CHATML
    tokenizer = bpe.load(export)
    stops = json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.token_to_id(s) for s in ("<|endoftext|>", "<|im_end|>")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a chat template."""
    place = tmp_path_factory.mktemp("base") / "model"
    huggingface.write(place, random("shoal-1m"))
    words = ["one two six ten odd end 0 1 2 3"] * 9
    special = ["</s>", "<|user|>", "<|assistant|>"]
    bpe.train(words, 300, special).save(str(place / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE, "model_max_length": 77}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture(scope="module")
def tuned(
    make_plan: Make, base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A run that fine-tunes it."""
    run = tmp_path_factory.mktemp("tuned") / "run"
    plan = make_plan(data=corpus_at(str(chats)), steps=3, finetune={"name": "lora", "r": 4})
    job = plan.job.model_copy(update={"model": str(base)})
    assert weights_source(job) == f"weights: loaded from {base}"
    assert weights_source(plan.job).startswith("weights: random, of seed 0: shoal-1m names a shape")
    execute(plan.model_copy(update={"job": job}), run)
    return run


@pytest.mark.slow
@pytest.mark.multi
def test_fine_tuning_keeps_tokenizer_and_template(tuned: Path, base: Path) -> None:
    export = tuned / "export"
    assert (export / "tokenizer.json").read_text() == bpe.load(base).to_str(pretty=True)
    settings = json.loads((export / "tokenizer_config.json").read_text())
    assert settings == json.loads((base / "tokenizer_config.json").read_text())
    assert load_template(export).source == TEMPLATE
    end = bpe.load(base).token_to_id("</s>")
    assert end in huggingface.read_config(export).eos_ids
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(export)
    text = loaded.apply_chat_template(said("one 1")["messages"], tokenize=False)
    assert text == "<|user|>one 1</s>"


@pytest.mark.slow
@pytest.mark.multi
def test_the_export_is_served_with_its_template(tuned: Path) -> None:
    from openai import OpenAI

    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    export = tuned / "export"
    messages: Any = said("one 1", "two 1", "six 1")["messages"]
    tokenizer = bpe.load(export)
    tokenizer.encode_special_tokens = False
    prompt = "<|user|>one 1</s><|assistant|>two 1</s><|user|>six 1</s><|assistant|>"
    job = ServeJob(model=str(export), threads=1, kv_tokens=512)
    with running(job, ServerOptions(port=0)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        with client:
            answer = client.chat.completions.create(
                model=server.model, messages=messages, max_tokens=4, temperature=0
            )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
    assert answer.choices[0].message.role == "assistant"
