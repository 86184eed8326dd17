"""Chat templates: messages to the prompt that a model was trained on.

A template is a small program in Jinja that comes with the model, so it runs in Jinja's
immutable sandbox: no attribute that leads out, no change of what it is given, no string or
number beyond a size. What a sandbox cannot count, such as nested lists, is bounded by the process
in which the server renders: its time and its memory. A model without a template, such as one
trained on plain text, gets a plain transcript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.core.errors import ModelError, ServeError
from shoal.serve.text.confined import ConfinedProcess
from shoal.serve.text.folder import read_json, read_text

__all__ = ["PLAIN", "ChatTemplate", "TemplateLimitError", "TemplateRenderer", "load_template"]

MAX_SOURCE_BYTES = 256 * 2**10
MAX_RENDERED = 4 * 2**20
MAX_RENDER_S = 1.0
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


class TemplateLimitError(ServeError):
    """A chat template refused the messages, or went beyond its limits."""


class _TooMuchError(Exception):
    """Raised inside a template that grows too large."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with caps on what one operation can make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

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
        raise _TooMuchError(f"a value of {size} characters")


def _checked(value: Any) -> Any:
    if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise _TooMuchError("an integer beyond 64 bits")
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
        extensions=["jinja2.ext.loopcontrols"],
        # A prompt is plain text and never HTML: escaped, the model would read &lt; for <.
        autoescape=False,
        # Constants would be computed where the template is compiled, with no limit.
        optimized=False,
    )
    # Filters that make text of any width, or need what a prompt never has.
    for name in ("center", "format", "indent", "wordwrap", "urlize", "random", "pprint", "xmlattr"):
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
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
            raise ModelError(f"{where}: larger than {MAX_SOURCE_BYTES} B; that is no chat template")
        self.source, self.where = source, where
        self.stops = tuple(stops)
        self.special = special
        self.tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (TemplateSyntaxError, RecursionError) as cause:
            raise ModelError(f"{where}: not a Jinja template ({cause}); repair it") from cause

    def render(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt for an answer to the messages, in this process; there is no limit of time.

        Args:
            messages: role and content of each.
            values: further names that the template may look at.

        Raises:
            TemplateLimitError: the template refuses them, fails, or makes too much.
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
        try:
            for piece in self._template.generate(names):
                total += len(piece)
                _cap(total)
                pieces.append(piece)
        except _TooMuchError as cause:
            raise TemplateLimitError(
                f"{self.where}: stopped, since it made {cause}: expected at most {MAX_RENDERED} "
                "characters; send fewer or shorter messages"
            ) from None
        except Exception as cause:  # a template can raise whatever Python can
            raise TemplateLimitError(
                f"messages: the chat template of the model refuses them ({cause})"
            ) from cause
        return "".join(pieces)


class TemplateRenderer:
    """Renders a chat template in a process of its own, whatever it does there.

    Args:
        template: of the model.
        seconds: most s of a prompt.
    """

    def __init__(self, template: ChatTemplate, *, seconds: float = MAX_RENDER_S) -> None:
        self.template, self._seconds = template, seconds
        self._worker = ConfinedProcess("shoal.serve.text.template_worker", seconds)

    async def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt for an answer to the messages; see :meth:`ChatTemplate.render`.

        Raises:
            TemplateLimitError: the template refuses them, fails, or takes too much.
        """
        template = self.template
        question: dict[str, Any] = {"source": template.source, "where": template.where}
        question |= {"names": {**template.tokens, **values}, "messages": list(messages)}
        try:
            answer = await self._worker.ask(question)
        except TimeoutError:
            why = f"no prompt within {self._seconds:g} s"
        except EOFError:
            why = "it takes more memory than a template may"
        else:
            if answer["kind"] == "bad":
                raise TemplateLimitError(answer["message"])
            text: str = answer["text"]
            return text
        raise TemplateLimitError(
            f"{template.where}: stopped: {why}; send fewer or shorter messages"
        ) from None

    async def stop(self) -> None:
        """End the process."""
        await self._worker.stop()


def load_template(directory: Path) -> ChatTemplate:
    """The chat template of a model directory, or a plain one.

    ``chat_template.jinja`` counts before the ``chat_template`` of ``tokenizer_config.json``.

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
    if path.is_file():
        text = read_text(path, limit=MAX_SOURCE_BYTES)
        return ChatTemplate(text, where=str(path), tokens=tokens)
    source: Any = config.get("chat_template")
    if isinstance(source, list):  # several by name; the one called default is for chats
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if source is None:
        return ChatTemplate(
            PLAIN, where="the plain chat template", stops=_PLAIN_STOPS, special=True
        )
    if not isinstance(source, str):
        raise ModelError(
            f"{config_path}: chat_template is a {type(source).__name__}: expected a string; "
            "repair or remove it"
        )
    return ChatTemplate(source, where=f"{config_path}: chat_template", tokens=tokens)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
