"""Answers of a given form and calls of functions, seen by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

pytest.importorskip("llguidance")

from shoal.serve.http.errors import ApiError
from shoal.serve.http.limits import HttpLimits
from shoal.serve.text.grammar_check import GrammarCheck
from shoal.serve.text.tools import ToolCallReader

pytestmark = pytest.mark.multi

CITY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def client(write_model):
    from openai import OpenAI

    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(model=str(write_model(1024)), threads=1)
    with (
        running(job, ServerOptions(port=0, name="tiny")) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client, **options):
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 120, "seed": 3, "messages": messages, **options}
    return client.chat.completions.create(model="tiny", **options)


@pytest.mark.slow
def test_json_of_a_schema(client):
    schema = CITY["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    for choice in ask(client, response_format=form, n=3).choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[ab]{2,5}"}, "[ab]{2,5}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_json": '{"type": "null"}'}, "null"),
    ],
)
def test_the_spellings_of_vllm(client, extra, pattern):
    answer = client.completions.create(
        model="tiny", prompt=["abc", "d"], max_tokens=20, seed=1, extra_body=extra
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text)


def test_a_call_that_is_required(client):
    (choice,) = ask(client, tools=[CITY, TIME], tool_choice="required", max_tokens=200).choices
    if choice.finish_reason != "length":
        assert choice.finish_reason == "tool_calls"
        assert {call.function.name for call in choice.message.tool_calls} <= {"weather", "time"}
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(client, tools=[CITY, TIME], tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "stop"  # as OpenAI's, where the request names the function
    assert choice.message.content is None
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    # What came of it goes back, in the words of the client's own answer.
    notes = [
        {"role": "user", "content": "hi"},
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12 C"},
    ]
    assert ask(client, messages=notes, tools=[CITY], max_tokens=3).usage.completion_tokens == 3


def test_a_call_as_it_streams(client):
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[CITY],
        tool_choice=named,
        max_tokens=120,
        seed=3,
    ) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (whole,) = ask(client, tools=[CITY], tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "stop"
    assert call.function.arguments == whole.message.tool_calls[0].function.arguments
    assert not choice.message.content


def test_calls_that_a_model_chose_to_make(openai_client):
    # The fake engine says its prompt again, and with it the call.
    said = 'Let me see. <tool_call>{"name": "time", "arguments": {"zone": "é"}}</tool_call>'
    # The plain template shows what the system says first, and stops at the next "User:".
    messages = [{"role": "system", "content": said}, {"role": "user", "content": "hi"}]
    options = {"model": "bytes", "messages": messages, "tools": [TIME], "max_tokens": 400}
    (choice,) = openai_client.chat.completions.create(**options).choices
    (call, *_) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("time", '{"zone": "é"}')
    assert "Let me see. " in choice.message.content
    assert '{"name": NAME' in choice.message.content  # is no call
    texts, made = [], {}
    for chunk in openai_client.chat.completions.create(stream=True, **options):
        delta = chunk.choices[0].delta
        texts.append(delta.content or "")
        # Arguments come in as many pieces as the engine had steps for them.
        for call in delta.tool_calls or []:
            pieces = made.setdefault(call.index, ["", ""])
            pieces[0] += call.function.name or ""
            pieces[1] += call.function.arguments or ""
    assert "".join(texts) == choice.message.content
    calls = [one.function for one in choice.message.tool_calls]
    assert list(made.values()) == [[call.name, call.arguments] for call in calls]
    # Where nothing may be called, the text is text.
    (choice,) = openai_client.chat.completions.create(**options, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert said in choice.message.content


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        ("no calls < here <tool", "no calls < here <tool", []),
        ('a<tool_call>{"name": "f"}</tool_call>', "a", ["f"]),
        (
            '<tool_call>\n{"name": "f"}\n</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            ["f", "g"],
        ),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>!', '<tool_call>{"name": 3}</tool_call>!', []),
        ('x<tool_call>{"name"', 'x<tool_call>{"name"', []),
        ('<tool_call>{"arguments": {}, "name": "f"}</tool_call>', "", ["f"]),
        ('<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\""}}</tool_call>', "", ["f"]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ('x<tool_call>{"name": "f", "arguments": {"a": [1, "', "x", ["f"]),
    ],
)
def test_reading_calls(size, text, words, names):
    reader = ToolCallReader()
    said, given = [], {}
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for place, piece in enumerate([*pieces, ""]):
        new, parts = reader.feed(piece, last=place == len(pieces))
        said.append(new)
        for part in parts:
            assert (part.call is not None) == (part.place not in given)
            given[part.place] = given.get(part.place, "") + part.arguments
    assert "".join(said) == (text if words is None else words)
    assert [call.name for call in reader.calls] == names
    assert given == dict(enumerate(call.arguments for call in reader.calls))


def test_arguments_come_before_the_call_ends():
    reader = ToolCallReader()
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": "lo', last=False)
    _, parts = reader.feed('ng", ', last=False)
    assert "".join(part.arguments for part in parts).startswith("ng")


def test_arguments_of_a_stream_add_up(openai_client):
    values = {"zone": "Europe/Oslo", "note": 'a "}" is no end'}
    call = json.dumps({"name": "time", "arguments": values})
    said = f"<tool_call>{call}</tool_call>"
    messages = [{"role": "system", "content": said}, {"role": "user", "content": "hi"}]
    options = {"model": "bytes", "messages": messages, "tools": [TIME]}
    deltas = [
        call
        for chunk in openai_client.chat.completions.create(**options, max_tokens=600, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    heads = [delta for delta in deltas if delta.function.name]
    assert [delta.index for delta in heads] == list(range(len(heads)))
    assert all(delta.id and delta.type == "function" for delta in heads)
    first = [delta for delta in deltas if delta.index == 0]
    assert json.loads("".join(delta.function.arguments for delta in first)) == values


def test_best_of(client):
    options = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 12, "seed": 4}
    every = client.completions.create(**options, n=5, logprobs=0).choices
    best = client.completions.create(**options, n=2, best_of=5).choices
    assert [choice.index for choice in best] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best)

    def likely(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for prompt in range(2):
        group = sorted(every[5 * prompt : 5 * prompt + 5], key=likely, reverse=True)
        kept = best[2 * prompt : 2 * prompt + 2]
        assert [choice.text for choice in kept] == [choice.text for choice in group[:2]]
        assert len({choice.text for choice in group}) > 1


def test_a_worker_that_thinks_too_long_is_killed(monkeypatch):
    async def run():
        check = GrammarCheck(HttpLimits(grammar_s=0.001))
        slow = {"choice": [f"word {number}" for number in range(1000)]}
        with pytest.raises(ApiError, match="not compiled within"):
            await check.grammar(slow, "guided_choice")
        # The next one gets a new worker.
        check._worker.seconds = 30.0
        assert await check.grammar({"choice": ["a"]}, "guided_choice")
        worker = check._worker.process.pid
        assert await check.grammar({"regex": "a"}, "guided_regex")
        assert check._worker.process.pid == worker
        check._worker.process.kill()
        with pytest.raises(ApiError, match="memory"):
            await check.grammar({"regex": "b"}, "guided_regex")
        assert await check.grammar({"regex": "b"}, "guided_regex")
        many = [check.grammar({"regex": f"c{n}"}, "guided_regex") for n in range(40)]
        results = await asyncio.gather(*many, return_exceptions=True)
        refused = [one for one in results if isinstance(one, ApiError)]
        assert {one.status for one in refused} == {429}
        assert len(refused) == 8
        await check.stop()

    asyncio.run(run())
