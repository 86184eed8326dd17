"""Offline inference: the tokens of transformers, the answers of the server, and bad input."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from shoal.api.llm import LLM  # noqa: E402
from shoal.api.sampling import SamplingOptions  # noqa: E402
from shoal.core.errors import ConfigError, ModelError, ServeError, ShoalError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TEXTS = [f"prompt {number}: " + "abc " * (number % 7) for number in range(20)]
GREEDY = SamplingOptions(temperature=0, max_tokens=12)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def directory(reference, tmp_path_factory):
    """A model with one token a byte, and a chat template."""
    from shoal.corpora.tokenizer import train

    place = tmp_path_factory.mktemp("models") / "tiny"
    reference.save_pretrained(place)
    train([""], 257).save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return place


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, threads=1, kv_tokens=8192, max_running=8) as opened:
        yield opened


def tokens(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def test_greedy_tokens_are_those_of_transformers(llm, reference):
    for result in llm.generate(TEXTS[:6], GREEDY):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([result.prompt_token_ids]),
                attention_mask=torch.ones(1, len(result.prompt_token_ids), dtype=torch.int64),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        (output,) = result.outputs
        assert output.token_ids == expected[0, len(result.prompt_token_ids) :].tolist()
        assert output.finish_reason == "length"
        assert result.finished


def test_a_batch_is_its_prompts_one_by_one(llm):
    params = [
        SamplingOptions(temperature=number % 3, seed=number, max_tokens=5 + number % 4, n=1)
        for number in range(len(TEXTS))
    ]
    together = llm.generate(TEXTS, params)
    assert [result.prompt for result in together] == TEXTS
    assert len({result.request_id for result in together}) == len(TEXTS)
    alone = [llm.generate(text, one)[0] for text, one in zip(TEXTS, params, strict=True)]
    assert tokens(together) == tokens(alone)
    ids = [result.prompt_token_ids for result in together]
    again = llm.generate(ids, params)
    assert tokens(again) == tokens(together)
    assert [result.prompt for result in again] == [None] * len(TEXTS)
    assert llm.generate([], GREEDY) == []


@pytest.mark.slow
@pytest.mark.multi
def test_the_server_gives_the_same_answers(llm, directory):
    import urllib.request

    from shoal.ir import ServeJob
    from shoal.serve.http.server import running

    def post(url, body):
        request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    job = ServeJob(model=str(directory), threads=1, kv_tokens=8192, max_running=8)
    words = {"temperature": 0.8, "seed": 7, "max_tokens": 20, "n": 2}
    params = SamplingOptions(**words, stop="e", logprobs=2)
    # In neither cache: a cached prompt is computed in other steps, which rounds otherwise.
    fresh = "what nobody asked before: abc abc"
    chat = [{"role": "user", "content": "Hello"}]
    form = {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2,9}"}, "stop_token_ids": [256]}
    with running(job) as server:
        base = {"model": server.model, **words, "stop": "e"}
        wanted = {"logprobs": 2, "return_token_ids": True}
        whole = post(f"{server.url}/v1/completions", {**base, **wanted, "prompt": fresh})
        said = post(f"{server.url}/v1/chat/completions", {**base, "messages": chat})
        body = {"model": server.model, "input": TEXTS[:3]}
        vectors = post(f"{server.url}/v1/embeddings", body)["data"]
        formed = {"model": server.model, **words, **form, "prompt": TEXTS[3]}
        formed = post(f"{server.url}/v1/completions", {**formed, "return_token_ids": True})
        echoed = {"model": server.model, "prompt": fresh, "max_tokens": 0, "echo": True}
        echoed = post(f"{server.url}/v1/completions", {**echoed, "logprobs": 2})
    (mine,) = llm.generate(fresh, params)
    for output, choice in zip(mine.outputs, whole["choices"], strict=True):
        assert output.text == choice["text"]
        assert output.token_ids == choice["token_ids"]
        assert output.finish_reason == choice["finish_reason"]
        theirs = choice["logprobs"]["token_logprobs"]
        own = [
            row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)
        ]
        # Both answers are computed in one step or one after the other, which rounds otherwise.
        assert own[: len(theirs)] == pytest.approx(theirs, abs=1e-5)
    (mine,) = llm.generate(TEXTS[3], SamplingOptions(**words, **form))
    assert [o.token_ids for o in mine.outputs] == [c["token_ids"] for c in formed["choices"]]
    (mine,) = llm.generate(fresh, SamplingOptions(max_tokens=1, prompt_logprobs=2))
    theirs = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert theirs[0] is None and mine.prompt_logprobs[0] is None
    pairs = zip(mine.prompt_token_ids[1:], mine.prompt_logprobs[1:], strict=True)
    assert [row[token].logprob for token, row in pairs] == pytest.approx(theirs[1:], abs=1e-5)
    (answer,) = llm.chat(chat, params)
    assert [o.text for o in answer.outputs] == [c["message"]["content"] for c in said["choices"]]
    embedded = llm.embed(TEXTS[:3])
    for result, vector in zip(embedded, vectors, strict=True):
        assert result.outputs.embedding == pytest.approx(vector["embedding"], abs=1e-6)


def test_stop_strings_and_tokens_end_an_answer(llm):
    (whole,) = llm.generate(TEXTS[3], GREEDY)
    token, text = whole.outputs[0].token_ids[4], whole.outputs[0].text
    stop = next(one for one in text[3:] if one != "\ufffd")
    at = text.index(stop)
    (cut,) = llm.generate(TEXTS[3], SamplingOptions(temperature=0, max_tokens=12, stop=(stop,)))
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == (text[:at], "stop")
    kept = SamplingOptions(temperature=0, max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(TEXTS[3], kept)[0].outputs[0].text == text[: at + len(stop)]
    ids = SamplingOptions(temperature=0, max_tokens=12, stop_token_ids=[token])
    (ended,) = llm.generate(TEXTS[3], ids)
    assert ended.outputs[0].token_ids[-1] == token
    assert ended.outputs[0].finish_reason == "stop"


def test_seeds_repeat_and_answers_differ(llm):
    params = SamplingOptions(temperature=1.0, seed=3, max_tokens=16, n=2)
    first, second = llm.generate(TEXTS[:2], params), llm.generate(TEXTS[:2], params)
    assert tokens(first) == tokens(second)
    for result in first:
        one, other = result.outputs
        assert (one.index, other.index) == (0, 1)
        assert one.token_ids != other.token_ids
    unseeded = SamplingOptions(temperature=1.0, max_tokens=16)
    assert tokens(llm.generate(TEXTS[:2], unseeded)) != tokens(llm.generate(TEXTS[:2], unseeded))


def test_log_probabilities(llm, reference):
    params = SamplingOptions(temperature=0, max_tokens=4, logprobs=3)
    (result,) = llm.generate(TEXTS[2], params)
    (output,) = result.outputs
    ids = result.prompt_token_ids + output.token_ids
    with torch.no_grad():
        scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    total = 0.0
    for place, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = scores[len(result.prompt_token_ids) - 1 + place]
        assert list(row) == expected.topk(3).indices.tolist()
        assert row[token].rank == 1
        assert row[token].logprob == pytest.approx(float(expected[token]), abs=1e-3)
        total += row[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)
    assert llm.generate(TEXTS[2], GREEDY)[0].outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{2,9}"}, r"[a-f]{4}-[0-9]{2,9}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"json": {"type": "object", "properties": {"a": {"type": "boolean"}},
                   "required": ["a"], "additionalProperties": False}},
         r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    ],
)  # fmt: skip
def test_answers_have_the_form_that_is_asked_for(llm, form, pattern):
    params = SamplingOptions(
        temperature=2, seed=3, max_tokens=200, n=4, structured_outputs=form, stop_token_ids=[256]
    )
    for output in llm.generate(TEXTS[2], params)[0].outputs:
        assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text), output.text


def test_log_probabilities_of_the_prompt(llm, reference):
    (plain, scored) = llm.generate(
        [TEXTS[6], TEXTS[6]], [GREEDY, replace(GREEDY, prompt_logprobs=3, n=2)]
    )
    assert plain.prompt_logprobs is None
    assert [o.token_ids for o in scored.outputs] == [plain.outputs[0].token_ids] * 2
    ids = torch.tensor([scored.prompt_token_ids])
    with torch.no_grad():
        expected = reference(ids).logits[0].double().log_softmax(-1)
    assert len(scored.prompt_logprobs) == ids.shape[1] and scored.prompt_logprobs[0] is None
    for place, row in enumerate(scored.prompt_logprobs[1:]):
        best = expected[place].topk(3).indices.tolist()
        assert set(row) == {*best, int(ids[0, place + 1])}
        for token, one in row.items():
            assert one.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
        assert [row[token].rank for token in best] == [1, 2, 3]


def test_chats_go_through_the_template(llm):
    hello = [{"role": "user", "content": "Hi"}]
    one, other = llm.chat([hello, [{"role": "system", "content": "Be brief"}, *hello]], GREEDY)
    assert one.prompt == "<user>Hi\n<a>"
    assert other.prompt == "<system>Be brief\n<user>Hi\n<a>"
    assert tokens([one]) == tokens(llm.generate(one.prompt, GREEDY))
    (bare,) = llm.chat(hello, GREEDY, add_generation_prompt=False)
    assert bare.prompt == "<user>Hi\n"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert '"weather"' in llm.chat(hello, GREEDY, tools=[tool])[0].prompt


def test_vectors_of_texts(llm):
    results = llm.embed(TEXTS[:5])
    assert [len(result.outputs.embedding) for result in results] == [64] * 5
    assert math.hypot(*results[0].outputs.embedding) == pytest.approx(1)
    (short,) = llm.embed(TEXTS[0], normalize=False, dimensions=8, pooling="last")
    assert len(short.outputs.embedding) == 8
    (alone,) = llm.embed([results[3].prompt_token_ids])
    expected = pytest.approx(results[3].outputs.embedding, abs=1e-5)
    assert alone.outputs.embedding == expected


def test_an_answer_fills_the_room_that_there_is(llm):
    (result,) = llm.generate([[5] * 250], SamplingOptions(temperature=0, max_tokens=None))
    assert len(result.outputs[0].token_ids) == 6


def test_an_adapter_answers_as_the_model_that_holds_it(directory, tmp_path):
    from shoal.core.parts import table
    from shoal.model import huggingface
    from shoal.model.generate import generate
    from shoal.train.peft import files

    model = huggingface.read(directory, torch.float32)
    handle = table("peft").build({"name": "lora", "r": 4}).inject(model)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in handle.trainable().values():
            value.add_(torch.randn(value.shape, generator=source))
    files.write(tmp_path / "sql", handle, base="tiny")
    fields = {"adapters": {"sql": str(tmp_path / "sql")}, "threads": 1, "kv_tokens": 2048}
    with LLM(directory, **fields) as opened:
        plain = opened.generate(TEXTS[:3], GREEDY)
        adapted = opened.generate(TEXTS[:3], GREEDY, adapter="sql")
        with pytest.raises(ServeError, match="adapter = 'sqr': expected one of sql"):
            opened.generate("a", GREEDY, adapter="sqr")
    assert tokens(adapted) != tokens(plain)
    for result in adapted:
        expected = generate(model.eval(), result.prompt_token_ids, 12, temperature=0)
        assert result.outputs[0].token_ids == list(expected)


def sampled(**fields):
    return {"sampling_params": SamplingOptions(**fields)}


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("", {}, "prompts: prompt: no tokens"),
        (["a", ""], {}, "prompts[1]: prompt: no tokens"),
        ([[]], {}, "prompts[0]: prompt = []: expected at least one token"),
        ([[1, 999]], {}, "prompts[0]: prompt = 999: expected token ids from 0 to 256"),
        ([["a", "b"]], {}, "prompts[0]: prompt = 'a': expected token ids"),
        ([[True]], {}, "prompts[0]: prompt = True: expected token ids"),
        ([1, 2], {}, "prompts[0] = 1: expected a text or a list of token ids"),
        (5, {}, "prompts = int: expected a text"),
        (None, {}, "prompts = NoneType: expected a text"),
        (b"raw", {}, "prompts = bytes: expected a text"),
        (["a", "b" * 400], {}, "prompts[1]: prompt of 400 tokens"),
        ("a" * 300_000, {}, "prompts: prompt of 300000 characters"),
        ("a", sampled(max_tokens=-1), "sampling_params: max_tokens = -1: expected an integer"),
        ("a", sampled(max_tokens=256), "prompts: prompt of 1 tokens and 256 new ones"),
        ("a", sampled(max_tokens=1.5), "sampling_params: max_tokens = 1.5"),
        ("a", sampled(temperature=-1), "sampling_params: temperature = -1"),
        ("a", sampled(temperature=math.nan), "sampling_params: temperature = nan"),
        ("a", sampled(top_p=0), "sampling_params: top_p = 0.0"),
        ("a", sampled(n=0), "sampling_params: n = 0"),
        ("a", sampled(stop=""), "sampling_params: stop = ''"),
        ("a", sampled(stop=[1]), "sampling_params: stop = 1"),
        ("a", sampled(stop_token_ids=[300]), "sampling_params: stop_token_ids = 300"),
        ("a", sampled(prompt_logprobs=21), "sampling_params: prompt_logprobs = 21"),
        (
            "a",
            sampled(structured_outputs={"regex": "a"}),
            "sampling_params: structured_outputs.regex: this model has no token that ends a text",
        ),
        (
            "a",
            sampled(structured_outputs={"regex": "("}, stop_token_ids=[256]),
            "sampling_params: structured_outputs.regex: ",
        ),
        (
            "a",
            sampled(structured_outputs={"xml": "a"}),
            "sampling_params: structured_outputs.xml = 'a': expected json, regex or choice",
        ),
        ("a", sampled(logprobs=21), "sampling_params: logprobs = 21"),
        ("a", sampled(seed="x"), "sampling_params: seed = 'x'"),
        ("a", sampled(logit_bias={999: 1.0}), "sampling_params: logit_bias = '999'"),
        ("a", {"sampling_params": {"n": 2}}, "sampling_params = {'n': 2}: expected shoal"),
        ("a", {"sampling_params": [GREEDY, 3]}, "sampling_params[1] = 3: expected shoal"),
        ("a", {"sampling_params": [GREEDY] * 2}, "'2 of them': expected one for all"),
        ("a", {"adapter": "sql"}, "adapter = 'sql': expected none"),
    ],
)
def test_bad_prompts_and_options(llm, prompts, options, words):
    with pytest.raises(ServeError) as caught:
        llm.generate(prompts, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ("Hello", {}, "messages = str: expected a list of messages"),
        ([], {}, "messages = '0 messages'"),
        ([{"role": "pirate", "content": "a"}], {}, "messages[0].role = 'pirate'"),
        ([[{"role": "user", "content": "a"}], [{"role": "user"}]], {}, "messages[1]: messages[0]"),
        ([{"role": "user", "content": "a" * 300}], {}, "messages: prompt of 310 tokens"),
        ([{"role": "user", "content": "a"}], {"tools": [5]}, "tools[0]"),
        (
            [{"role": "user", "content": "a"}],
            {"add_generation_prompt": 3},
            "add_generation_prompt = 3: expected true or false",
        ),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs.messages",
        ),
    ],
)
def test_bad_chats(llm, messages, options, words):
    with pytest.raises(ServeError) as caught:
        llm.chat(messages, GREEDY, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "max"}, "pooling = 'max'"),
        ({"dimensions": 65}, "dimensions = 65: expected at most 64"),
        ({"dimensions": 0}, "dimensions = 0"),
        ({"normalize": 2}, "normalize = 2"),
    ],
)
def test_bad_embeddings(llm, options, words):
    with pytest.raises(ServeError) as caught:
        llm.embed("a", **options)
    assert words in str(caught.value)


def test_bad_models(directory, tmp_path):
    with pytest.raises(ModelError, match="no such directory: expected a Hugging Face"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"without config\.json"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="model = 5: expected a path"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"max_runing.*max_running"):
        LLM(directory, max_runing=3)
    with pytest.raises(ShoalError, match="replicas"):
        LLM(directory, replicas=2)
    with pytest.raises(ShoalError, match="max_position"):
        LLM(directory, max_position=10_000)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        LLM(tmp_path)


@pytest.mark.slow
def test_a_prompt_that_the_cache_cannot_hold_ends_the_call_and_not_the_model(directory):
    with LLM(directory, threads=1, kv_tokens=64) as opened:
        with pytest.raises(ServeError, match=r"cmpl-.*64"):
            opened.generate(["a", "b" * 100], GREEDY)
        assert opened.stats()["requests_running"] == opened.stats()["requests_waiting"] == 0
        assert len(opened.generate(["a"], GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.slow
def test_a_closed_model_refuses_work(directory):
    before = torch.get_num_threads()
    with LLM(directory, threads=2, kv_tokens=512) as opened:
        assert torch.get_num_threads() == 2
        assert "closed" not in repr(opened)
    assert torch.get_num_threads() == before
    assert "closed" in repr(opened)
    for call in (lambda: opened.generate("a", GREEDY), opened.stats):
        with pytest.raises(ServeError, match="closed"):
            call()
    opened.close()


def test_an_interrupt_ends_the_answers_and_not_the_model(llm, monkeypatch):
    import signal

    steps = []
    take = type(llm._engine)._step

    def step(self, engine):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return take(self, engine)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(type(llm._engine), "_step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, SamplingOptions(temperature=0, max_tokens=50))
    assert len(steps) == 3
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.stats()["blocks_used"] == 0
    assert len(llm.generate(TEXTS, GREEDY)) == 20


def test_a_terminal_gets_a_bar_and_a_pipe_nothing(llm, capfd, monkeypatch):
    llm.generate(TEXTS[:2], GREEDY)
    assert capfd.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    llm.generate(TEXTS[:2], GREEDY, use_tqdm=False)
    assert terminal.getvalue() == ""
    llm.generate(TEXTS[:2], GREEDY)
    assert "2/2" in terminal.getvalue()
    assert "tok/s" in terminal.getvalue()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": {"tp": 2}},
        {"disagg": {"prefill": 1, "decode": 1}},
        {"speculative": "ngram"},
    ],
    ids=["ranks", "phases", "speculative"],
)
def test_other_engines_give_the_same_tokens(llm, directory, fields):
    expected = llm.generate(TEXTS, GREEDY)
    with LLM(directory, threads=1, kv_tokens=8192, **fields) as other:
        assert tokens(other.generate(TEXTS, GREEDY)) == tokens(expected)
        assert tokens(other.generate(TEXTS[:3], GREEDY)) == tokens(expected[:3])
