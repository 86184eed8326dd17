"""Generated problems with one right answer each: sorting, addition with carries, filling JSON.

A document is a problem, ``=`` and its answer. Answers can be checked exactly, so a model that
was trained on them is judged by what it gets right, however it was decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.corpora.protocols import Document, Split, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

# Bumped when a generator changes, so that no job trains on tokens of the old one.
_VERSION = 3
_FIELDS = ("name", "city", "team", "code", "host", "zone")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Groups of digits that are sorted, and sums. An answer stands as far from its group as the next
# one from its own: a model of some millions of parameters learns that in minutes.
_GROUPS, _LONG = 5, 4
_SUMS, _DIGITS = 3, 3


class QuestionAnswer(NamedTuple):
    """A question with its answer.

    Args:
        task: one of :data:`NAMES`.
        prompt: the question, with the ``=`` that ends it.
        answer: the only right answer.
    """

    task: str
    prompt: str
    answer: str


def _drawn(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(0, 10, count)))


def _sort(rng: np.random.Generator) -> tuple[str, str]:
    """Groups of digits, each to be put in order."""
    question = " ".join(_drawn(rng, _LONG) for _ in range(_GROUPS))
    return f"s {question}", _sorted(question)


def _sorted(question: str) -> str:
    return " ".join("".join(sorted(group)) for group in question.split(" "))


def _add(rng: np.random.Generator) -> tuple[str, str]:
    """Two rows of numbers, each to be added to the one below it, with carries."""
    rows = (" ".join("0" + _drawn(rng, _DIGITS) for _ in range(_SUMS)) for _ in range(2))
    question = "+".join(rows)
    return f"a {question}", _added(question)


def _added(question: str) -> str:
    """The sums, each as long as its numbers or, where that is too short, longer."""
    above, below = (row.split(" ") for row in question.split("+"))
    return " ".join(
        str(int(a) + int(b)).zfill(max(len(a), len(b))) for a, b in zip(above, below, strict=True)
    )


def _json(rng: np.random.Generator) -> tuple[str, str]:
    """Two fields to be written as a JSON object."""
    keys = [_FIELDS[int(n)] for n in rng.permutation(len(_FIELDS))[:2]]
    words = ["".join(_LETTERS[int(n)] for n in rng.integers(0, 26, 4)) for _ in keys]
    fields = dict(zip(keys, words, strict=True))
    written = json.dumps(fields, separators=(",", ":"))
    return "j " + " ".join(f"{key}:{word}" for key, word in fields.items()), written


_TASKS: dict[str, Callable[[np.random.Generator], tuple[str, str]]] = {
    "sort": _sort,
    "add": _add,
    "json": _json,
}
NAMES = tuple(_TASKS)


def problem(split: Split, number: int, seed: int = 0) -> QuestionAnswer:
    """One problem of a split; the tasks take turns.

    Args:
        split: whose seeds are its own, so that no problem of one is drawn for the other.
        number: which, from 0 on.
        seed: seed of all problems.
    """
    task = NAMES[number % len(NAMES)]
    question, answer = _TASKS[task](generator(seed, purpose=f"tasks {split}", index=number))
    return QuestionAnswer(task, f"{question}=", answer)


def is_right(prompt: str, answer: str) -> bool:
    """Whether an answer is right, found from the question alone."""
    kind, _, question = prompt.removesuffix("=").partition(" ")
    if kind == "s":
        return answer == _sorted(question)
    if kind == "a":
        return answer == _added(question)
    try:
        data = json.loads(answer)
    except ValueError:
        return False
    return bool(data == dict(field.split(":") for field in question.split(" ")))


@part
class Tasks:
    """Sorting, addition and JSON problems, generated from seeds.

    Args:
        problems: number of training problems.
        heldout: number of held-out problems, with separate seeds.
        seed: seed of all problems.
    """

    problems: Annotated[int, Ge(1)] = 60_000
    heldout: Annotated[int, Ge(1)] = 600
    seed: Annotated[int, Ge(0)] = 0

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The problems of one split, or those to train on before those held out."""
        counts: dict[Split, int] = {"train": self.problems, "heldout": self.heldout}
        for place, count in counts.items():
            if split in (None, place):
                for number in range(count):
                    result = problem(place, number, self.seed)
                    yield Document(f"{place}/{number}", result.prompt + result.answer, place)

    def fingerprint(self) -> str:
        """Digest of what the problems follow from."""
        return hashlib.sha256(f"tasks {_VERSION} {self!r}".encode()).hexdigest()

    def num_bytes(self) -> int:
        """About what all problems have; nothing is stored."""
        return 48 * (self.problems + self.heldout)

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Tokens come from memory-mapped shards, 2 bytes each once they are cached."""
        return data_time(work, machine, bytes_per_token=2)
