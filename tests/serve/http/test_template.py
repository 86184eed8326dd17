"""Chat templates: as transformers renders them, and not a step further."""

from __future__ import annotations

import asyncio
import json
import resource

import pytest

from shoal.core.errors import ModelError
from shoal.corpora.chat.template import PLAIN, ChatTemplate, TemplateLimitError, load_template
from shoal.serve.text.template import TemplateRenderer

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
    assert template.render(MESSAGES, {"enable_thinking": False}).endswith("<think></think>")
    assert (
        template.render(MESSAGES, {"add_generation_prompt": False}).rstrip().endswith("<|im_end|>")
    )


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


def confined(source, seconds=1.0, messages=MESSAGES):
    """What a worker makes of a template, whose memory is limited."""

    async def run():
        renderer = TemplateRenderer(ChatTemplate(source), seconds=seconds)
        try:
            text = await renderer.render(messages)
            process = renderer._worker.process
            assert resource.prlimit(process.pid, resource.RLIMIT_AS)[1] <= 256 * 2**20
            return text
        finally:
            await renderer.stop()

    return asyncio.run(run())


NESTED = {
    # Each list holds the one before it twice, and its text is twice as long.
    "twice": "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% endfor %}{{ ns.a | string | length }}",
    "lists": "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% for j in range(1000) %}"
    "{% set ns.a = [ns.a, [i, j]] %}{% endfor %}{% endfor %}",
    "sums": "{% set ns = namespace(a=[1]) %}{% for i in range(22) %}{% set ns.a = ns.a + ns.a %}"
    "{% endfor %}{% set b = [] %}{{ (ns.a | map('list') | list) | length }}",
    "batches": "{{ range(100000) | batch(1) | map('list') | map('string') | list | string | length"
    " }}{% for a in range(100000) %}{{ range(99999) | list | length }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("source", "seconds"),
    [
        # What has no end takes all the time that there is.
        *((source, 0.2) for source in (*NESTED.values(), *ENDLESS.values())),
        *((source, 0.5) for source in LARGE.values()),
    ],
)
def test_no_template_takes_long_or_much(source, seconds):
    with pytest.raises((TemplateLimitError, ModelError)):
        confined(source, seconds)


def test_a_worker_renders_what_this_process_does():
    template = ChatTemplate(CHATML)
    assert confined(CHATML, 20.0) == template.render(MESSAGES)
    text = "<b> & é \N{SNOWMAN} \x00 {{ 1 }}"
    got = confined("{{ messages[0].content }}", 20.0, [{"role": "user", "content": text}])
    assert got == text  # nothing is escaped, and nothing is rendered twice


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
