"""Chats: which rows are taken, what of them is learned, and how they fill sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice, table
from shoal.corpora import CORPORA, PACKINGS
from shoal.corpora.chat.corpus import ChatCorpus
from shoal.corpora.chat.template import CHATML, PLAIN, ChatTemplate, load_template
from shoal.corpora.chat.turns import marked
from shoal.corpora.files import from_path
from shoal.corpora.heldout import bits_per_byte, heldout_chunks
from shoal.corpora.order import batch, cut_documents
from shoal.corpora.tokenizer import train
from shoal.corpora.tokens import TokenSet, TokenSplit, open_tokens, prepare
from shoal.cost.shapes import find
from shoal.ir import TrainJob, TrainPlan
from shoal.ir.drafting import DrafterJob
from shoal.machine.described import load

# As Qwen 3 does it: of earlier answers the thoughts are dropped.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As DeepSeek R1 does it: a prompt opens a thought.
OPENS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
MARKS = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def said(*words: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]


def learned(source: str, *words: str) -> list[list[str]]:
    texts = marked(ChatTemplate(source), said(*words), "row")
    return [[one.text[begin:end] for begin, end in one.learned] for one in texts]


def test_what_a_model_has_to_write_is_learned() -> None:
    assert learned(CHATML, "a", "b", "c", "d") == [["b<|im_end|>\n", "d<|im_end|>\n"]]
    assert learned(PLAIN, "a", "b") == [[" b\n"]]
    assert learned(MARKS, "a", "b", "c", "d") == [["b</s>", "d</s>"]]
    # The user says what the assistant says, and a sign of the template.
    assert learned(CHATML, "b", "b", "<|im_start|>assistant\nb", "b") == [["b<|im_end|>\n"] * 2]
    # An answer that is written otherwise when it is the last is learned as it was the last.
    thought = "<think>\n\n</think>\n\n"
    assert learned(THINKS, "a", "b", "c", "d") == [
        [f"{thought}b<|im_end|>\n"],
        [f"{thought}d<|im_end|>\n"],
    ]
    assert learned(OPENS, "a", "b") == [["b"]]


def test_a_template_that_rewrites_the_past() -> None:
    counts = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="row: chat template renders the messages before message 2"):
        learned(counts, "a", "b")
    with pytest.raises(DataError, match=r"row: .*refuses them \(no user\)"):
        learned("{{ raise_exception('no user') }}", "a", "b")


def test_a_template_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.corpora.chat.template.MAX_LOOPS_S", 0.05)
    # No call is made in the inner loops, and nothing is written.
    loops = "{% set n = range(99999) %}" + "{% for a in n %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(DataError, match=r"row: .*stopped, since its loops ran longer than 0\.05 s"):
        learned(loops, "a", "b")


GOOD = {"messages": said("What is 1+1?", "2")}


def write(place: Path, *rows: Any) -> Path:
    place.write_bytes(
        b"".join(
            row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
        )
    )
    return place


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"mesages": []}, r"no messages, .*'mesages'; did you mean 'messages'\?; give \{"),
        ({"prompt": "a"}, r"no messages, and no prompt with completion, but 'prompt'"),
        ({"messages": None}, "messages is null; give"),
        ({"messages": "hello"}, "messages: text, not a list of messages; give"),
        ({"messages": []}, "messages: an empty conversation; give"),
        ({"messages": ["hello"]}, r"messages\[0\]: text, not an object with role and content"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            r"messages\[0\]: role = 'human': expected one of system, developer, user, assistant",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]: content is a number"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content is null; give text"),
        ({"messages": said("a", "")}, r"messages\[1\]: an empty answer"),
        ({"messages": said("a")}, "no message of the assistant, so there is no target"),
        ({"messages": said("a", "b")[1:]}, "the first message is from the assistant"),
        (
            {"messages": [*said("a", "b"), {"role": "tool", "content": "c"}]},
            r"messages\[2\]: function calls are not supported in training",
        ),
        ({**GOOD, "tools": [{"type": "function"}]}, "tools: function calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\]\.content\[0\]: image_url: only parts of type text",
        ),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": 1}, "completion is a number; give text"),
        (
            b'{"messages": [{"role": "user", "content": "\xff"}]}\n',
            "byte 43 of the line is not UTF",
        ),
        (b'{"messages": \n', "not JSON"),
    ],
)
def test_a_bad_row_is_named(row: Any, words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", GOOD, row, GOOD)
    with pytest.raises(DataError, match=f"chats.jsonl, line 2: {words}"):
        list(ChatCorpus(path=str(file)).documents())


def test_rows_of_parquet(tmp_path: Path) -> None:
    rows = [{"messages": said(f"say {n}", f"it is {n}"), "source": n} for n in range(40)]
    lines, table = write(tmp_path / "a.jsonl", *rows), tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    assert from_path(str(lines)).name == from_path(str(table)).name == "chat"
    texts = [d.text for d in ChatCorpus(path=str(table)).documents()]
    assert texts == [d.text for d in ChatCorpus(path=str(lines)).documents()]
    # A directory holds both; what is neither is passed over.
    (tmp_path / "README.md").write_text("about")
    assert len(list(ChatCorpus(path=str(tmp_path)).documents())) == 80

    whole = table.read_bytes()
    table.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.parquet: not a readable Parquet file"):
        list(ChatCorpus(path=str(table)).documents())
    rows[7]["messages"][1]["content"] = ""
    pq.write_table(pa.Table.from_pylist(rows), table)
    with pytest.raises(DataError, match=r"b\.parquet, row 7: messages\[1\]: an empty answer"):
        list(ChatCorpus(path=str(table)).documents())
    bad = pa.array([b"ok", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": bad}), table)
    with pytest.raises(DataError, match=r"b\.parquet, row 1: text that is not UTF-8"):
        list(ChatCorpus(path=str(table)).documents())
    pq.write_table(pa.table({"text": ["a"]}), table)
    assert from_path(str(table)).name == "parquet"
    with pytest.raises(DataError, match=r"b\.parquet: no column messages, prompt, completion"):
        list(ChatCorpus(path=str(table)).documents())


def test_prompts_and_completions(tmp_path: Path) -> None:
    dialogue = said("a", "b", "c", "d")
    rows = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": dialogue[:3], "completion": dialogue[3:]},
    ]
    plain, messages = ChatCorpus(path=str(write(tmp_path / "a.jsonl", *rows))).documents()
    assert (plain.text, plain.learned) == ("2+2=4", ((4, 5),))
    assert messages.learned is not None
    assert [messages.text[a:b] for a, b in messages.learned] == ["d<|im_end|>\n"]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A hundred conversations of one to three turns."""
    rows = [
        {"messages": said(*(f"{n} {turn} é" * (1 + n % 4) for turn in range(2 + 2 * (n % 3))))}
        for n in range(100)
    ]
    return write(tmp_path / "chats.jsonl", *rows)


