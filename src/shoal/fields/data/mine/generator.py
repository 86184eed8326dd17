"""Baskets with planted sets, whose width and density are chosen.

Source: Heaton, Comparing Dataset Characteristics that Favor the Apriori, Eclat or FP-Growth
Frequent Itemset Mining Algorithms, 2016 (section IV, and the script that the author published).
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import require
from shoal.core.random import generator
from shoal.fields.data.mine.baskets import Baskets

_PLANTED, _ORDINARY = 100, 50_000


def heaton_baskets(
    num_baskets: int, max_size: int = 10, planted: float = 0.5, *, seed: int = 0
) -> Baskets:
    """Generate baskets.

    100 sets of 1 to ``max_size`` items among F0, F1, ... are planted: with a probability a basket
    begins with one of them. Then it is filled with ordinary items (I0 to I49999) up to a size that
    is uniform in 1 to ``max_size``; a planted set that is larger stays whole.

    Args:
        num_baskets: how many.
        max_size: the largest size, and the number of items of which sets are planted.
        planted: probability that a basket has a planted set.
        seed: of everything random.

    Raises:
        ConfigError: an argument is out of bounds.
    """
    require(num_baskets >= 1, "baskets", num_baskets, expected="at least 1")
    require(1 <= max_size <= _ORDINARY, "max_size", max_size, expected=f"1 to {_ORDINARY}")
    require(0 <= planted <= 1, "planted", planted, expected="a probability, 0 to 1")
    draw = generator(seed, purpose="heaton baskets")
    sets = [
        draw.choice(max_size, size, replace=False)
        for size in draw.integers(1, max_size + 1, _PLANTED)
    ]
    lengths = np.array([len(one) for one in sets])
    which = np.where(
        draw.random(num_baskets) < planted, draw.integers(0, _PLANTED, num_baskets), -1
    )
    begun = np.where(which >= 0, lengths[which], 0)
    size = np.maximum(draw.integers(1, max_size + 1, num_baskets), begun)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
    # Of 50,000 items two equal ones are rare in a basket; the few are drawn again.
    ids = draw.integers(0, _ORDINARY, int(begins[-1]))
    owner = np.repeat(np.arange(num_baskets), size)
    while len(again := _repeated(owner, ids)):
        ids[again] = draw.integers(0, _ORDINARY, len(again))
    ids += max_size
    for number, items in enumerate(sets):
        rows = np.flatnonzero(which == number)
        ids[begins[rows][:, None] + np.arange(len(items))] = items
    names = np.array([f"F{at}" for at in range(max_size)] + [f"I{at}" for at in range(_ORDINARY)])
    return Baskets(begins, ids.astype(np.int32), names)


def _repeated(owner: np.ndarray, ids: np.ndarray) -> np.ndarray:
    key = owner * (_ORDINARY + 1) + ids
    order = np.argsort(key, kind="stable")
    again: np.ndarray = order[1:][key[order[1:]] == key[order[:-1]]]
    return again
