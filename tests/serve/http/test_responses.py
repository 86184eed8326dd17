"""The Responses API, by OpenAI's own client: over an engine that says the prompt, and a model."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

pytest.importorskip("llguidance")

from shoal.ir.serving import SamplingParams
from shoal.serve.engine.failure import EngineDownError
from shoal.serve.http.answer import ResponseDelta
from shoal.serve.http.openai import ParsedRequest
from shoal.serve.http.response_items import ItemWriter
from shoal.serve.http.stream import events
from shoal.serve.http.writers import GenerationJob, PreparedPrompt

pytestmark = pytest.mark.multi

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "How it is there.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {"type": "function", "name": "time"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class City(BaseModel):
    city: bool


@pytest.fixture(scope="module")
def tiny(write_model):
    """The client of a server with a real model."""
    from openai import OpenAI

    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(model=str(write_model(1024)), threads=1)
    with (
        running(job, ServerOptions(port=0, name="tiny")) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client, given="hi", **options):
    options = {"max_output_tokens": 40, "model": "tiny", **options}
    return client.responses.create(input=given, **options)


def test_a_text(openai_client):
    answer = ask(openai_client, "Hi", model="bytes", instructions="S", metadata={"a": "b"})
    # The engine says the prompt again; a plain transcript ends before the next speaker.
    assert answer.output_text == "S\n"
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert answer.output[0].type == "message"
    assert answer.output[0].content[0].annotations == []
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("S", {"a": "b"}, 40)
    assert answer.id.startswith("resp_")
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    short = ask(openai_client, "Hello", model="bytes", max_output_tokens=5)
    assert (short.output_text, short.status) == ("User:", "incomplete")
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_is_the_same_chat(tiny):
    options = {"seed": 5, "top_k": 20}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    chat = tiny.chat.completions.create(
        model="tiny", messages=messages, max_tokens=30, temperature=0.8, extra_body=options
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "three"},
    ]
    asked = {"instructions": "Be brief.", "max_output_tokens": 30, "temperature": 0.8}
    answer = ask(tiny, items, **asked, extra_body=options)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.temperature == 0.8


def test_typed_events(tiny):
    whole = ask(tiny, "tell me", temperature=0, include=["message.output_text.logprobs"])
    stream = ask(
        tiny, "tell me", temperature=0, include=["message.output_text.logprobs"], stream=True
    )
    seen = list(stream)
    kinds = [event.type for event in seen]
    deltas = [event for event in seen if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) > 1
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in deltas)
    assert text == whole.output_text == seen[-1].response.output_text
    assert seen[len(deltas) + 4].text == text
    assert seen[0].response.status == "in_progress"
    assert seen[0].response.output == []
    assert len({event.item_id for event in deltas}) == 1
    ended = seen[-1].response
    assert ended.usage.output_tokens == 40
    scores = ended.output[0].content[0].logprobs
    assert len(scores) == 40
    assert [one.token for one in scores] == [
        one.token for one in whole.output[0].content[0].logprobs
    ]
    sent = [one.logprob for event in deltas for one in event.logprobs]
    assert sent == [one.logprob for one in scores[: len(sent)]]
    with tiny.responses.stream(model="tiny", input="tell me", temperature=0) as helped:
        assert helped.until_done().get_final_response().output_text.startswith(text[:10])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls(tiny, choice):
    options = {"tools": [WEATHER, TIME], "tool_choice": choice, "max_output_tokens": 200}
    answer = ask(tiny, **options, extra_body={"seed": 3}, parallel_tool_calls=False)
    (call,) = answer.output
    assert (call.type, call.status, answer.status) == ("function_call", "completed", "completed")
    assert call.name in ("weather", "time")
    assert isinstance(json.loads(call.arguments), dict)
    assert answer.tools[0].name == "weather"
    stream = ask(tiny, **options, extra_body={"seed": 3}, parallel_tool_calls=False, stream=True)
    seen = list(stream)
    deltas = [one for one in seen if one.type == "response.function_call_arguments.delta"]
    assert "".join(one.delta for one in deltas) == call.arguments
    kinds = [event.type for event in seen]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert seen[2].item.name == call.name
    # What came back can be sent back, with the result of the call.
    items = [{"role": "user", "content": "hi"}, *answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "cold"})
    assert ask(tiny, items, tools=[WEATHER, TIME]).usage.input_tokens > answer.usage.input_tokens


def test_words_and_calls_are_items_of_their_own(openai_client):
    # The engine says the prompt again: how to call, and what the instructions have.
    options = {"model": "bytes", "tools": [WEATHER], "instructions": f"Look: {CALL}{CALL}"}
    options = {**options, "input": "hi", "max_output_tokens": 900}
    answer = openai_client.responses.create(**options)
    kinds = [one.type for one in answer.output]
    assert kinds[:3] == ["message", "function_call", "function_call"]
    assert answer.output[0].content[0].text.endswith("Look: ")
    assert [one.status for one in answer.output] == ["completed"] * len(kinds)
    assert json.loads(answer.output[1].arguments) == {"city": "Oslo"}
    assert answer.output[1].call_id != answer.output[2].call_id
    seen = list(openai_client.responses.create(**options, stream=True))
    shown = [(one.type, getattr(one, "arguments", None)) for one in seen[-1].response.output]
    assert shown == [(one.type, getattr(one, "arguments", None)) for one in answer.output]
    assert seen[-1].response.output_text == answer.output_text


def test_a_form(tiny):
    answer = tiny.responses.parse(model="tiny", input="hi", text_format=City, max_output_tokens=99)
    assert isinstance(answer.output_parsed, City)
    assert answer.text.format.type == "json_schema"


BAD = {
    "input": ({}, "input"),
    "input-none": ({"input": []}, "input"),
    "input-number": ({"input": [3]}, "input[0]"),
    "role": ({"input": [{"role": "bot", "content": "a"}]}, "input[0].role"),
    "content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    "text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    "item": ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    "call": ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]},
        "input[0].arguments",
    ),
    "output": ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    "reasoning": ({"input": [{"type": "reasoning"}]}, "input"),
    "long": ({"input": "word " * 200_000}, "input"),
    "model": ({"input": "a", "model": None}, "model"),
    "instructions": ({"input": "a", "instructions": 3}, "instructions"),
    "most": ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    "temperature": ({"input": "a", "temperature": 3}, "temperature"),
    "tools": ({"input": "a", "tools": {}}, "tools"),
    "tool": ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    "nested": ({"input": "a", "tools": [{"type": "function", "function": {}}]}, "tools[0].name"),
    "twice": ({"input": "a", "tools": [TIME, TIME]}, "tools"),
    "choice": ({"input": "a", "tools": [TIME], "tool_choice": "weather"}, "tool_choice"),
    "choice-kind": (
        {"input": "a", "tools": [TIME], "tool_choice": {"type": "mcp"}},
        "tool_choice.type",
    ),
    "format": ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    "schema": ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    "grammar": (
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
        "text.format",
    ),
    "metadata": ({"input": "a", "metadata": []}, "metadata"),
    "include": ({"input": "a", "include": ["file_search_call.results"]}, "include"),
    "background": ({"input": "a", "background": True}, "background"),
    "conversation": ({"input": "a", "conversation": "c"}, "conversation"),
    "truncation": ({"input": "a", "truncation": "auto"}, "truncation"),
    "before": ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
}


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(call, body, param, stream):
    body = {"model": "bytes", **body, "stream": stream}
    status, error = call.error("POST", "/v1/responses", body)
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(param) or param == "text.format"


def test_another_model(call):
    status, error = call.error("POST", "/v1/responses", {"model": "other", "input": "a"})
    assert (status, error["code"]) == (404, "model_not_found")


def test_an_error_in_the_middle_is_an_event_that_clients_raise():
    sampling = SamplingParams(max_tokens=9)
    answers = [SimpleNamespace(num_tokens=1, num_cached=0)]
    prompts = [PreparedPrompt([1], None)]
    job = GenerationJob("resp_1", 0, ParsedRequest(sampling=sampling), prompts, [sampling], answers)

    async def run():
        yield 0, ResponseDelta(text="ab", tokens=[1])
        raise EngineDownError("it died")

    async def collect():
        return [event async for event in events(run(), ItemWriter(job, "tiny", {}))]

    *_, last = asyncio.run(collect())
    name, data = last.decode().strip().split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert error["type"] == "error"
    assert error["message"] == error["error"]["message"] == "it died"
    assert error["code"] == "engine_unavailable"


@pytest.mark.slow
def test_behind_a_router(serve_fake, openai_of, caller):
    with serve_fake(replicas=2) as router:
        client = openai_of(router.url)
        options = {"model": "bytes", "max_output_tokens": 30}
        seen = list(client.responses.create(input="Hello", **options, stream=True))
        assert seen[-1].type == "response.incomplete"
        whole = client.responses.create(input="Hello", **options)
        assert (
            seen[-1].response.output_text == whole.output_text == "User: Hello\n\nAssistant:User: H"
        )
        call = caller(router.url)
        body = {"input": "a", **options, "stream": True, "tempratur": 1}
        status, data = call("POST", "/v1/responses", body)
        assert status == 200
        assert data.startswith(b'event: response.created\ndata: {"type":"response.created"')
        assert b"[DONE]" not in data
        assert "'temperature'" in call.headers["x-shoal-warning"]
