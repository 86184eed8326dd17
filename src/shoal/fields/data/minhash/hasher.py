"""MinHash signatures of documents and sets, equal to those of datasketch bit by bit.

Source: Broder, On the Resemblance and Containment of Documents, 1997. ``reference.py`` has the same
in numpy: the oracle of the tests, and what is used, with one warning, where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError, ConfigError
from shoal.core.extras import import_extra
from shoal.core.native import build
from shoal.fields.data.minhash import reference

ShingleUnit: TypeAlias = Literal["words", "characters"]
"""What a shingle is a run of."""

Scheme: TypeAlias = Literal["affine32", "legacy", "datatrove"]
"""The hash functions: datasketch's; datasketch's before its version 2; or those of datatrove and
text-dedup, which are the same as the second and drawn in another order."""

Signatures: TypeAlias = npt.NDArray[np.uint32]
Hashes: TypeAlias = npt.NDArray[np.uint64]


@functools.cache
def native(*flags: str) -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once.

    Args:
        flags: further compiler flags, by which the tests build it for other processors.
    """
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        library = build(source, name="minhash", flags=flags)
    except BuildError as cause:
        warnings.warn(f"MinHash is some hundred times slower: {cause}", stacklevel=3)
        return None
    text = [c_void_p, c_void_p, c_int64, c_void_p]
    signatures: dict[str, list[Any]] = {
        "signatures": [*text, *[c_int64] * 2, *[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 2],
        "update": [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 2, c_void_p],
        "shingle_sets": [*text, c_int64, c_int64, c_void_p, c_void_p],
        "digests": [*text, c_void_p],
        "band_keys": [c_void_p, *[c_int64] * 4, c_void_p],
        "unite_equal": [c_void_p, c_void_p, c_int64, c_void_p],
        "unite_similar": [c_void_p, c_void_p, c_int64, *[c_void_p] * 4, c_double],
        "flatten": [c_void_p, c_int64],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int64 if name == "unite_similar" else None
    return library


def call(library: Any, name: str, *arguments: Any) -> Any:
    """Call a native function, or that of numpy where there is no library.

    Args:
        library: of :func:`native`.
        name: of the function.
        arguments: C-contiguous arrays, and numbers.
    """
    if library is None:
        return getattr(reference, name)(*arguments)
    return getattr(library, name)(
        *(one.ctypes.data if isinstance(one, np.ndarray) else one for one in arguments)
    )


@functools.cache
def word_points() -> npt.NDArray[np.uint8]:
    r"""A bit for each code point: whether it belongs to a word, as ``\w`` of Python's ``re``."""
    points = np.fromiter((chr(at).isalnum() for at in range(0x110000)), np.uint8, 0x110000)
    points[ord("_")] = 1
    return np.packbits(points, bitorder="little")


class DocumentTexts:
    """Documents in lower case, as the native functions read them.

    Args:
        texts: an array of strings of Arrow's, or strings; None is an empty document.

    Attributes:
        n: documents.
        data: uint8, the text of all.
        offsets: int64 [n + 1], where each begins.
    """

    def __init__(self, texts: Any) -> None:
        arrow: Any = import_extra("pyarrow", extra="fields", purpose="MinHash of documents")
        compute: Any = import_extra("pyarrow.compute", extra="fields", purpose="MinHash")
        if not isinstance(texts, arrow.Array | arrow.ChunkedArray):
            texts = arrow.array(texts, arrow.large_string())
        whole = compute.utf8_lower(compute.fill_null(texts.cast(arrow.large_string()), ""))
        if isinstance(whole, arrow.ChunkedArray):
            whole = whole.combine_chunks()
        self.n = len(whole)
        _, offsets, data = whole.buffers()
        begin = whole.offset
        empty = np.zeros(1, np.int64)
        self.offsets = (
            np.frombuffer(offsets, np.int64)[begin : begin + self.n + 1] if self.n else empty
        )
        self.data = np.frombuffer(data, np.uint8) if data else np.zeros(1, np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of text."""
        return int(self.offsets[-1] - self.offsets[0])


class MinHasher:
    """MinHash signatures with one family of hash functions.

    A signature has, for each hash function, the least value that it takes on a set. The share of
    slots in which two signatures are equal estimates the Jaccard similarity J of their sets, with
    a standard error of sqrt(J (1 - J) / num_perm).

    Args:
        num_perm: hash functions, the slots of a signature.
        seed: of the hash functions, 0 to 2^32 - 1.
        unit: a shingle is a run of ``words`` or of ``characters``.
        ngram: units of a shingle; a document of fewer has one, all of them.
        scheme: ``affine32``, of datasketch since its version 2; ``legacy``, of datasketch before;
            or ``datatrove``, of datatrove with 32 bits of SHA-1 and of text-dedup.
        library: the native functions; None for those of numpy.

    Raises:
        ConfigError: a number beyond its range.
    """

    def __init__(
        self,
        num_perm: int = 128,
        *,
        seed: int = 1,
        unit: ShingleUnit = "words",
        ngram: int = 5,
        scheme: Scheme = "affine32",
        library: Any = ...,
    ) -> None:
        for name, value, most in (
            ("num_perm", num_perm, 2**16),
            ("ngram", ngram, 1000),
            ("seed", seed + 1, 2**32),
        ):
            if not 1 <= value <= most:
                least = 0 if name == "seed" else 1
                raise ConfigError(
                    f"{name} = {value - 1 + least}: expected a number from {least} to "
                    f"{most - 1 + least}"
                )
        self.num_perm, self.unit, self.ngram = num_perm, unit, ngram
        self.a, self.b = _permutations(num_perm, seed, scheme)
        self._affine = int(scheme == "affine32")
        self._library = native() if library is ... else library

    def signatures(self, texts: Any) -> tuple[Signatures, npt.NDArray[np.int64]]:
        """Signatures of documents.

        Args:
            texts: n documents, an array of strings of Arrow's or strings.

        Returns:
            Uint32 [n, num_perm], and int64 [n] shingles of each document. A document without a word
            has none, and all its slots are 2^32 - 1.
        """
        given = DocumentTexts(texts)
        out = np.empty((given.n, self.num_perm), np.uint32)
        count = np.empty(given.n, np.int64)
        family = (self.a, self.b, self.num_perm, self._affine)
        call(self._library, "signatures", *self._given(given), *family, out, count)
        return out, count

    def of_hashes(self, sets: Sequence[Any]) -> Signatures:
        """Uint32 [n, num_perm]: signatures of sets of 32-bit hashes."""
        ends = np.cumsum([0, *map(len, sets)], dtype=np.int64)
        empty = np.empty(0, np.uint64)
        hashes = np.concatenate([empty, *(np.asarray(one, np.uint64) for one in sets)])
        out = np.full((len(sets), self.num_perm), 0xFFFFFFFF, np.uint32)
        self.lower(out, np.ascontiguousarray(hashes, np.uint64), ends)
        return out

    def lower(self, signatures: Signatures, hashes: Hashes, ends: npt.NDArray[np.int64]) -> None:
        """Put members into sets, whose signatures are changed in place.

        Args:
            signatures: uint32 [n, num_perm], contiguous; that of an empty set is all 2^32 - 1.
            hashes: uint64, 32-bit hashes of the members, set by set, contiguous.
            ends: int64 [n + 1]; those of set i are ``hashes[ends[i]:ends[i + 1]]``.
        """
        family = (self.a, self.b, self.num_perm, self._affine)
        call(self._library, "update", hashes, ends, len(signatures), *family, signatures)

    def shingle_sets(self, texts: Any) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """64-bit hashes of the shingles of documents, for exact similarities.

        Returns:
            Uint64, sorted within each document and without repetition; int64 [n], where each ends.
        """
        given = DocumentTexts(texts)
        out = np.empty(given.num_bytes + given.n + 1, np.uint64)
        ends = np.zeros(given.n, np.int64)
        call(self._library, "shingle_sets", *self._given(given), out, ends)
        return out[: ends[-1] if given.n else 0].copy(), ends

    def _given(self, texts: DocumentTexts) -> tuple[Any, ...]:
        text = (texts.data, texts.offsets, texts.n, word_points())
        return (*text, int(self.unit == "characters"), self.ngram)


def text_digests(texts: Any, library: Any = ...) -> Hashes:
    """Uint64 [n, 2]: 16 bytes of SHA-1 of the words of documents, in lower case.

    Args:
        texts: n documents.
        library: the native functions; None for those of numpy.
    """
    given = DocumentTexts(texts)
    out = np.empty((given.n, 2), np.uint64)
    library = native() if library is ... else library
    call(library, "digests", given.data, given.offsets, given.n, word_points(), out)
    return out


@functools.cache
def _permutations(num_perm: int, seed: int, scheme: Scheme) -> tuple[Hashes, Hashes]:
    prime = np.uint64(reference.PRIME)
    # Not the package's own source: the functions have to be those of the other packages.
    random = np.random.RandomState(seed)
    if scheme == "affine32":
        odd = random.randint(0, 2**31, num_perm, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
        shift = random.randint(0, 2**32, num_perm, dtype=np.uint32)
        return odd.astype(np.uint64), shift.astype(np.uint64)
    if scheme == "datatrove":
        a = random.randint(1, prime, dtype=np.uint64, size=num_perm)
        return a, random.randint(0, prime, dtype=np.uint64, size=num_perm)
    both = [
        (random.randint(1, prime, dtype=np.uint64), random.randint(0, prime, dtype=np.uint64))
        for _ in range(num_perm)
    ]
    a, b = np.array(both, np.uint64).T
    return np.ascontiguousarray(a), np.ascontiguousarray(b)
