"""The server seen by OpenAI's own client."""

from __future__ import annotations

import asyncio

import fake_engine
import pytest

pytestmark = pytest.mark.multi


def ids(text):
    # The alphabet of byte-level tokenizers is sorted by character, after the end of text.
    from shoal.serve.text.pieces import _BYTES

    order = {byte: 1 + place for place, (_, byte) in enumerate(sorted(_BYTES.items()))}
    return [order[byte] for byte in text.encode()]


def test_lists_its_model(openai_client, server):
    assert [model.id for model in openai_client.models.list()] == ["bytes"]
    card = openai_client.models.retrieve("bytes")
    assert card.max_model_len == fake_engine.MAX_POSITION
    assert server.model == "bytes"


def test_completes_a_text(openai_client):
    answer = openai_client.completions.create(model="bytes", prompt="grüße ", max_tokens=16)
    assert answer.choices[0].text == "grüße grüße "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == 24
    assert answer.object == "text_completion"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "xyz"], ["abab", "xyzx"]),
        (ids("ab"), ["abab"]),
        ([ids("ab"), ids("q")], ["abab", "qqqq"]),
    ],
)
def test_takes_every_kind_of_prompt(openai_client, prompt, texts):
    answer = openai_client.completions.create(model="bytes", prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_gives_n_answers_each(openai_client):
    answer = openai_client.completions.create(
        model="bytes", prompt=["ab", "cd"], n=3, max_tokens=2, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["abab"] * 3 + ["cdcd"] * 3
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == 4


def test_default_is_sixteen_tokens(openai_client):
    answer = openai_client.completions.create(model="bytes", prompt="a")
    assert answer.choices[0].text == "a" * 16


@pytest.mark.parametrize("stop", ["c", ["zz", "cde"], "cd"])
def test_stop_strings_are_cut_off(openai_client, stop):
    answer = openai_client.completions.create(
        model="bytes", prompt="abcdef", max_tokens=100, stop=stop
    )
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "stop"


def test_the_end_of_text_has_no_text(openai_client):
    prompt = [*ids("ab"), 0]
    answer = openai_client.completions.create(
        model="bytes", prompt=prompt, max_tokens=100, logprobs=1
    )
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert answer.usage.completion_tokens == 3
    going_on = openai_client.completions.create(
        model="bytes", prompt=prompt, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert going_on.choices[0].text == "abab"
    assert going_on.usage.completion_tokens == 6


def test_logprobs_of_completions(openai_client):
    answer = openai_client.completions.create(model="bytes", prompt="é!", max_tokens=4, logprobs=2)
    result = answer.choices[0].logprobs
    assert result.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!", "bytes:\\xc3"]
    assert result.text_offset == [2, 2, 3, 4]  # behind the prompt
    assert result.token_logprobs == [-0.5] * 4
    assert result.top_logprobs[2] == {"<|endoftext|>": -1.0, "!": -0.5}
    assert answer.choices[0].text == "é!�"


def test_token_ids_on_request(openai_client):
    answer = openai_client.completions.create(
        model="bytes", prompt="ab", max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].prompt_token_ids == ids("ab")
    assert answer.choices[0].token_ids == ids("aba")


def test_streams_a_completion(openai_client):
    stream = openai_client.completions.create(
        model="bytes",
        prompt="grüße",
        max_tokens=14,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "grüßegrüße"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 14
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_stream_never_has_half_a_character(openai_client):
    stream = openai_client.completions.create(
        model="bytes", prompt="🐟🐠", max_tokens=16, stream=True
    )
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == "🐟🐠🐟🐠"
    assert not any("�" in text for text in texts)


def test_streams_several_answers(openai_client):
    stream = openai_client.completions.create(
        model="bytes", prompt=["ab", "xyz"], n=2, max_tokens=6, stream=True, echo=True
    )
    texts = ["", "", "", ""]
    ends = [None] * 4
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert texts == ["abababab"] * 2 + ["xyzxyzxyz"] * 2
    assert ends == ["length"] * 4


def test_chats(openai_client):
    answer = openai_client.chat.completions.create(
        model="bytes",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        max_completion_tokens=12,
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Be brief.\n\nU"[:12]
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"


def test_a_plain_chat_ends_before_the_next_speaker(openai_client):
    answer = openai_client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "Hi"}]
    )
    # The echo says the transcript again: "User: Hi\n\nAssistant:User: Hi ..."
    assert answer.choices[0].finish_reason == "length"
    second = openai_client.chat.completions.create(
        model="bytes",
        messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
    )
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == "S\n"


def test_streams_a_chat_with_logprobs(openai_client):
    stream = openai_client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        stream=True,
        logprobs=True,
        top_logprobs=3,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "User: He"
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == list("User: He")
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].bytes == [ord("U")]


def test_minus_infinity_is_a_number(openai_client):
    answer = openai_client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "<|endoftext|>"}],
        max_tokens=9,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    assert min(e.logprob for e in answer.choices[0].logprobs.content) == -9999.0


def test_many_at_once(server):
    from openai import AsyncOpenAI

    async def run():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

            async def one(number):
                prompt = f"<{number}>"
                answer = await client.completions.create(
                    model="bytes", prompt=prompt, max_tokens=4 * len(prompt)
                )
                assert answer.choices[0].text == prompt * 4

            await asyncio.gather(*map(one, range(60)))

    asyncio.run(run())


def test_refused_by_the_engine_is_400(openai_client):
    from openai import BadRequestError

    for stream in (False, True):
        with pytest.raises(BadRequestError, match="longer than the cache"):
            openai_client.completions.create(
                model="bytes", prompt=[fake_engine.REFUSE], stream=stream
            )
