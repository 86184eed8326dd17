"""Answers keep to their form, whatever a model would rather say."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from shoal.core.errors import ServeError, ShoalError  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.serve.engine.adjust import Adjuster  # noqa: E402
from shoal.serve.engine.loop import check_params  # noqa: E402
from shoal.serve.engine.sampler import choose  # noqa: E402
from shoal.serve.text.grammar import GrammarError, Grammars, Vocabulary, grammar_of, trial  # noqa: E402

# A byte each, some pieces of JSON, two ids that stand for nothing, and two special tokens.
PIECES = [bytes([byte]) for byte in range(256)] + [b'{"', b'": ', b'"}', b"tr", b"ue", b"", b""]
SPECIAL = [len(PIECES), len(PIECES) + 1]
TOKENS = [*PIECES, b"<|end|>", b"<|im|>"]
END = SPECIAL[0]


def answers(form, count=4, most=300, temperature=1.5):
    """Random models' answers to one form, all in one batch: (text, whether it ended)."""
    adjuster = Adjuster(Grammars(lambda: Vocabulary(TOKENS, SPECIAL)))
    params = SamplingParams(
        max_tokens=most,
        temperature=temperature,
        grammar=grammar_of(form),
        stop_ids=frozenset({END}),
    )
    requests = [Request(str(n), [1], 1, replace(params, seed=n)) for n in range(count)]
    source = torch.Generator().manual_seed(3)
    for _ in range(most):
        left = [one for one in requests if one.tokens[-1] != END]
        if not left:
            break
        logits = torch.randn(len(left), len(TOKENS), generator=source) * 2
        scores, failed = adjuster(logits, left)
        assert not failed
        for one, token in zip(left, choose(logits, left, scores)[0], strict=True):
            one.tokens.append(token)
    results = []
    for one in requests:
        tokens = one.tokens[1:]
        ended = tokens[-1] == END
        assert not {END, SPECIAL[1]} & set(tokens[:-1])
        results.append((b"".join(TOKENS[t] for t in tokens[: -1 if ended else None]), ended))
    return results


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -3, "maximum": 40},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"enum": ["red", 3, None, 'a "quoted" one']},
            {"const": {"a": [1]}},
        ]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 3}),
        st.dictionaries(st.sampled_from(["a", "b", "ü", 'c"']), inner, max_size=3).map(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": list(parts)[:1],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS)
def test_every_answer_is_of_its_schema(schema):
    for text, ended in answers({"json": schema}, count=2):
        assert ended
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern",
    [r"[a-c]{2,4}x?", r"(yes|no)( please){0,2}", "[0-9]{3}-[0-9]{2}", "ü[éß]{3}", "a\nb|/"],
)
def test_every_answer_matches_its_expression(pattern):
    for text, ended in answers({"regex": pattern}):
        assert ended
        assert re.fullmatch(pattern, text.decode())


def test_every_answer_is_one_of_the_choices():
    choices = ["yes", "no", "yes, but", 'a "b" \\ / \n c', "日本"]
    result = {text.decode() for text, ended in answers({"choice": choices}, count=40) if ended}
    assert result <= set(choices)
    assert len(result) > 2


def test_any_json_is_json_as_far_as_it_goes():
    from pydantic_core import from_json

    for text, ended in answers({"json": {"type": "object"}}, count=8, most=150):
        if ended:
            assert isinstance(json.loads(text), dict)
        else:
            whole = text.decode(errors="ignore")
            assert isinstance(from_json(whole, allow_partial="trailing-strings"), dict)


def test_every_call_is_of_its_function():
    point = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/small"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
    }
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    functions = [{"name": "go", "parameters": point}, {"name": "stop-1", "parameters": nothing}]
    for text, ended in answers({"tools": {"functions": functions, "many": False}}, count=8):
        assert ended
        inner = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text.decode(), re.S)
        call = json.loads(inner.group(1))
        schema = {one["name"]: one["parameters"] for one in functions}[call["name"]]
        jsonschema.validate(call["arguments"], schema)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a+"},
        {"regex": r"(a)\1"},
        {"regex": "(" * 5000 + ")" * 5000},
        {"json": {"type": "strin"}},
        {"json": {"$ref": "#/$defs/none"}},
        {"json": {"$ref": "http://localhost/schema"}},
        {"json": {"type": "string", "minLength": 5, "maxLength": 3}},
        {"json": {"not": {"type": "string"}}},
        {"tools": {"functions": [{"name": 'a" | "b', "parameters": {}}], "many": False}},
        {"poem": 3},
    ],
)
def test_what_is_no_grammar_is_refused(form):
    with pytest.raises(GrammarError):
        trial(form)


def test_a_grammar_needs_a_token_that_ends_it():
    grammar = grammar_of({"choice": ["a"]})
    for bad in ({}, {"stop_ids": frozenset({END}), "min_tokens": 3}):
        with pytest.raises(ServeError, match="grammar"):
            check_params(SamplingParams(max_tokens=9, grammar=grammar, **bad))


def test_a_request_that_cannot_go_on_harms_nobody(random_model, engine_for):
    model = random_model(ModelConfig(**CONFIG))
    engine = engine_for(model)  # has no tokenizer
    grammar = grammar_of({"choice": ["a"]})
    bad = SamplingParams(max_tokens=9, grammar=grammar, stop_ids=frozenset({0}))
    engine.add(Request("bad", [1], 1, bad))
    engine.add(Request("good", [1], 1, SamplingParams(max_tokens=3)))
    outputs = []
    while engine.busy:
        outputs += engine.step()
    assert [one.request_id for one in outputs] == ["good"] * 3
    (result,) = (told for told in engine.drain_events() if told["kind"] != "began")
    assert (result["kind"], result["id"]) == ("refused", "bad")
    assert "tokenizer" in result["message"]
    assert engine.drain_events() == []


CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "ffn_hidden": 48,
    "max_position": 512,
    "initializer_range": 0.15,
}


def test_an_engine_keeps_to_them_in_company(random_model, engine_for, serve_all):
    model = random_model(ModelConfig(**CONFIG))
    schema = {"enum": ["red", "green", 12345]}
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=5),
        SamplingParams(
            max_tokens=40,
            temperature=1.0,
            seed=6,
            grammar=grammar_of({"json": schema}),
            stop_ids=frozenset({END}),
        ),
    ]
    prompts = [[1, 2, 3], [4, 5]]
    free = serve_all(engine_for(model), prompts[:1], params[:1])[0]
    # Blocks for one of the two: the other is preempted, and goes on where it was.
    for tokens in (4096, 48):
        engine = engine_for(model, kv_tokens=tokens)
        engine.runner._adjust = Adjuster(Grammars(lambda: Vocabulary(TOKENS, SPECIAL)))
        first, second = serve_all(engine, prompts, params)
        assert first == free
        assert second[-1] == END
        text = b"".join(TOKENS[token] for token in second[:-1])
        assert json.loads(text) in schema["enum"]


def test_the_library_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ShoalError, match="llguidance"):
        grammar_of({"choice": ["a"]})
