"""The compiled functions of the models, and what stands in for them where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.sparse_coding.models import reference
from shoal.fields.data.sparse_coding.protocols import CauseTree, Floats, Ids

# Powers by vectors; what is compared with infinity or NaN is none of theirs.
_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
Ints = npt.NDArray[np.int32]


class CompiledCausesKernels:
    """Functions of ``kernel.cpp``; ``reference.py`` says what each computes.

    Args:
        native: the loaded library.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native

    def posteriors(self, logp: Floats, temperature: float, evidence: Floats) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.posteriors`."""
        numbers = c_double(temperature), c_double(reference.UNLIKELY * temperature)
        self._call("posteriors", *logp.shape, *numbers, _at(logp), _at(evidence))

    def choose(self, scores: Floats, out: Ids) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.choose`."""
        self._call("choose", *scores.shape, out.shape[1], _at(scores), _at(out))

    def sum_errors(
        self,
        p: Floats,
        gram: Floats,
        values: Floats,
        candidates: Ids,
        tree: CauseTree,
        scale: float,
        base: Floats,
        log_prior: Floats,
        out: Floats,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.sum_errors`."""
        sides = (*p.shape, candidates.shape[1], *tree.which.shape, len(values))
        given = (p, gram, values, candidates, *tree)
        rest = (base, log_prior, out)
        self._call("sum_errors", *sides, *map(_at, given), c_double(scale), *map(_at, rest))

    def sum_moments(
        self,
        values: Floats,
        candidates: Ids,
        tree: CauseTree,
        posterior: Floats,
        means: Floats,
        second: Floats,
        counts: Floats,
        weights: Floats,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.sum_moments`."""
        sides = (*means.shape, candidates.shape[1], *tree.which.shape, len(values))
        given = (values, candidates, *tree, posterior)
        self._call("sum_moments", *sides, *map(_at, (*given, means, second, counts, weights)))

    def overshoot(self, data: Floats, W: Floats, out: Floats) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.overshoot`."""
        self._call("overshoot", len(data), *W.shape, _at(data), _at(W), _at(out))

    def max_errors(
        self,
        data: Floats,
        W: Floats,
        candidates: Ids,
        sizes: Ints,
        which: Ints,
        out: Floats,
        by_magnitude: bool,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.max_errors`."""
        sides = (len(data), W.shape[1], candidates.shape[1], len(sizes), which.shape[1])
        stride = out.strides[0] // out.itemsize
        given = (_at(data), _at(W), _at(candidates), _at(sizes), _at(which))
        self._call(
            "max_errors", *sides, *given, c_void_p(out.ctypes.data), stride, int(by_magnitude)
        )

    def max_sums(
        self,
        data: Floats,
        largest: Floats,
        candidates: Ids,
        sizes: Ints,
        which: Ints,
        posterior: Floats,
        sharpness: float,
        mixed: Floats,
        seen: Floats,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.max_sums`."""
        sides = (len(data), largest.shape[1], candidates.shape[1], len(sizes), which.shape[1])
        powers = largest**sharpness
        parts = largest ** (sharpness - 1)
        given = (data, powers, parts, candidates, sizes, which, posterior)
        self._call(
            "max_sums",
            *sides,
            *map(_at, given),
            c_double(1 - 1 / sharpness),
            _at(mixed),
            _at(seen),
        )

    def slab_errors(
        self,
        p: Floats,
        square: Floats,
        gram: Floats,
        mu: Floats,
        psi: Floats,
        candidates: Ids,
        sizes: Ints,
        which: Ints,
        out: Floats,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.slab_errors`."""
        sides = (len(p), len(gram), candidates.shape[1], len(sizes), which.shape[1])
        stride = out.strides[0] // out.itemsize
        given = (p, square, gram, mu, psi, candidates, sizes, which)
        self._call("slab_errors", *sides, *map(_at, given), c_void_p(out.ctypes.data), stride)

    def slab_sums(
        self,
        p: Floats,
        gram: Floats,
        mu: Floats,
        psi: Floats,
        candidates: Ids,
        sizes: Ints,
        which: Ints,
        posterior: Floats,
        means: Floats,
        moments: Floats,
        both: Floats,
    ) -> None:
        """See :func:`~shoal.fields.data.sparse_coding.models.reference.slab_sums`."""
        sides = (len(p), len(gram), candidates.shape[1], len(sizes), which.shape[1])
        given = (p, gram, mu, psi, candidates, sizes, which, posterior, means, moments, both)
        self._call("slab_sums", *sides, *map(_at, given))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._native, name)
        function(*(c_int64(one) if isinstance(one, int) else one for one in arguments))


def _at(array: Any) -> c_void_p:
    """Where an array lies; it has to be in C order."""
    assert array.flags.c_contiguous, array.shape
    return c_void_p(array.ctypes.data)


@functools.cache
def library() -> Any:
    """The compiled functions, or those of numpy where they cannot be built, which is said once."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        return CompiledCausesKernels(build(source, name="sparse-causes", flags=_FLAGS))
    except BuildError as cause:
        warnings.warn(f"sparse coding is some fifty times slower: {cause}", stacklevel=3)
        return reference
