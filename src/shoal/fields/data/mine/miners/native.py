"""The compiled miners, and what they hand back.

``reference.py`` has the same in Python: the oracle of the tests, and what is used, with one
warning, where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_double,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.mine.baskets import Baskets
from shoal.fields.data.mine.miners import reference
from shoal.fields.data.mine.protocols import (
    NO_LIMIT,
    Itemsets,
    MineError,
    MiningProblem,
    Target,
    TooManyError,
    too_many,
)

_FILES = ("common.cpp", "eclat.cpp", "fpgrowth.cpp", "apriori.cpp", "entry.cpp")
_TARGETS = {"all": 0, "closed": 1, "maximal": 2}
_TOO_MANY, _STOPPED, _NO_MEMORY, _OVER_BUDGET = 1, 2, 3, 4
_TICK = CFUNCTYPE(c_int32, c_double, c_int64)


class _Sets(ctypes.Structure):
    _fields_ = (
        ("sets", c_int64),
        ("length", c_int64),
        ("items", c_void_p),
        ("support", c_void_p),
        ("ends", c_void_p),
        ("work", c_int64 * 6),
        ("status", c_int32),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("baskets", c_int64),
        ("items", c_int64),
        ("begins", c_void_p),
        ("ids", c_void_p),
        ("least", c_int32),
        ("target", c_int32),
        ("max_len", c_int32),
        ("threads", c_int32),
        ("max_itemsets", c_int64),
        ("budget", c_int64),
        ("bit_density", c_double),
        ("tick", _TICK),
    )


class _Rules(ctypes.Structure):
    _fields_ = (
        ("rules", c_int64),
        ("set", c_void_p),
        ("mask", c_void_p),
        ("antecedent", c_void_p),
        ("consequent", c_void_p),
        ("status", c_int32),
    )


@functools.cache
def native(*flags: str) -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once.

    Args:
        flags: further compiler flags, by which the tests build it for other processors.
    """
    here = Path(__file__).parent
    source = "\n".join((here / name).read_text("utf-8") for name in _FILES)
    try:
        library = build(source, name="itemsets", flags=flags)
    except BuildError as cause:
        warnings.warn(f"mining itemsets is some hundred times slower: {cause}", stacklevel=3)
        return None
    for name in ("mine_apriori", "mine_eclat", "mine_fpgrowth"):
        function = getattr(library, name)
        function.argtypes, function.restype = [POINTER(_Job), POINTER(_Sets)], None
    library.free_itemsets.argtypes, library.free_itemsets.restype = [POINTER(_Sets)], None
    library.free_rules.argtypes, library.free_rules.restype = [POINTER(_Rules)], None
    library.keep_sets.argtypes = [POINTER(_Sets), c_int32, c_void_p]
    library.recount.argtypes = [POINTER(_Job), POINTER(_Sets), c_void_p]
    library.find_rules.argtypes = [POINTER(_Sets), c_double, c_int64, POINTER(_Rules)]
    library.find_rules.restype = None
    return library


class _Owner:
    """Frees what the library has allocated, once no array refers to it."""

    def __init__(self, value: Any, free: Callable[[Any], None]) -> None:
        self._value, self._free = value, free

    def __del__(self) -> None:
        self._free(byref(self._value))

    def array(self, address: int | None, size: int, kind: type[Any]) -> np.ndarray:
        """A view of some numbers."""
        if not size or not address:
            return np.empty(0, kind)
        pointed = ctypes.cast(address, POINTER(kind))
        view = np.ctypeslib.as_array(pointed, (size,))
        return np.asarray(_View(self, view))


class _View:
    """An array that keeps its owner."""

    def __init__(self, owner: _Owner, view: np.ndarray) -> None:
        self._owner = owner
        self.__array_interface__ = view.__array_interface__


def _job(problem: MiningProblem, bit_density: float, tick: Any) -> _Job:
    baskets = problem.baskets
    whole = problem.target == "all" or problem.max_len is not None
    return _Job(
        baskets=baskets.num_baskets,
        items=baskets.num_items,
        begins=baskets.begins.ctypes.data,
        ids=baskets.ids.ctypes.data,
        least=problem.least,
        target=_TARGETS["all" if whole else problem.target],
        max_len=problem.max_len or 2**31 - 1,
        threads=problem.threads,
        max_itemsets=problem.max_itemsets,
        budget=problem.budget,
        bit_density=bit_density,
        tick=tick,
    )


class Mined(NamedTuple):
    """Sets, and how many operations of each sort it took to find them."""

    itemsets: Itemsets
    work: tuple[int, ...]