def flags_of(split: TokenSplit, number: int) -> np.ndarray:
    begin, end = int(split.offsets[number]), int(split.offsets[number + 1])
    flags = np.empty(end - begin, dtype=np.int64)
    assert split.learned is not None
    split.learned.read(begin, flags)
    return flags


def test_tokens_are_marked_where_answers_are(chats: Path, tmp_path: Path) -> None:
    tokens = prepare(
        from_path(str(chats)), vocab_size=300, cache=tmp_path / "cache", shard_bytes=500
    )
    tokenizer = tokens.tokenizer()
    assert tokens.end_of_turn == tokenizer.token_to_id("<|im_end|>")
    documents = list(ChatCorpus(path=str(chats)).documents("train"))
    total = 0
    for number, document in enumerate(documents):
        ids, flags = tokens.train.document(number), flags_of(tokens.train, number)
        assert document.learned is not None
        answers = "".join(document.text[a:b] for a, b in document.learned)
        assert tokenizer.decode(ids[flags == 1], skip_special_tokens=False) == (
            f"{answers}<|endoftext|>"
        )
        total += int(flags.sum())
    assert tokens.train.num_learned == total < len(tokens.train)
    # All that is learned of what is held out is scored, once, and in bits a byte of answers.
    chunks = list(heldout_chunks(tokens.heldout, context=16, batch_tokens=64))
    scored = sum(int(one.scored.sum()) for one in chunks)
    assert scored == tokens.heldout.num_learned
    assert tokens.heldout.text_bytes == sum(map(len, tokens.heldout_texts()))
    whole = bits_per_byte(np.log(2), scored, tokens.heldout)
    assert whole == pytest.approx(1 / tokens.heldout.text_bytes)
    assert prepare(from_path(str(chats)), vocab_size=300, cache=tmp_path / "cache", shard_bytes=500)
    assert open_tokens(tokens.path).train.num_learned == total


