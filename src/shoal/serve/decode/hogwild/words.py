"""The words between workers as tokens, and what is looked for in what they write."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.serve.decode.hogwild.part import Hogwild

# Bytes in which a final answer is looked for: what is longer is none.
_TAIL = 512


@dataclass(frozen=True, kw_only=True)
class WorkerWords:
    """The words of one request's workers, as tokens.

    Args:
        rules: behind the prompt.
        headers: ``history``, ``others`` and ``own``, those that there are.
        prefixes: begin the steps, one of each worker.
        probe: the question of a probe.
        early_answer: written when the tokens are nearly used up.
        separator: bytes that end a step.
        marker: of a final answer.
        piece: the bytes of a token; without, nothing is looked for.
    """

    rules: Sequence[int] = ()
    headers: dict[str, Sequence[int]] = field(default_factory=dict)
    prefixes: Sequence[Sequence[int]] = ()
    probe: Sequence[int] = ()
    early_answer: Sequence[int] = ()
    separator: bytes = b"\n\n"
    marker: str = r"(?!)"
    piece: Callable[[int], bytes] = lambda _: b""

    @classmethod
    def of(
        cls,
        part: Hogwild,
        workers: int,
        encode: Callable[[str], Sequence[int]],
        piece: Callable[[int], bytes],
    ) -> WorkerWords:
        """The words of a part in the tokens of a model; one worker needs few."""
        looked_for = {"separator": part.separator.encode(), "piece": piece}
        if workers == 1:
            return cls(prefixes=((),), **looked_for)  # type: ignore[arg-type]
        headers = {
            "history": part.history_header,
            "others": part.others_header,
            "own": part.own_header,
        }
        return cls(
            rules=encode(part.rules),
            headers={name: encode(text) for name, text in headers.items() if text},
            prefixes=[encode(part.prefix.format(name=part.name_of(w))) for w in range(workers)],
            probe=encode(part.probe),
            early_answer=encode(part.early_answer),
            marker=part.marker,
            **looked_for,  # type: ignore[arg-type]
        )


class WorkerReader:
    """Reads along with a worker."""

    def __init__(self, words: WorkerWords) -> None:
        self._piece, self._separator = words.piece, words.separator
        self._marker = re.compile(words.marker.encode())
        self._tail = self._step = b""
        self._blank = True

    def feed(self, token: int) -> tuple[bool, bool]:
        """Whether the step ends with this token, and whether a final answer does."""
        new = self._piece(token)
        self._tail = (self._tail + new)[-_TAIL:]
        self._step = self._step[-len(self._separator) :] + new
        self._blank = self._blank and not new.strip()
        ended = False
        if self._separator in self._step:
            # Blank lines before the first words of a step end nothing.
            ended = not self._blank
            self._step, self._blank = b"", True
        return ended, self._marker.search(self._tail) is not None