def mine(name: str, problem: MiningProblem, *, direct: bool, bit_density: float = 0.0) -> Mined:
    """Run one of the compiled miners.

    Args:
        name: of the function, without ``mine_``.
        problem: what to find.
        direct: it finds closed and maximal sets by itself; else they are chosen from all.
        bit_density: of Eclat.

    Raises:
        TooManyError: more than ``max_itemsets``, or than the memory has room for.
        KeyboardInterrupt: the user stops it.
    """
    library = native()
    if library is None:
        return Mined(reference.mine(problem), (0,) * 6)
    stopped: list[BaseException] = []

    def tick(done: float, sets: int) -> int:
        try:
            problem.tick(done, sets)
        except BaseException as cause:  # an exception cannot pass through C
            stopped.append(cause)
            return 1
        return 0

    alone = problem if direct else problem.whole()
    job, out = _job(alone, bit_density, _TICK(tick)), _Sets()
    getattr(library, f"mine_{name}")(byref(job), byref(out))
    if out.status == _STOPPED and stopped:
        raise stopped[0]
    if out.status == _OVER_BUDGET:
        return Mined(Itemsets.none(problem.baskets), tuple(out.work))
    if out.status:
        raise too_many(problem, memory=out.status == _NO_MEMORY)
    owner = _Owner(out, library.free_itemsets)
    found = Itemsets(
        items=owner.array(out.items, out.length, c_int32),
        ends=owner.array(out.ends, out.sets, c_int64),
        support=owner.array(out.support, out.sets, c_int32),
        num_baskets=problem.baskets.num_baskets,
        names=problem.baskets.names,
    )
    if problem.target != "all" and (not direct or problem.max_len is not None):
        found = found.take(keep(found, problem.target))
    return Mined(found, tuple(out.work))


def _sets(found: Itemsets) -> _Sets:
    """The structure of sets that numpy holds; they must outlive it."""
    return _Sets(
        sets=len(found),
        length=len(found.items),
        items=found.items.ctypes.data,
        support=found.support.ctypes.data,
        ends=found.ends.ctypes.data,
    )


def keep(found: Itemsets, target: Target) -> np.ndarray:
    """Bool [sets]: which of all frequent sets are closed, or maximal.

    Raises:
        MineError: there is not enough memory.
    """
    library = native()
    if library is None:
        return reference.keep(found, target)
    result, sets = np.empty(len(found), np.uint8), _sets(found)
    if library.keep_sets(byref(sets), _TARGETS[target], result.ctypes.data):
        raise MineError(f"{target} sets: not enough memory to compare all sets")
    return result.view(np.bool_)


def recount(baskets: Baskets, sets: Itemsets) -> np.ndarray:
    """Int32 [sets]: in how many baskets each set is.

    Args:
        baskets: where they are counted.
        sets: quickest in lexicographic order, each with its items ascending.

    Raises:
        MineError: there is not enough memory.
    """
    library = native()
    if library is None:
        return reference.recount(baskets, sets)
    support = np.empty(len(sets), np.int32)
    problem = MiningProblem(baskets, least=1)
    job, given = _job(problem, 0.0, _TICK()), _sets(sets)
    if library.recount(byref(job), byref(given), support.ctypes.data):
        raise MineError(f"counting {len(sets)} sets again: not enough memory; use smaller shards")
    return support


class RuleParts(NamedTuple):
    """Rules, as parts of sets.

    Args:
        sets: int64 [rules], place of the set that both sides together are.
        masks: uint64 [rules], bit i is set if item i of the set is in the consequent.
        antecedent: int32 [rules], support.
        consequent: int32 [rules], support.
    """

    sets: np.ndarray
    masks: np.ndarray
    antecedent: np.ndarray
    consequent: np.ndarray


def find_rules(found: Itemsets, confidence: float, limit: int = NO_LIMIT) -> RuleParts:
    """All rules among frequent sets that have the confidence.

    Raises:
        TooManyError: more than the limit.
        MineError: a set has more than 63 items.
    """
    if len(found) and int(found.lengths.max()) > 63:
        raise MineError("rules: a set has more than 63 items; give max_len")
    library = native()
    if library is None:
        return RuleParts(*reference.find_rules(found, confidence))
    out, given = _Rules(), _sets(found)
    library.find_rules(byref(given), confidence, limit, byref(out))
    if out.status:
        raise TooManyError(
            f"rules: more than {limit:,} have a confidence of {confidence:g}; raise "
            "min_confidence or min_support, or give max_len"
        )
    owner = _Owner(out, library.free_rules)
    return RuleParts(
        owner.array(out.set, out.rules, c_int64),
        owner.array(out.mask, out.rules, c_uint64),
        owner.array(out.antecedent, out.rules, c_int32),
        owner.array(out.consequent, out.rules, c_int32),
    )
