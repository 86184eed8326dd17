"""Chat templates: messages to the prompt that a model was trained on.

A template is a small program in Jinja that comes with the model, so it runs in Jinja's
immutable sandbox: no attribute that leads out, no change of what it is given, no string or
number beyond a size, no loop beyond a time. What a sandbox cannot count, such as nested lists, is
bounded by the process in which the server renders: its time and its memory. A model without a
template, such as one trained on plain text, is served with a plain transcript and fine-tuned with
ChatML.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.core.errors import ModelError, ServeError
from shoal.core.folder import read_json, read_text

MAX_SOURCE_BYTES = 256 * 2**10
MAX_RENDERED = 4 * 2**20
MAX_LOOPS_S = 10.0
_MAX_ARGUMENT = 100_000
_MAX_INTEGER = 2**63

# A transcript that every reader of plain text has seen.
PLAIN = (
    "{% if tools %}Functions: {{ tools | tojson }}\n"
    "Call one by writing <tool_call>\n"
    '{"name": NAME, "arguments": {...}}\n</tool_call>\n\n{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'assistant' %}Assistant: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{{ call['function'] | tojson }}\n</tool_call>{% endfor %}\n\n"
    "{% elif message['role'] == 'tool' %}Tool: {{ message['content'] }}\n\n"
    "{% else %}User: {{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_PLAIN_STOPS = ("\nUser:",)

# What a model without a template is fine-tuned with: ChatML, as OpenAI and Qwen write it.
CHATML = (
    "{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# A tokenizer that has no such tokens spells them, and an answer ends where it does.
_CHATML_STOPS = ("<|im_end|>",)


class TemplateLimitError(ServeError):
    """A chat template refused the messages, or went beyond its limits."""


class _TooMuchError(Exception):
    """Raised inside a template that grows too large."""


class _Generation(Extension):
    """The tags with which some templates mark what the assistant writes; they print nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded:
    """What a loop goes over; it ends when the template has taken its time."""

    def __init__(self, environment: _Sandbox, value: Any) -> None:
        self._environment, self._value = environment, value

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        for item in self._value:
            if time.monotonic() > self._environment.deadline:
                raise _TooMuchError(f"its loops ran longer than {MAX_LOOPS_S:g} s")
            yield item


_bounded = pass_environment(_Bounded)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with caps on what one operation can make, and on the time of loops."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    deadline = math.inf

    def _parse(self, *source: Any) -> nodes.Template:
        """The tree of a template, whose loops all look at the clock."""
        tree = super()._parse(*source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "bounded", [], [], None, None, lineno=loop.lineno, environment=self
            )
        return tree

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse formatting that can ask for any width; what is none of it stays as it is."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not available")
        return None

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations whose result would be large before they are done."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and not (numbers and abs(left) <= 2**16 and abs(right) <= 3):
            raise SecurityError("** is limited to small numbers")
        if operator == "%" and not numbers:
            raise SecurityError("% is for numbers only")
        if operator == "*":
            for times, thing in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(thing, "__len__"):
                    _cap(times * len(thing))
        return _checked(super().call_binop(context, operator, left, right))

    def call(*arguments: Any, **options: Any) -> Any:  # the signature that Jinja's own has
        """Refuse calls with huge numbers, and huge results."""
        called = arguments[2]
        for value in (*arguments[3:], *options.values()):
            if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
                raise SecurityError(f"a number above {_MAX_ARGUMENT} in a call")
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str) and getattr(called, "__name__", "") in ("replace", "join"):
            _cap(
                len(owner)
                * max((len(v) for v in arguments[3:] if hasattr(v, "__len__")), default=0)
            )
        return _checked(ImmutableSandboxedEnvironment.call(*arguments, **options))


def _cap(size: int) -> None:
    if size > MAX_RENDERED:
        raise _TooMuchError(
            f"it made a value of {size} characters: expected at most {MAX_RENDERED} characters"
        )


def _checked(value: Any) -> Any:
    if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise _TooMuchError("it made an integer beyond 64 bits")
    if isinstance(value, (str, list, tuple)):
        _cap(len(value))
    return value


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:200])


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        # A prompt is plain text and never HTML: escaped, the model would read &lt; for <.
        autoescape=False,
        # Constants would be computed where the template is compiled, with no limit.
        optimized=False,
    )
    # Filters that make text of any width, or need what a prompt never has.
    for name in ("center", "format", "indent", "wordwrap", "urlize", "random", "pprint", "xmlattr"):
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
    environment.filters["bounded"] = _bounded
    environment.globals = {  # neither lipsum nor cycler nor joiner
        "range": environment.globals["range"],
        "namespace": environment.globals["namespace"],
        "dict": dict,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


class ChatTemplate:
    """How the messages of a chat become one prompt.

    Args:
        source: the template.
        where: its file, for error messages.
        tokens: names such as ``bos_token`` and what they stand for.
        stops: strings that end an answer besides those of the request.
        special: whether the tokenizer adds its own first token to the prompt.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "chat template",
        tokens: Mapping[str, str] | None = None,
        stops: Sequence[str] = (),
        special: bool = False,
    ) -> None:
        if len(source.encode()) > MAX_SOURCE_BYTES:
            raise ModelError(
                f"{where}: larger than {MAX_SOURCE_BYTES} B, too large for a chat template"
            )
        self.source, self.where = source, where
        self.stops = tuple(stops)
        self.special = special
        self.tokens = dict(tokens or {})
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as cause:
            raise ModelError(f"{where}: not a Jinja template ({cause}); repair it") from cause

    def render(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt for an answer to the messages, in this process.

        Raises:
            TemplateLimitError: the template refuses them, fails, or makes or takes too much.
        """
        names = {
            **self.tokens,
            **(values or {}),
            "messages": [dict(message) for message in messages],
        }
        names.setdefault("add_generation_prompt", True)
        names.setdefault("tools", None)
        pieces: list[str] = []
        total = 0
        self._environment.deadline = time.monotonic() + MAX_LOOPS_S
        try:
            for piece in self._template.generate(names):
                total += len(piece)
                _cap(total)
                pieces.append(piece)
        except _TooMuchError as cause:
            raise TemplateLimitError(
                f"{self.where}: stopped, since {cause}; send fewer or shorter messages"
            ) from None
        except Exception as cause:  # a template can raise whatever Python can
            raise TemplateLimitError(
                f"messages: the chat template of the model refuses them ({cause})"
            ) from cause
        return "".join(pieces)


def load_template(directory: Path, *, default: str = PLAIN) -> ChatTemplate:
    """The chat template of a model directory, or a default.

    ``chat_template.jinja`` counts before the ``chat_template`` of ``tokenizer_config.json``.

    Args:
        directory: of the model.
        default: the template of a model that has none: :data:`PLAIN` or :data:`CHATML`.

    Raises:
        ModelError: a file is not what it should be.
    """
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    tokens = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
        if (text := _token_text(config.get(name))) is not None
    }
    path = directory / "chat_template.jinja"
    source: Any = config.get("chat_template")
    where = f"{config_path}: chat_template"
    if path.is_file():
        source, where = read_text(path, limit=MAX_SOURCE_BYTES), str(path)
    if isinstance(source, list):  # several by name; the one called default is for chats
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if source is None:
        source, where = default, "the default chat template"
    if not isinstance(source, str):
        raise ModelError(
            f"{where} is a {type(source).__name__}: expected a string; repair or remove it"
        )
    stops = {PLAIN: _PLAIN_STOPS, CHATML: _CHATML_STOPS}.get(source, ())
    return ChatTemplate(source, where=where, tokens=tokens, stops=stops, special=source == PLAIN)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
