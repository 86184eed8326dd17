"""Answers of a given form and calls of functions, seen by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

pytest.importorskip("llguidance")

from shoal.serve.errors import ApiError
from shoal.serve.grammar_check import GrammarCheck
from shoal.serve.limits import HttpLimits
from shoal.serve.tools import CallReader

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
    from shoal.serve.server import ServerOptions, running

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
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    # What came of it goes back, in the words of the client's own answer.
    told = [
        {"role": "user", "content": "hi"},
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12 C"},
    ]
    assert ask(client, messages=told, tools=[CITY], max_tokens=3).usage.completion_tokens == 3


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
    assert choice.finish_reason == "tool_calls"
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
    texts, names = [], []
    for chunk in openai_client.chat.completions.create(stream=True, **options):
        delta = chunk.choices[0].delta
        texts.append(delta.content or "")
        names += [call.function.name for call in delta.tool_calls or []]
    assert "".join(texts) == choice.message.content
    assert names == [call.function.name for call in choice.message.tool_calls]
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
    ],
)
def test_reading_calls(size, text, words, names):
    reader = CallReader()
    said = []
    for start in range(0, len(text), size):
        said.append(reader.feed(text[start : start + size])[0])
    said.append(reader.feed("", last=True)[0])
    assert "".join(said) == words
    assert [call.name for call in reader.calls] == names


def test_a_worker_that_thinks_too_long_is_killed(monkeypatch):
    async def run():
        check = GrammarCheck(HttpLimits(grammar_s=0.001))
        slow = {"choice": [f"word {number}" for number in range(1000)]}
        with pytest.raises(ApiError, match="not compiled within"):
            await check.grammar(slow, "guided_choice")
        # The next one gets a new worker.
        check._limits = HttpLimits(grammar_s=30.0)
        assert await check.grammar({"choice": ["a"]}, "guided_choice")
        worker = check._worker.pid
        assert await check.grammar({"regex": "a"}, "guided_regex")
        assert check._worker.pid == worker
        check._worker.kill()
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
