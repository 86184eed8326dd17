"""What a client gets of a stream that goes on at another replica."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.cluster.resume import DivergedError, Progress, resumable, split_events
from shoal.serve.cluster.router import prompt_of


def chunks(texts, *, chat=False, index=0, name="a", finish="stop"):
    """A stream with these pieces, the last of which ends it."""
    events = []
    if chat:
        events.append({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    for place, text in enumerate(texts):
        end = finish if place == len(texts) - 1 else None
        piece = {"delta": {"content": text}} if chat else {"text": text}
        events.append({**piece, "finish_reason": end})
    return [
        json.dumps({"id": name, "created": 1, "choices": [{"index": index, **event}]}).encode()
        for event in events
    ]


def text_of(events):
    parts, finish, roles = [], [], 0
    for event in map(json.loads, events):
        assert event["id"] == "a"
        (choice,) = event["choices"]
        delta = choice.get("delta", {})
        roles += "role" in delta
        parts.append(choice.get("text", delta.get("content", "")))
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return "".join(parts), finish, roles


def cut(text, places):
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(
    st.text(min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
)
def test_no_seam(text, first, others, broke, chat):
    progress = Progress()
    sent = []
    for event in chunks(cut(text, first), chat=chat)[:broke]:
        sent.append(progress.take(event))
    for number, places in enumerate(others):
        progress.again()
        events = chunks(cut(text, places), chat=chat, name=f"b{number}")
        stops = len(events) if number == len(others) - 1 else broke
        sent += [progress.take(event) for event in events[:stops]]
    got, finish, roles = text_of(event for event in sent if event is not None)
    assert got == text
    assert finish == ["stop"]
    assert roles == chat


def test_several_answers_and_the_usage():
    progress = Progress()
    a, b = chunks(["x", "y", "z"], index=0), chunks(["1", "2", "3"], index=1)
    sent = [progress.take(event) for event in (a[0], b[0], a[1], b[1], b[2])]
    progress.again()
    usage = json.dumps({"id": "b", "created": 2, "choices": [], "usage": {"total": 9}}).encode()
    sent += [progress.take(event) for event in (*a, *b, usage)]
    new = [json.loads(event) for event in sent[5:] if event is not None]
    assert [(c["index"], c["text"]) for e in new for c in e["choices"]] == [(0, "z")]
    assert new[-1]["usage"] == {"total": 9}
    assert new[-1]["id"] == "a"


@pytest.mark.parametrize("said", [["ax"], ["a"], ["abx", "y"]])
def test_something_else_is_seen(said):
    progress = Progress()
    for event in chunks(["ab", "c"])[:1] + chunks(["c", "d"])[:1]:
        progress.take(event)
    progress.again()
    with pytest.raises(DivergedError):
        for event in chunks(said):
            progress.take(event)


def test_what_is_resumable():
    assert resumable({"prompt": "a", "logprobs": None, "tools": []})
    assert not resumable({"logprobs": 0})
    assert not resumable({"logprobs": True})
    assert not resumable({"tools": [1]})
    assert not resumable({"return_token_ids": True})


@given(st.lists(st.integers(1, 40), max_size=20))
def test_events_in_pieces(sizes):
    stream = b"".join(b"data: %d\n\n" % number for number in range(30))
    held, result = bytearray(), []
    for size in [*sizes, len(stream)]:
        held += stream[:size]
        stream = stream[size:]
        result += split_events(held)
    assert result == [b"%d" % number for number in range(30)]
    assert not held


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "ab"}, "ab"),
        ({"prompt": [1, 2]}, [1, 2]),
        ({"prompt": ["ab", "c"]}, "ab"),
        ({"prompt": [[3], [4]]}, [3]),
        ({}, ""),
        ({"prompt": 3}, ""),
        ({"prompt": [1, True]}, ""),
        ({"prompt": [None]}, ""),
        ({"prompt": {}}, ""),
    ],
)
def test_prompts_of_requests(body, prompt):
    assert prompt_of(body) == (prompt, "")
    assert prompt_of({**body, "cache_salt": "x"}) == (prompt, "x")


def test_chats_begin_alike():
    first = {"role": "user", "content": "hello there"}
    a, _ = prompt_of({"messages": [first]})
    b, _ = prompt_of({"messages": [first, {"role": "assistant", "content": "hi"}]})
    assert b.startswith(a[:-1])