def test_an_answer_that_ends_itself_needs_no_other_end(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    train(["a b c"] * 9, 270, ["</s>"]).save(str(model / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": MARKS}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"messages": said("a", "b", "c", "d")}] * 60
    data = from_path(str(write(tmp_path / "a.jsonl", *rows)))
    tokens = prepare(data, str(model), 300, tmp_path / "cache")
    ids, flags = tokens.train.document(0), flags_of(tokens.train, 0)
    tokenizer = tokens.tokenizer()
    spelled = [(tokenizer.id_to_token(i), f) for i, f in zip(ids, flags, strict=True) if f]
    assert spelled == [("b", 1), ("</s>", 1), ("d", 1), ("</s>", 1)]
    assert tokens.end_of_turn == tokens.end_of_text == ids[-1]
    # Another template is another set of tokens.
    (model / "chat_template.jinja").write_text(CHATML)
    other = prepare(data, str(model), 300, tmp_path / "cache")
    assert other.fingerprint != tokens.fingerprint and len(other.train) > len(tokens.train)
    assert load_template(model).stops == ("<|im_end|>",)


@pytest.mark.parametrize("packing", list(PACKINGS))
def test_marks_are_packed_as_tokens(packing: str, chats: Path, tmp_path: Path) -> None:
    tokens = prepare(from_path(str(chats)), vocab_size=300, cache=tmp_path / "cache")
    split = tokens.train
    ends = {}
    for number in range(split.num_documents):
        ends[split.document(number).tobytes()] = flags_of(split, number)
    whole = 0
    for step in range(3):
        rows = batch(split, packing, seq_len=90, global_batch=8, seed=1, step=step)
        assert rows.learned is not None and rows.learned.shape == rows.tokens.shape
        for ids, flags in zip(rows.tokens, rows.learned, strict=True):
            for begin in np.flatnonzero(np.append(True, ids[:-1] == tokens.end_of_text)):
                stop = begin + int(np.argmax(ids[begin:] == tokens.end_of_text)) + 1
                if (expected := ends.get(ids[begin:stop].tobytes())) is not None:
                    assert (flags[begin:stop] == expected).all()
                    whole += 1
    assert whole > 10


def test_best_fit_keeps_documents_whole(small: TokenSet) -> None:
    split, width = small.train, 61
    cut = PACKINGS.build("best_fit")
    windows = cut.num_windows(split, width - 1)
    tokens, ids = cut.fill(split, np.arange(windows), seq_len=width - 1, seed=0, epoch=0)
    seen: list[bytes] = []
    padding = 0
    for row, numbers in zip(tokens, ids, strict=True):
        assert (np.diff(numbers) >= 0).all()
        for number in range(numbers[-1] + 1):
            piece = row[numbers == number]
            if len(piece) > 1:
                seen.append(piece.tobytes())
            else:  # of which nothing can be a target
                assert piece.tolist() == [small.end_of_text]
                padding += 1
    every = [split.document(n)[:width] for n in range(split.num_documents)]
    assert sorted(seen) == sorted(one.tobytes() for one in every if len(one) > 1)
    long = sum(len(split.document(n)) > width for n in range(split.num_documents))
    assert cut_documents(split, Choice(name="best_fit"), seq_len=width - 1) == long > 0
    assert cut_documents(split, Choice(name="document"), seq_len=width - 1) == 0
    least = sum(map(len, every)) / width
    assert windows <= 1.1 * least + 1, "few more windows than the tokens fill"
    assert padding == tokens.size - sum(len(one) for one in every if len(one) > 1)


def test_what_cannot_learn_answers_alone_refuses_chats(chats: Path) -> None:
    data = from_path(str(chats)).model_dump()
    with pytest.raises(ConfigError, match=r"mixed\.sources\.a = chat .*trait learns_answers"):
        CORPORA.build({"name": "mixed", "sources": {"a": data}})
    with pytest.raises(ConfigError, match=r"data = chat with a drafter: .*learns_answers"):
        DrafterJob(model="m", data=data)
    job = TrainJob(model="Qwen3-0.6B", data=data)
    shape = find(job.model)
    plan = TrainPlan(job=job, machine=load("8xH100"), shape=shape)
    for name in ("megatron", "torchtitan", "deepspeed", "accelerate"):
        refused = table("emitter").build(name).refuses(plan)
        assert "data = chat: its loss is on every token; give engine shoal" in refused


def test_chats_are_packed_whole_unless_it_is_said(chats: Path) -> None:
    data = from_path(str(chats)).model_dump()
    assert str(TrainJob(data=data).packing) == "best_fit"
    assert str(TrainJob(data=data, packing="padded").packing) == "padded"
    assert str(TrainJob().packing) == "stream"
    assert TrainJob.model_validate(TrainJob(data=data).model_dump()) == TrainJob(data=data)
