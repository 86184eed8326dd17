"""Text written by a seeded program: JSON records, log lines, sums done step by step.

Every document has rules of its own (names, orders, intervals) that its lines keep, and numbers
that follow from those before them. So a small model can learn what comes next, has to read the
document for it, and does not end in a loop when it goes on by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.corpora.protocols import HELDOUT_EVERY, Document, Split, data_time, split_of
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

# Raised when the same seed gives other text, so that tokens of older versions are not read.
_VERSION = 1


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "mara otto lena ivan nora hugo tess omar rosa emil vera juri anna paul ines kofi lucy remy "
    "dora finn alma igor sara noel"
)
_CITIES = _words("Oslo Lima Kyiv Bern Turin Accra Quito Perth Osaka Porto Sofia Lyon")
_ITEMS = _words(
    "lamp chair table mirror carpet kettle pillow shelf clock basket bottle blanket candle drawer "
    "hammer ladder"
)
_PATHS = _words("orders users items carts search login files reports events teams")
_HOSTS = _words("alpha beta gamma delta omega sigma")


@part
class Synthetic:
    """Generated documents of one kind, ``size_bytes`` in total, determined by the seed.

    Held out: ``sha256(name) % heldout_every == 0``, where the name is ``kind/seed-number``.

    Args:
        kind: records (JSON, one object per line), logs (requests and their results) or arithmetic
            (sums, products and chains of them, step by step).
        size_bytes: total bytes, up to the length of one document.
        seed: seed of the text.
        heldout_every: one in ``heldout_every`` documents is held out.
    """

    kind: Literal["records", "logs", "arithmetic"] = "records"
    size_bytes: Annotated[int, Ge(1), Le(2**40)] = 1_000_000
    seed: int = 0
    heldout_every: Annotated[int, Ge(2)] = HELDOUT_EVERY

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, in the order of their numbers."""
        write = _WRITERS[self.kind]
        written = number = 0
        while written < self.size_bytes:
            text = write(generator(self.seed, purpose=f"corpus {self.kind}", index=number))
            name = f"{self.kind}/{self.seed}-{number}"
            place = split_of(name, self.heldout_every)
            if split in (None, place):
                yield Document(name, text, place)
            written += len(text)  # it is all ASCII
            number += 1

    def fingerprint(self) -> str:
        """Digest of the options and of the version of what writes the text."""
        return hashlib.sha256(f"{self!r} {_VERSION}".encode()).hexdigest()

    def num_bytes(self) -> int:
        """Bytes of all documents, to within one of them."""
        return self.size_bytes

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Tokens come from memory-mapped shards, 2 bytes each once they are cached."""
        return data_time(work, machine, bytes_per_token=2)


def _some(draws: np.random.Generator, words: list[str], count: int) -> list[str]:
    return [words[place] for place in draws.permutation(len(words))[:count]]


def _records(draws: np.random.Generator) -> str:
    """Orders: who buys comes round in turn, what is bought has a price, and the total follows."""
    people = _some(draws, _NAMES, int(draws.integers(3, 7)))
    home = dict(zip(people, _some(draws, _CITIES, len(people)), strict=True))
    items = _some(draws, _ITEMS, int(draws.integers(3, 6)))
    price = {item: int(draws.integers(2, 40)) for item in items}
    number, step = int(draws.integers(100, 9000)), int(draws.integers(1, 4))
    minute, gap = int(draws.integers(0, 600)), int(draws.integers(1, 15))
    lines = []
    for line in range(int(draws.integers(15, 40))):
        who, item = people[line % len(people)], items[int(draws.integers(len(items)))]
        count = int(draws.integers(1, 6))
        record = {
            "id": number + step * line,
            "time": f"{8 + minute // 60 % 12:02d}:{minute % 60:02d}",
            "user": who,
            "city": home[who],
            "item": item,
            "price": price[item],
            "count": count,
            "total": price[item] * count,
            "status": "paid" if price[item] * count < 60 else "pending",
        }
        lines.append(json.dumps(record))
        minute += gap
    return "\n".join(lines) + "\n"


def _logs(draws: np.random.Generator) -> str:
    """Requests to a service: each is accepted, looked up, and done or failed."""
    host = _HOSTS[int(draws.integers(len(_HOSTS)))]
    paths = _some(draws, _PATHS, 4)
    verbs = {path: ("GET", "POST", "PUT")[int(draws.integers(3))] for path in paths}
    workers, number = int(draws.integers(2, 5)), int(draws.integers(100, 9000))
    second, gap = int(draws.integers(0, 30_000)), int(draws.integers(1, 9))
    lines = []
    for turn in range(int(draws.integers(10, 28))):
        path, key = paths[int(draws.integers(4))], int(draws.integers(10, 100))
        stamp = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d} {host}"
        head = f"worker-{turn % workers} request {number + turn}"
        spent = int(draws.integers(2, 90))
        lines.append(f"{stamp} INFO {head}: {verbs[path]} /{path}/{key}")
        if draws.random() < 0.25:
            lines.append(f"{stamp} WARN {head}: no {path}:{key} in cache, asking the database")
            spent += 100
        else:
            lines.append(f"{stamp} DEBUG {head}: found {path}:{key} in cache")
        if draws.random() < 0.1:
            lines.append(f"{stamp} ERROR {head}: {verbs[path]} /{path}/{key} failed: timed out")
        else:
            lines.append(f"{stamp} INFO {head}: 200 OK after {spent} ms")
        second += gap
    return "\n".join(lines) + "\n"


def _arithmetic(draws: np.random.Generator) -> str:
    """Chains of sums; the next begins with the last result, and its numbers follow a rule."""
    value, by = int(draws.integers(2, 90)), int(draws.integers(2, 30))
    stride, factor = int(draws.integers(1, 8)), int(draws.integers(2, 6))
    lines = []
    for number in range(1, int(draws.integers(6, 14))):
        lines.append(f"Problem {number}: take {value}, add {by}, times {factor}, less {stride}.")
        added = value + by
        lines.append(f"  {value} + {by} = {added}")
        product = 0
        for digits in (added // 10 * 10, added % 10):
            lines.append(f"  {digits} * {factor} = {digits * factor}")
            product += digits * factor
        tens = added // 10 * 10 * factor
        lines.append(f"  {tens} + {product - tens} = {product}")
        lines.append(f"  {product} - {stride} = {product - stride}")
        lines.append(f"Answer {number}: {product - stride}")
        value, by = (product - stride) % 100, by + stride
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[np.random.Generator], str]] = {
    "records": _records,
    "logs": _logs,
    "arithmetic": _arithmetic,
}
