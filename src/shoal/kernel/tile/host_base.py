"""What writing a tile program for the host begins with: text, and what takes a better form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Register, TileProgram, reads, walk, writes
from shoal.kernel.tile.target import HOST
from shoal.kernel.tile.types import TileType, tile_type
from shoal.kernel.tile.writer import CodeWriter, element

Unpack = Literal["recipe", "generic"]

Weights = Callable[[int], Callable[[int], list[str]]]
"""Of chunks a turn: begins a turn, and gives of each of its chunks the text that makes it."""

NEEDS = frozenset(
    (
        *("avx512f", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512_bf16", "avx512vbmi", "avx512_vbmi2"),
    )
)
"""Flags of the CPU that the recipe needs."""

AHEAD = 4096  # bytes of weights that are fetched before they are needed
UNROLLED = 64  # statements beyond which a loop is written instead

PRELUDE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

template <class E, int T> struct Vec {
  typedef E type __attribute__((vector_size(T * sizeof(E))));
};
template <class E> inline uint32_t bits_of(E x) {
  uint32_t out = 0;
  std::memcpy(&out, &x, sizeof x);
  return out;
}
template <class E> inline E from_bits(uint32_t x) {
  E out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}
inline void put_bits(uint8_t* s, int64_t at, int n, uint32_t x) {
  for (int i = 0; i < n; i++, at++)
    s[at >> 3] = uint8_t((s[at >> 3] & ~(1u << (at & 7))) | (((x >> i) & 1u) << (at & 7)));
}
inline uint32_t get_bits(const uint8_t* s, int64_t at, int n) {
  uint32_t out = 0;
  for (int done = 0; done < n;) {
    const int skip = int((at + done) & 7), take = n - done < 8 - skip ? n - done : 8 - skip;
    out |= ((uint32_t(s[(at + done) >> 3]) >> skip) & ((1u << take) - 1)) << done;
    done += take;
  }
  return out;
}
inline float from_bf16(uint16_t x) { return from_bits<float>(uint32_t(x) << 16); }
inline uint16_t to_bf16(float x) {
  const uint32_t b = bits_of(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return uint16_t((b >> 16) | 0x40);
  return uint16_t((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
}
inline float from_fp16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, power = (x >> 10) & 31, rest = x & 1023;
  if (power == 31) return from_bits<float>(sign | 0x7f800000u | rest << 13);
  const float size = power ? std::ldexp(float(rest + 1024), int(power) - 25)
                           : std::ldexp(float(rest), -24);
  return sign ? -size : size;
}
inline uint16_t to_fp16(float x) {
  const uint16_t sign = uint16_t((bits_of(x) >> 16) & 0x8000);
  const float size = std::fabs(x);
  if (size != size) return sign | 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  int power;
  std::frexp(size, &power);
  if (power < -13) return sign | uint16_t(std::nearbyint(std::ldexp(size, 24)));
  // 1024 + rest, or 2048 where it is rounded up to the next power: the sum carries by itself.
  const int whole = int(std::nearbyint(std::ldexp(size, 11 - power)));
  return sign | uint16_t(((power + 14) << 10) + whole - 1024);
}
// Nearest of `count` growing magnitudes, ties to even, beyond the last the last.
inline uint8_t nearest_code(float x, const double* known, int count, int bits) {
  const double size = std::fabs(double(x));
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    const double between = (known[middle] + known[middle + 1]) / 2;
    if (size < between || (size == between && middle % 2 == 0)) high = middle;
    else low = middle + 1;
  }
  return uint8_t(low | (std::signbit(x) ? 1 << (bits - 1) : 0));
}
#ifdef __AVX512BF16__
inline __m512i four(const uint16_t* at) {
  long long word;
  std::memcpy(&word, at, 8);
  return _mm512_set1_epi64(word);
}
inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
// Two partial sums of each thread, in one register, and their sum.
inline __m256 join(__m512 x) {
  const __m512 odd = _mm512_castsi512_ps(_mm512_srli_epi64(_mm512_castps_si512(x), 32));
  const __m512 sum = _mm512_add_ps(x, odd);
  return _mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_castps_si512(sum)));
}
inline __m512 split(__m256 x) {
  return _mm512_castsi512_ps(_mm512_cvtepu32_epi64(_mm256_castps_si256(x)));
}
#endif
#ifdef __AMX_BF16__
// The intrinsics of tiles do not tell the compiler what memory they touch.
inline void fence() { asm volatile("" ::: "memory"); }
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
// Tiles 0 to 3 are sums, 4 activations, 5 to 7 weights.
inline void configure(int wide, int high) {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.rows[i] = uint8_t(i < 5 ? wide : high);
    config.bytes[i] = uint16_t(i == 4 ? 4 * high : 64);
  }
  _tile_loadconfig(&config);
}
// Pairs of numbers, by turns.
template <int N> inline void deal(const uint16_t* x, uint32_t* even, uint32_t* odd) {
  for (int i = 0; i < N; i += 8) {
    const __mmask8 some = __mmask8(N - i < 8 ? (1 << (N - i)) - 1 : 255);
    const __m512i pairs = _mm512_maskz_loadu_epi64(some, x + 4 * i);
    _mm512_mask_cvtepi64_storeu_epi32(even + i, some, pairs);
    _mm512_mask_cvtepi64_storeu_epi32(odd + i, some, _mm512_srli_epi64(pairs, 32));
  }
}
#endif

}  // namespace
"""


