"""Chat templates: as transformers renders them, and not a step further."""

from __future__ import annotations

import json
import time

import pytest

from shoal.core.errors import ModelError
from shoal.serve import template as template_module
from shoal.serve.template import PLAIN, ChatTemplate, TemplateLimitError, load_template

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "1+1?"},
]

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{% endif %}
"""

LOOPS = """\
{{ bos_token }}{% set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if message.role == 'tool' %}{{ raise_exception('no ' + message.role) }}{% endif %}
{%- if loop.index0 == 0 %}{% continue %}{% endif %}
{{- '[' ~ loop.index0 % 2 ~ '] ' ~ message.content.split('?')[0].upper() ~ '\\n' }}
{%- endfor %}{{ ns.last }} {{ messages | length * 2 }} {{ {'a': 'é'} | tojson }} {{ tools is none }}
"""


@pytest.mark.parametrize("source", [CHATML, LOOPS, PLAIN], ids=["chatml", "loops", "plain"])
def test_renders_as_transformers_does(source):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    want, _ = rendering.render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **tokens
    )
    assert ChatTemplate(source, tokens=tokens).render(MESSAGES) == want[0]


def test_values_of_the_request():
    template = ChatTemplate(CHATML)
    assert template.render(MESSAGES, enable_thinking=False).endswith("<think></think>")
    assert template.render(MESSAGES, add_generation_prompt=False).rstrip().endswith("<|im_end|>")


def test_a_template_may_refuse():
    with pytest.raises(TemplateLimitError, match="no tool"):
        ChatTemplate(LOOPS).render([{"role": "tool", "content": ""}])


ENDLESS = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "texts": "{% set t = 'x' * 3000000 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}
LARGE = {
    "output": "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "times": "{{ ('x' * 10000000000) | length }}",
    "list": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "plus": "{% set ns = namespace(t='x') %}{% for a in range(60) %}{% set ns.t = ns.t + ns.t %}"
    "{% endfor %}",
    "tilde": "{% set ns = namespace(t='x') %}{% for a in range(60) %}{% set ns.t = ns.t ~ ns.t %}"
    "{% endfor %}",
    "numbers": "{% set ns = namespace(t=2) %}{% for a in range(90) %}{% set ns.t = ns.t * ns.t %}"
    "{% endfor %}",
    "range": "{% for a in range(10000000) %}{% endfor %}",
    "just": "{{ 'x'.ljust(10000000000) | length }}",
    "replace": "{% set t = 'x' * 1000000 %}{{ t.replace('x', t) | length }}",
    "format": "{{ '{:10000000000}'.format(1) | length }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "center": "{{ 'x' | center(10000000000) }}",
}
ESCAPES = {
    "class": "{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "attr": "{{ '' | attr('__class__') | attr('__mro__') | list }}",
    "self": "{{ self.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "change": "{{ messages.append(1) }}",
    "change-message": "{{ messages[0].update({'role': 'x'}) }}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_are_stopped(source, monkeypatch):
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.2)
    began = time.monotonic()
    with pytest.raises(TemplateLimitError):
        ChatTemplate(source).render(MESSAGES)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_large_values_are_stopped(source):
    with pytest.raises((TemplateLimitError, ModelError)):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_nothing_leads_out_of_the_sandbox(source):
    before = json.dumps(MESSAGES)
    try:
        text = ChatTemplate(source).render(MESSAGES)
    except TemplateLimitError:
        text = ""
    assert "class" not in text
    assert "root:" not in text
    assert "built-in" not in text
    assert json.dumps(MESSAGES) == before


def test_the_trace_is_put_back():
    import sys

    before = sys.gettrace()
    ChatTemplate(PLAIN).render(MESSAGES)
    assert sys.gettrace() is before


def test_finds_the_template(tmp_path):
    assert load_template(tmp_path).stops == ("\nUser:",)
    assert load_template(tmp_path).render(MESSAGES[1:2]) == "User: Hi <b>\n\nAssistant:"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert load_template(tmp_path).stops
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}a", "bos_token": "<s>"}))
    assert load_template(tmp_path).render([]) == "<s>a"
    assert load_template(tmp_path).stops == ()
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert load_template(tmp_path).render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert load_template(tmp_path).render([]) == "j"


@pytest.mark.parametrize("text", ['{"chat_template": 3}', "[]", "{", '{"chat_template": "{% if"}'])
def test_bad_files(tmp_path, text):
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match="tokenizer_config"):
        load_template(tmp_path)


def test_a_template_that_is_no_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 300_000)
    with pytest.raises(ModelError, match="at most"):
        load_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        load_template(tmp_path)
