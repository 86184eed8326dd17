"""Six sets of baskets that differ in shape, five of them real; see [87] in the catalogue."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from shoal.core.extras import import_extra
from shoal.corpora.debian import debian_packages
from shoal.corpora.stdlib import Stdlib
from shoal.fields.data.mine.generator import heaton_baskets

_WORD = re.compile(r"[A-Za-z_]\w+")


class BasketShape(NamedTuple):
    """Baskets of numbers, and the support at which they are mined.

    Args:
        rows: of items.
        least: support.
    """

    rows: list[list[int]]
    least: int


def planted(num_baskets: int, max_size: int, share: float, support: float = 0.05) -> BasketShape:
    """The paper's generator."""
    baskets = heaton_baskets(num_baskets, max_size, share)
    return _shape(np.split(baskets.ids, baskets.begins[1:-1]), support)


def shapes() -> dict[str, BasketShape]:
    """Name -> baskets."""
    modules = [one.text for one in Stdlib().documents()]
    lines = [line for text in modules for line in text.splitlines()]
    datasets: Any = import_extra("sklearn.datasets", extra="fields", purpose="real tables")
    digits, cancer = datasets.load_digits().data, datasets.load_breast_cancer().data
    cuts = np.quantile(cancer, [0.25, 0.5, 0.75], axis=0)
    bins = (cancer[None] > cuts[:, None]).sum(0) + 4 * np.arange(cancer.shape[1])
    return {
        # Short baskets, many items, sparse: dependencies of each package.
        "packages": _named([row.depends for row in debian_packages().rows], 0.002),
        # Short baskets, very many of them and of items: words of each line of source.
        "lines": _named([_WORD.findall(line) for line in lines], 0.0005),
        # Long baskets, few of them, many items: words of each module.
        "modules": _named([_WORD.findall(text) for text in modules], 0.4),
        # Dense, few items: pixels of digits that are more than half dark.
        "digits": _shape([np.flatnonzero(row > 8) for row in digits], 0.1),
        # Dense, baskets of equal length: quartiles of 30 measurements of tumours.
        "tumours": _shape(list(bins), 0.06),
        # The paper's own: planted sets among 50,000 other items.
        "planted": planted(50_000, 20, 0.5),
    }


def _named(rows: list[Any], support: float) -> BasketShape:
    numbers: dict[str, int] = {}
    return _shape(
        [[numbers.setdefault(item, len(numbers)) for item in dict.fromkeys(row)] for row in rows],
        support,
    )


def _shape(rows: list[Any], support: float) -> BasketShape:
    return BasketShape([list(map(int, row)) for row in rows], round(support * len(rows)))