def array(values: Iterable[object]) -> str:
    """Values as an initialiser in C++."""
    return "{" + ", ".join(str(value) for value in values) + "}"


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The upper half of each fp32; exact for the values of narrow types."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.int64)


@dataclasses.dataclass
class CodeStream:
    """How the bytes of each chunk of eight codes a thread lie in memory.

    Args:
        bases: first byte of each chunk, from the tile's first.
        index: byte permutation to the eight lanes; None where a thread's bytes are words of 64
            bits, and the words of the eight threads lie side by side.
    """

    bases: list[int]
    index: list[int] | None


@dataclasses.dataclass(frozen=True)
class ProductBuffers:
    """Names of the memory of a product: activations and weights as tiles, and sums."""

    rows: str
    weights: str
    sums: str


@dataclasses.dataclass(frozen=True)
class PipelinedProduct:
    """A product whose operands are made a round ahead: in which slot it finds them, and where."""

    slot: str
    room: ProductBuffers


def names_of(size: Expr) -> set[str]:
    """Names that a number depends on."""
    if size.op == "name":
        return {str(size)}
    return set().union(*(names_of(x) for x in size.args if isinstance(x, Expr)))


class ProgramWriter(CodeWriter):
    """State of the writing of one program, and pieces of text."""

    target = "host"

    def __init__(self, program: TileProgram, unpack: Unpack, tiles: bool) -> None:
        super().__init__(program)
        if program.threads & (program.threads - 1):
            raise KernelError(
                f"tile program {program.name}: {program.threads} threads; expected a power of two "
                "on the host, because threads are vector lanes there"
            )
        self.unpack = unpack
        self.constants: list[str] = []
        self.made_by = {id(v): one for one in walk(program.body) for v in writes(one)}
        self.uses: dict[int, int] = {}
        for one in walk(program.body):
            for value in reads(one):
                self.uses[id(value)] = self.uses.get(id(value), 0) + 1
        self.fast: dict[int, tuple[ir.LoadGlobal | None, CodeStream | None]] = {}
        self.split: set[int] = set()
        self.home: dict[int, int] = {}  # value -> the body in which it is made
        self.nests: dict[int, tuple[ir.For, ...]] = {}  # product -> the loops around it
        self._plan(program.body, ())
        self._plan_split()
        self.tiles = self._plan_tiles() if tiles else None
        self.ahead: dict[int, PipelinedProduct] = {}

    # What is written in a better form.

    def _plan(self, body: list[ir.Instruction], nest: tuple[ir.For, ...] | None) -> None:
        for at, one in enumerate(body):
            self.home |= {id(value): id(body) for value in writes(one)}
            if isinstance(one, ir.Control):
                for c in one.carried:
                    if not isinstance(one, ir.If):
                        self.home[id(c.argument)] = id(one.body)
                around = None
                if nest is not None and isinstance(one, ir.For):
                    around = (*nest, one)
                self._plan(one.body, around)
            if isinstance(one, ir.If):
                self._plan(one.otherwise, None)
            if isinstance(one, ir.Dot) and self._is_fast(one):
                before = body[:at]
                left = self._fusable(one.a, before)
                if left is not None:
                    self.fused.add(id(left))
                self.fast[id(one)] = (left, self._plan_weights(one.b, before))
                self.nests[id(one)] = nest or ()

    def _is_fast(self, one: ir.Dot) -> bool:
        bf16, fp32 = tile_type("bf16"), tile_type("fp32")
        (m, k), n = one.a.shape, one.b.shape[1]
        return (
            self.threads == HOST.warp
            and (one.a.dtype, one.b.dtype, one.c.dtype) == (bf16, bf16, fp32)
            and n % 8 == 0
            and k % 8 == 0
            and one.a.held.same(HOST.a(m, k, 1))
            and one.b.held.same(HOST.b(k, n, 1))
            and one.c.held.same(HOST.c(m, n, 1))
        )

    def _fusable(self, value: Register, before: Sequence[ir.Instruction]) -> ir.LoadGlobal | None:
        """The load of a value that only one instruction uses, of plain rows of memory."""
        one = self.made_by.get(id(value))
        if not isinstance(one, ir.LoadGlobal) or one not in before or one.masked:
            return None
        later = before[list(before).index(one) :]
        stores = any(isinstance(x, ir.StoreGlobal) for x in walk(list(later)))
        plain = one.source.strides[-1].constant == 1 and not one.source.in_bits
        return one if plain and self.uses[id(value)] == 1 and not stores else None

    def _plan_weights(self, value: Register, before: Sequence[ir.Instruction]) -> CodeStream | None:
        """The way from bytes in memory to weights, if it is load, view, cast and nothing else."""
        cast = self.made_by.get(id(value))
        if not isinstance(cast, ir.Cast) or not cast.value.dtype.narrow:
            return None
        if cast not in before or self.uses[id(value)] != 1:
            return None
        bits = cast.value.dtype.bits
        view = self.made_by.get(id(cast.value))
        load: ir.LoadGlobal | None = None
        if isinstance(view, ir.View) and view in before and self.uses[id(cast.value)] == 1:
            load = self._fusable(view.value, before)
            raw = view.value
        elif bits == 8:
            load, raw = self._fusable(cast.value, before), cast.value
        if load is None or raw.dtype.bits != 8 or any(n != 1 for n in raw.shape[:-1]):
            return None
        table = raw.held.table()[..., -1]
        chunks = table.reshape(8, -1, bits)
        bases = chunks.min(axis=(0, 2))
        inside = chunks - bases[None, :, None]
        thread, place = np.indices(table.shape)
        index = None
        if (table != place // 8 * 64 + thread * 8 + place % 8).any():
            if inside.max() >= 64 or (inside != inside[:, :1]).any():
                return None
            index = np.zeros((8, 8), dtype=np.int64)
            index[:, :bits] = inside[:, 0]
        self.fused |= {id(cast), id(load)} | ({id(view)} if view is not None else set())
        return CodeStream(
            [int(b) for b in bases], None if index is None else [int(i) for i in index.ravel()]
        )

    def _plan_split(self) -> None:
        """Sums of fast products stay two to a thread for as long as only products use them."""
        parent: dict[int, int] = {}

        def root(at: int) -> int:
            while parent.setdefault(at, at) != at:
                at = parent[at]
            return at

        members: dict[int, Register] = {}
        wanted: set[int] = set()
        for one in walk(self.program.body):
            groups: list[list[Register]] = []
            if isinstance(one, ir.Dot) and id(one) in self.fast:
                groups.append([one.c, one.out])
                wanted.add(id(one.out))
            if isinstance(one, ir.For):
                for c in one.carried:
                    values = (c.init, c.argument, c.yielded, c.result)
                    groups.append([v for v in values if isinstance(v, Register)])
            for group in groups:
                for value in group:
                    members[id(value)] = value
                    parent[root(id(group[0]))] = root(id(value))
        good = {root(at) for at in wanted}
        for at in members:
            maker = self.made_by.get(at)
            fits = isinstance(maker, ir.For | ir.AllocRegister) or id(maker) in self.fast
            if not fits:
                good.discard(root(at))
        self.split = {at for at in members if root(at) in good}

    def _plan_tiles(self) -> tuple[int, int] | None:
        """Lines of activations and of weights of a matrix tile, the same for all products."""
        shapes = set()
        for one in walk(self.program.body):
            if isinstance(one, ir.Dot) and id(one) in self.fast:
                m, k = one.a.shape
                high = max(h for h in range(1, 17) if k // 4 % h == 0)
                shapes.add((2 * m, high))
        value = shapes.pop() if len(shapes) == 1 else (0, 0)
        return value if 0 < value[0] <= 16 and value[1] % 4 == 0 else None

    def _may_run_ahead(self, one: ir.Dot) -> bool:
        """Whether the operands of the next round are known in this one."""
        nest, (left, stream) = self.nests[id(one)], self.fast[id(one)]
        if not nest or left is None or stream is None:
            return False
        views = {id(x.out) for x in self.program.body if isinstance(x, ir.GlobalView)}
        loads = (left, self.weight_load(one))
        known = {*self.program.scalars, *(f"block{d}" for d in range(len(self.program.grid)))}
        variables = {str(loop.variable) for loop in nest}
        return (
            all(id(load.source) in views for load in loads)
            and all(names_of(loop.count) <= known for loop in nest)
            and all(
                names_of(size) <= known | variables
                for load in loads
                for size in (*load.offsets, *load.source.strides)
            )
            and not any(isinstance(x, ir.StoreGlobal) for x in walk(nest[0].body))
        )

    # Pieces of text.

    def vector(self, dtype: TileType) -> str:
        """The type of a vector with a lane for each thread."""
        return f"Vec<{element(dtype)}, {self.threads}>::type"

    def storage(self, value: Register) -> str:
        return "__m512" if id(value) in self.split else self.vector(value.dtype)

    def each(self, count: int, text: Callable[[object], str]) -> None:
        """Written out if there are few."""
        if count <= UNROLLED:
            for place in range(count):
                self.put(text(place))
        else:
            self.put(f"for (int l = 0; l < {count}; l++) {text('l')}")

    def static(self, kind: str, values: np.ndarray) -> str:
        """A constant array; its name."""
        name = f"{self.program.name}_{self.fresh('k')}"
        shape = "".join(f"[{n}]" for n in values.shape)

        def text(part: np.ndarray) -> str:
            if part.ndim > 1:
                return array(text(one) for one in part)
            if kind in ("float", "double"):
                return array(
                    "NAN"
                    if np.isnan(x)
                    else f"{'-' if x < 0 else ''}INFINITY"
                    if np.isinf(x)
                    else repr(float(x))
                    for x in part
                )
            return array(int(x) for x in part)

        self.constants.append(f"alignas(64) static const {kind} {name}{shape} = {text(values)};")
        return name

    def joined(self, value: Register) -> str:
        if id(value) not in self.split:
            return self.name(value)
        name, count = self.fresh("j"), value.held.num_local
        self.put(f"{self.vector(value.dtype)} {name}[{count}];")
        source = self.name(value)
        self.each(
            count, lambda p: f"{name}[{p}] = ({self.vector(value.dtype)})join({source}[{p}]);"
        )
        return name

    def weight_load(self, one: ir.Dot) -> ir.LoadGlobal:
        """The load of the bytes of a product's weights."""
        cast = self.made_by[id(one.b)]
        assert isinstance(cast, ir.Cast)
        view = self.made_by[id(cast.value)]
        load = self.made_by[id(view.value)] if isinstance(view, ir.View) else view
        assert isinstance(load, ir.LoadGlobal)
        return load
