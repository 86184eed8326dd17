"""Randomness keyed by place: the same for every rank and after every resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.random import Permutation, generator, seed64


def test_a_key_names_one_stream() -> None:
    keys = [
        {"seed": seed, "purpose": purpose, "step": step, "layer": layer, "index": index}
        for seed in (0, 1)
        for purpose in ("", "init")
        for step in (0, 1)
        for layer in (0, 1)
        for index in (0, 1)
    ]
    firsts = [tuple(generator(**key).integers(0, 2**62, 2)) for key in keys]
    assert len(set(firsts)) == len(keys)
    assert firsts == [tuple(generator(**key).integers(0, 2**62, 2)) for key in reversed(keys)][::-1]
    seeds = [seed64(**key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keys_do_not_run_into_each_other() -> None:
    assert seed64(1, step=23) != seed64(12, step=3)
    assert seed64(0, purpose="a|0", step=1) != seed64(0, purpose="a", step=1)


def test_the_numbers_never_change() -> None:
    """A run of an older version must be repeatable: these are part of the format."""
    assert seed64(0) == SEED64
    assert generator(7, purpose="init", layer=2).integers(0, 1000, 4).tolist() == INTEGERS
    assert Permutation(10, 3, epoch=1)(np.arange(10)).tolist() == SHUFFLED


SEED64 = 8445825640421632194
INTEGERS = [795, 375, 681, 413]
SHUFFLED = [1, 0, 9, 6, 4, 3, 8, 5, 2, 7]


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_permutation_is_one(size: int, seed: int, epoch: int) -> None:
    values = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


def test_permutation_is_uniform_enough() -> None:
    """Where element 0 goes over many seeds: chi-square below the 99.9 % point of 15 degrees."""
    counts = np.zeros(16)
    for seed in range(1600):
        counts[Permutation(16, seed)(np.array([0]))[0]] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 37.7


def test_permutation_starts_anywhere() -> None:
    permutation = Permutation(1000, seed=1)
    whole = permutation(np.arange(1000))
    assert (permutation(np.array([[5, 999], [0, 500]])) == whole[[[5, 999], [0, 500]]]).all()
    assert permutation(np.array([], dtype=np.int64)).shape == (0,)
    assert (Permutation(1000, seed=1, epoch=1)(np.arange(1000)) != whole).any()


def test_bad_permutation() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, seed=0)
    with pytest.raises(ValueError, match="position 3 in a permutation of 3"):
        Permutation(3, seed=0)(np.array([3]))
