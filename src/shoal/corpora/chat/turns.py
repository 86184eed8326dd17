"""What of a conversation is learned: the text that a model has to write when it is served.

A served model is given the prompt that the chat template makes of the messages so far, and writes
on. So an assistant's turn is what the template puts behind that prompt: the answer, with the
signs that end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.core.errors import DataError
from shoal.corpora.chat.template import ChatTemplate, TemplateLimitError

Message = Mapping[str, str]


class MarkedText(NamedTuple):
    """A text and what of it is learned.

    Args:
        text: as the model reads it.
        learned: (begin, end) in characters, in order and apart.
    """

    text: str
    learned: tuple[tuple[int, int], ...]


def marked(
    template: ChatTemplate, messages: Sequence[Message], where: str, *, first: int = 0
) -> Iterator[MarkedText]:
    """A conversation as the texts to train on.

    It is one text, unless the template writes a turn otherwise when others follow it (a model that
    thinks drops its earlier thoughts): then each turn is a text with the messages before it.

    Args:
        template: how messages become text.
        messages: to the last one of the assistant; what follows it is left out.
        where: their place, for errors.
        first: number of the first message that is learned, where it is of the assistant.

    Raises:
        DataError: the template refuses the messages, or a turn cannot be told from its prompt.
    """
    turns = [n for n, one in enumerate(messages) if one["role"] == "assistant" and n >= first]
    ends = [_rendered(template, messages[: turn + 1], where) for turn in turns]
    spans = [
        (_begin(template, messages, turn, end, where), len(end))
        for turn, end in zip(turns, ends, strict=True)
    ]
    if all(ends[-1].startswith(end) for end in ends):
        yield MarkedText(ends[-1], tuple(spans))
        return
    for end, span in zip(ends, spans, strict=True):
        yield MarkedText(end, (span,))


def _begin(
    template: ChatTemplate, messages: Sequence[Message], turn: int, end: str, where: str
) -> int:
    """Where a turn begins in the text that ends with it."""
    prompt = _rendered(template, messages[:turn], where, prompt=True)
    if end.startswith(prompt):
        return len(prompt)
    # Some prompts open what the written turn has not, such as a thought.
    pairs = enumerate(zip(prompt, end, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(end)))
    before = _rendered(template, messages[:turn], where)
    if shared < len(before) or not end.startswith(before):
        raise DataError(
            f"{where}: {template.where} renders the messages before message {turn + 1} "
            "differently when an answer follows, so prompt and answer cannot be separated; set "
            "data.template to a template that only appends"
        )
    return shared


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], where: str, *, prompt: bool = False
) -> str:
    try:
        return template.render(messages, {"add_generation_prompt": prompt})
    except TemplateLimitError as cause:
        raise DataError(f"{where}: {cause}; change the messages or give data.template") from cause
