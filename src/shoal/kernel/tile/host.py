"""C++ of a program: a block is a task of a thread pool, its threads are lanes of a vector.

Everything has a plain form, loops over places and lanes that the compiler may do what it likes
with. A product of weights of few bits has a better one: eight codes of N bits are N bytes, for
every N, so one byte permutation (``vpermb``) brings the bytes of eight threads into the eight
64-bit lanes, one instruction (``vpmultishiftqb``) cuts each lane into eight windows of 8 bits at
the bits 0, N, .. 7N, and one look-up in the table of the type's values, which ignores what the
windows hold beyond N bits, makes them bf16. All constants follow from the layouts and from the
type; there is no case of a width.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025, section 7; the recipe for AVX-512 is ours.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from shoal.core.errors import KernelError
from shoal.core.native import cpu_flags
from shoal.kernel.planes.engines import tiles_granted
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import (
    Expr,
    Global,
    Program,
    Register,
    Shared,
    number,
    reads,
    walk,
    writes,
)
from shoal.kernel.tile.target import HOST
from shoal.kernel.tile.types import TileType, tile_type
from shoal.kernel.tile.verify import places

__all__ = ["NEEDS", "Unpack", "build_host", "host_source"]

Unpack = Literal["recipe", "generic"]

_Weights = Callable[[int], Callable[[int], list[str]]]
"""Of chunks a turn: begins a turn, and gives of each of its chunks the text that makes it."""

NEEDS = frozenset(
    (
        *("avx512f", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512_bf16", "avx512vbmi", "avx512_vbmi2"),
    )
)
"""Flags of the CPU that the recipe needs."""

_AHEAD = 4096  # bytes of weights that are fetched before they are needed
_UNROLLED = 64  # statements beyond which a loop is written instead

_ELEMENT = {
    "fp32": "float",
    "bf16": "uint16_t",
    "fp16": "uint16_t",
    "uint16": "uint16_t",
    "int16": "int16_t",
    "uint32": "uint32_t",
    "int32": "int32_t",
}

_PRELUDE = r"""
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


def _element(dtype: TileType) -> str:
    return _ELEMENT.get(str(dtype), "uint8_t")


def _array(values: Iterable[object]) -> str:
    return "{" + ", ".join(str(value) for value in values) + "}"


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The upper half of each fp32; exact for the values of narrow types."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.int64)


@dataclasses.dataclass
class _Stream:
    """How the bytes of each chunk of eight codes a thread lie in memory.

    Args:
        bases: first byte of each chunk, from the tile's first.
        index: byte permutation to the eight lanes; None where a thread's bytes are words of 64
            bits, and the words of the eight threads lie side by side.
    """

    bases: list[int]
    index: list[int] | None


@dataclasses.dataclass(frozen=True)
class _Room:
    """Names of the memory of a product: activations and weights as tiles, and sums."""

    rows: str
    weights: str
    sums: str


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """A product whose operands are made a round ahead: in which slot it finds them, and where."""

    slot: str
    room: _Room


def _names(size: Expr) -> set[str]:
    """Names that a number depends on."""
    if size.op == "name":
        return {str(size)}
    return set().union(*(_names(x) for x in size.args if isinstance(x, Expr)))


class _Emit:
    """Writes the C++ of one program."""

    def __init__(self, program: Program, unpack: Unpack, tiles: bool) -> None:
        if program.target != "host":
            raise KernelError(
                f"tile program {program.name} is for {program.target}; expected one for the host"
            )
        if program.threads & (program.threads - 1):
            raise KernelError(
                f"tile program {program.name}: {program.threads} threads; expected a power of two "
                "on the host, whose vectors they are lanes of"
            )
        self.program, self.unpack, self.threads = program, unpack, program.threads
        self.lines: list[str] = []
        self.constants: list[str] = []
        self.indent = "  "
        self.count = 0
        self.made_by = {id(v): one for one in walk(program.body) for v in writes(one)}
        self.uses: dict[int, int] = {}
        for one in walk(program.body):
            for value in reads(one):
                self.uses[id(value)] = self.uses.get(id(value), 0) + 1
        self.names: dict[int, str] = {}
        self.fused: set[int] = set()
        self.fast: dict[int, tuple[ir.LoadGlobal | None, _Stream | None]] = {}
        self.split: set[int] = set()
        self.home: dict[int, int] = {}  # value -> the body in which it is made
        self.nests: dict[int, tuple[ir.For, ...]] = {}  # product -> the loops around it
        self._plan(program.body, ())
        self._plan_split()
        self.tiles = self._plan_tiles() if tiles else None
        self.ahead: dict[int, _Ahead] = {}

    # What is written in a better form.

    def _plan(self, body: list[ir.Instruction], nest: tuple[ir.For, ...] | None) -> None:
        for at, one in enumerate(body):
            self.home |= {id(value): id(body) for value in writes(one)}
            if isinstance(one, ir.For | ir.While | ir.If):
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

    def _plan_weights(self, value: Register, before: Sequence[ir.Instruction]) -> _Stream | None:
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
        return _Stream(
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
        found = shapes.pop() if len(shapes) == 1 else (0, 0)
        return found if 0 < found[0] <= 16 and found[1] % 4 == 0 else None

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
            and all(_names(loop.count) <= known for loop in nest)
            and all(
                _names(size) <= known | variables
                for load in loads
                for size in (*load.offsets, *load.source.strides)
            )
            and not any(isinstance(x, ir.StoreGlobal) for x in walk(nest[0].body))
        )

    # Pieces of text.

    def put(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def name(self, value: Register) -> str:
        return self.names.get(id(value), f"r_{value.name}")

    def vector(self, dtype: TileType) -> str:
        return f"Vec<{_element(dtype)}, {self.threads}>::type"

    def declare(self, value: Register, name: str | None = None) -> str:
        name = name or self.name(value)
        kind = "__m512" if id(value) in self.split else self.vector(value.dtype)
        self.put(f"{kind} {name}[{value.held.num_local}];")
        return name

    def each(self, count: int, text: Callable[[object], str]) -> None:
        """A statement for each place, written out if there are few."""
        if count <= _UNROLLED:
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
                return _array(text(one) for one in part)
            if kind in ("float", "double"):
                return _array(
                    "NAN"
                    if np.isnan(x)
                    else f"{'-' if x < 0 else ''}INFINITY"
                    if np.isinf(x)
                    else repr(float(x))
                    for x in part
                )
            return _array(int(x) for x in part)

        self.constants.append(f"alignas(64) static const {kind} {name}{shape} = {text(values)};")
        return name

    def joined(self, value: Register) -> str:
        """The name of a value in its plain form."""
        if id(value) not in self.split:
            return self.name(value)
        name, count = self.fresh("j"), value.held.num_local
        self.put(f"{self.vector(value.dtype)} {name}[{count}];")
        source = self.name(value)
        self.each(
            count, lambda p: f"{name}[{p}] = ({self.vector(value.dtype)})join({source}[{p}]);"
        )
        return name

    # The program.

    def source(self) -> str:
        program = self.program
        given = [f"void* p_{p.name}" for p in program.pointers]
        given += [f"int64_t {name}" for name in program.scalars]
        blocks = [f"block{d}" for d in range(len(program.grid))]
        self.body(program.body)
        head = ", ".join([*given, *(f"int64_t {block}" for block in blocks)])
        inner = [*self.constants, f"static void {program.name}_block({head}) {{"]
        if program.shared_bytes:
            inner.append(f"  alignas(64) unsigned char shared[{program.shared_bytes}];")
        inner += [*self.lines, "}", ""]
        calls = ", ".join([*(f"p_{p.name}" for p in program.pointers), *program.scalars, *blocks])
        outer = [f'extern "C" void {program.name}({", ".join(given)}) {{']
        if self.tiles:
            wide, high = self.tiles
            outer += ["#pragma omp parallel", "  {", f"  configure({wide}, {high});"]
            outer.append("#pragma omp for schedule(static)")
        else:
            outer.append("#pragma omp parallel for schedule(static)")
        for d, (block, count) in enumerate(zip(blocks, program.grid, strict=True)):
            outer.append(f"{'  ' * (d + 1)}for (int64_t {block} = 0; {block} < {count}; {block}++)")
        outer.append(f"{'  ' * (len(blocks) + 1)}{program.name}_block({calls});")
        if self.tiles:
            outer += ["  _tile_release();", "  }"]
        outer += ["}", ""]
        return "\n".join([*inner, *outer])

    def body(self, body: list[ir.Instruction]) -> None:
        for one in body:
            if id(one) in self.fused:
                continue
            found = getattr(self, f"on_{type(one).__name__.lower()}", None)
            if found is not None:
                found(one)

    def inside(self, body: list[ir.Instruction]) -> None:
        indent, self.indent = self.indent, self.indent + "  "
        self.body(body)
        self.indent = indent

    # Control.

    def assign(self, target: str, value: ir.Value) -> None:
        if isinstance(value, Expr):
            self.put(f"{target} = {value};")
            return
        source = self.name(value)
        if source != target:
            self.each(value.held.num_local, lambda p: f"{target}[{p}] = {source}[{p}];")

    def begin(self, value: ir.Value, init: ir.Value) -> None:
        if isinstance(value, Expr):
            self.put(f"int64_t {value} = {init};")
        else:
            self.assign(self.declare(value), init)

    def rounds(self, one: ir.For | ir.While) -> None:
        targets = [
            self.name(c.argument) if isinstance(c.argument, Register) else str(c.argument)
            for c in one.carried
        ]
        # Where one value goes to another's place, all are read before any is written.
        late: list[tuple[str, str, int]] = []
        for target, c in zip(targets, one.carried, strict=True):
            source = c.yielded
            if isinstance(source, Register):
                if self.name(source) == target or self.name(source) not in targets:
                    continue
                name = self.declare(source, self.fresh("t"))
                self.assign(name, source)
                late.append((target, name, source.held.num_local))
            elif len(targets) > 1:
                name = self.fresh("t")
                self.put(f"const int64_t {name} = {source};")
                late.append((target, name, 0))
        done = {target for target, _, _ in late}
        for target, c in zip(targets, one.carried, strict=True):
            if target not in done:
                self.assign(target, c.yielded)
        for target, name, count in late:
            if count:
                self.copy(target, name, count)
            else:
                self.put(f"{target} = {name};")

    def copy(self, target: str, source: str, count: int) -> None:
        self.each(count, lambda p: f"{target}[{p}] = {source}[{p}];")

    def end(self, one: ir.For | ir.While) -> None:
        for c in one.carried:
            if isinstance(c.result, Register) and isinstance(c.argument, Register):
                self.names[id(c.result)] = self.name(c.argument)
            else:
                self.put(f"const int64_t {c.result} = {c.argument};")

    def on_for(self, one: ir.For) -> None:
        for inner in walk(one.body) if self.tiles else ():
            if (
                isinstance(inner, ir.Dot)
                and self.nests.get(id(inner), ())[:1] == (one,)
                and self._may_run_ahead(inner)
            ):
                self.run_ahead(inner)
        for c in one.carried:
            self.begin(c.argument, c.init)
        i = one.variable
        self.put(f"for (int64_t {i} = 0; {i} < {one.count}; {i}++) {{")
        self.inside(one.body)
        self.indent += "  "
        self.rounds(one)
        self.indent = self.indent[:-2]
        self.put("}")
        self.end(one)

    def on_while(self, one: ir.While) -> None:
        for c in one.carried:
            self.begin(c.argument, c.init)
        self.put(f"while ({one.condition}) {{")
        self.inside(one.body)
        self.indent += "  "
        self.rounds(one)
        self.indent = self.indent[:-2]
        self.put("}")
        self.end(one)

    def on_if(self, one: ir.If) -> None:
        for c in one.carried:
            if isinstance(c.result, Register):
                self.declare(c.result)
            else:
                self.put(f"int64_t {c.result};")
        for head, body, first in (
            (f"if ({one.condition}) {{", one.body, True),
            ("} else {", one.otherwise, False),
        ):
            self.put(head)
            self.inside(body)
            self.indent += "  "
            for c in one.carried:
                target = self.name(c.result) if isinstance(c.result, Register) else str(c.result)
                value = c.init if first else c.yielded
                if isinstance(value, Register):
                    source = self.joined(value)
                    self.copy(target, source, value.held.num_local)
                else:
                    self.put(f"{target} = {value};")
            self.indent = self.indent[:-2]
        self.put("}")

    # Memory.

    def on_globalview(self, one: ir.GlobalView) -> None:
        kind = _element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)p_{one.out.pointer.name};")

    def rows(self, value: Register) -> str | None:
        """How a tile lies in memory: lanes side by side, all at one place, or neither."""
        table = value.held.table()
        steps = table - table[:1]
        lanes = np.arange(self.threads)[:, None]
        if not steps.any():
            return "same"
        if not steps[..., :-1].any() and (steps[..., -1] == lanes).all():
            return "row"
        return None

    def place(
        self,
        strides: Sequence[Expr],
        offsets: Sequence[Expr],
        index: Sequence[int],
    ) -> Expr:
        """Place of an element: offsets are of all dimensions, the index of the last ones."""
        pad = len(offsets) - len(index)
        out = number(0)
        for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
            out = out + (offset + (int(index[d - pad]) if d >= pad else 0)) * stride
        return out

    def generic(
        self,
        value: Register,
        view: Global,
        offsets: Sequence[Expr],
        masked: bool,
        text: Callable[[str, str, str], str],
    ) -> None:
        """Element by element: ``text(place, lane, address in elements or bits)``."""
        table = value.held.table().transpose(1, 0, 2)
        name = self.static("int32_t", table)
        pad = len(offsets) - table.shape[2]
        self.put(f"for (int l = 0; l < {table.shape[0]}; l++)")
        self.put(f"  for (int t = 0; t < {self.threads}; t++) {{")
        at = []
        inside = []
        for d, offset in enumerate(offsets):
            tail = f" + {name}[l][t][{d - pad}]" if d >= pad else ""
            self.put(f"    const int64_t d{d} = {offset}{tail};")
            at.append(f"d{d} * ({view.strides[d]})")
            inside.append(f"d{d} >= 0 && d{d} < {view.shape[d]}")
        self.put(f"    const int64_t at = {' + '.join(at)};")
        keep = " && ".join(inside) if masked else "true"
        self.put("    " + text("l", "t", keep))
        self.put("  }")

    def on_loadglobal(self, one: ir.LoadGlobal) -> None:
        out, view = one.out, one.source
        name, bits = self.declare(out), view.dtype.bits
        way = self.rows(out)
        count = out.held.num_local
        plain = bits % 8 == 0 and not view.in_bits and not one.masked and count <= _UNROLLED
        if plain and (way == "same" or (way == "row" and view.strides[-1].constant == 1)):
            table = out.held.table()[0]
            for p in range(count):
                at = self.place(view.strides, one.offsets, table[p])
                if way == "row":
                    self.put(f"std::memcpy(&{name}[{p}], {view.name} + {at}, sizeof {name}[{p}]);")
                else:
                    self.put(f"{name}[{p}] = {view.name}[{at}] - {self.vector(out.dtype)}{{}};")
            return
        if bits % 8 or view.in_bits:
            unit = "" if view.in_bits else f" * {bits}"
            kind = _element(out.dtype)
            read = f"from_bits<{kind}>(get_bits((const uint8_t*){view.name}, at{unit}, {bits}))"
        else:
            read = f"{view.name}[at]"
        self.generic(
            out,
            view,
            one.offsets,
            one.masked,
            lambda p, t, keep: f"{name}[{p}][{t}] = {keep} ? {read} : {_element(out.dtype)}(0);",
        )

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        value, view = one.value, one.target
        name = self.joined(value)
        count = value.held.num_local
        whole = self.rows(value) == "row" and view.strides[-1].constant == 1
        if whole and not view.in_bits and count <= _UNROLLED:
            table = value.held.table()[0]
            last = value.held.table()[-1, -1]
            if one.masked:
                pad = len(one.offsets) - len(last)
                inside = " && ".join(
                    f"{offset + (int(last[d - pad]) if d >= pad else 0)} < {view.shape[d]}"
                    for d, offset in enumerate(one.offsets)
                )
                self.put(f"if ({inside}) {{")
            for p in range(count):
                at = self.place(view.strides, one.offsets, table[p])
                self.put(f"std::memcpy({view.name} + {at}, &{name}[{p}], sizeof {name}[{p}]);")
            if not one.masked:
                return
            self.put("} else {")
        unit = f"(at / {value.dtype.bits})" if view.in_bits else "at"
        self.generic(
            value,
            view,
            one.offsets,
            one.masked,
            lambda p, t, keep: f"if ({keep}) {view.name}[{unit}] = {name}[{p}][{t}];",
        )
        if whole and not view.in_bits and count <= _UNROLLED:
            self.put("}")

    def on_allocshared(self, one: ir.AllocShared) -> None:
        kind = _element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)(shared + {one.out.address});")

    def swizzled(self, tensor: Shared, at: str) -> str:
        if tensor.layout.swizzle is None:
            return at
        width, base, shift = tensor.layout.swizzle
        return f"({at} ^ ((({at} >> {base + shift}) & {(1 << width) - 1}) << {base}))"

    def shared_loop(
        self, value: Register, tensor: Shared, offsets: Sequence[Expr], text: Callable[[str], str]
    ) -> None:
        table = value.held.table().transpose(1, 0, 2)
        pad = len(offsets) - table.shape[2]
        strides = np.array(tensor.layout.strides)
        name = self.static("int32_t", (table * strides[pad:]).sum(-1))
        base = self.place([number(int(s)) for s in strides], offsets, [0] * table.shape[2])
        self.put(f"for (int l = 0; l < {table.shape[0]}; l++)")
        self.put(f"  for (int t = 0; t < {self.threads}; t++) {{")
        self.put(f"    const int64_t at = {base} + {name}[l][t];")
        self.put("    " + text(self.swizzled(tensor, "at")))
        self.put("  }")

    def on_loadshared(self, one: ir.LoadShared) -> None:
        name = self.declare(one.out)
        self.shared_loop(
            one.out, one.source, one.at, lambda at: f"{name}[l][t] = {one.source.name}[{at}];"
        )

    def on_storeshared(self, one: ir.StoreShared) -> None:
        name = self.joined(one.value)
        self.shared_loop(
            one.value, one.target, one.at, lambda at: f"{one.target.name}[{at}] = {name}[l][t];"
        )

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        # The program waits before it reads: a copy at once is one that arrives early.
        names = [self.fresh("c") for _ in one.shape]
        for name, size in zip(names, one.shape, strict=True):
            self.put(f"for (int64_t {name} = 0; {name} < {size}; {name}++)")
        index = [Expr("name", (name,)) for name in names]

        def at(offsets: Sequence[Expr], strides: Sequence[Expr]) -> Expr:
            pad = len(offsets) - len(index)
            out = number(0)
            for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
                out = out + (offset + index[d - pad] if d >= pad else offset) * stride
            return out

        strides = [number(s) for s in one.target.layout.strides]
        inside = "true"
        if one.masked:
            pad = len(one.offsets) - len(index)
            inside = " && ".join(
                f"({offset + index[d - pad] if d >= pad else offset}) < {one.source.shape[d]}"
                for d, offset in enumerate(one.offsets)
            )
        self.put(
            f"  {{ const int64_t to = {at(one.at, strides)}, "
            f"from = {at(one.offsets, one.source.strides)};"
        )
        if one.source.in_bits:
            raise KernelError(
                f"tile program {self.program.name}: CopyAsync of a view with strides in bits; "
                "expected strides in elements"
            )
        self.put(
            f"    {one.target.name}[{self.swizzled(one.target, 'to')}] = "
            f"{inside} ? {one.source.name}[from] : {_element(one.target.dtype)}(0); }}"
        )

    # Arithmetic.

    def on_allocregister(self, one: ir.AllocRegister) -> None:
        name, count = self.declare(one.out), one.out.held.num_local
        if id(one.out) in self.split:
            value = "_mm512_setzero_ps()"
            if one.fill:
                value = f"split(_mm256_set1_ps({float(one.fill)!r}f))"
            self.each(count, lambda p: f"{name}[{p}] = {value};")
            return
        dtype = one.out.dtype
        if dtype.narrow:
            value = str(int(dtype.encode(np.array(one.fill))))
        elif dtype.kind != "float":
            value = str(int(one.fill))
        elif str(dtype) == "fp32":
            value = repr(float(one.fill)) + "f"
        else:
            value = f"to_{dtype}({float(one.fill)!r}f)"
        kind = _element(dtype)
        self.each(count, lambda p: f"{name}[{p}] = {kind}({value}) - {self.vector(dtype)}{{}};")

    def lanes(self, count: int, text: str) -> None:
        self.put(f"for (int l = 0; l < {count}; l++)")
        self.put(f"  for (int t = 0; t < {self.threads}; t++) {text}")

    def on_view(self, one: ir.View) -> None:
        a, b = one.value, one.out
        source = self.joined(a)
        name = self.declare(b)
        kind, bits = _element(b.dtype), b.dtype.bits
        self.put(f"for (int t = 0; t < {self.threads}; t++) {{")
        self.put(f"  uint8_t s[{a.thread_bits // 8}];")
        self.put(
            f"  for (int l = 0; l < {a.held.num_local}; l++) "
            f"put_bits(s, l * {a.dtype.bits}, {a.dtype.bits}, bits_of({source}[l][t]));"
        )
        self.put(
            f"  for (int l = 0; l < {b.held.num_local}; l++) "
            f"{name}[l][t] = from_bits<{kind}>(get_bits(s, l * {bits}, {bits}));"
        )
        self.put("}")

    def on_cast(self, one: ir.Cast) -> None:
        a, b = one.value.dtype, one.out.dtype
        source = self.joined(one.value)
        name, count = self.declare(one.out), one.out.held.num_local
        if a.narrow:
            if b.kind != "float":
                whole = np.nan_to_num(np.trunc(a.values()), posinf=2**31 - 1, neginf=-(2**31))
                table = self.static(_element(b), whole)
            elif str(b) == "fp32":
                table = self.static("float", a.values())
            else:
                kind = np.float16 if str(b) == "fp16" else np.float32
                with np.errstate(over="ignore"):
                    values = a.values().astype(kind)
                half = values.view(np.uint16) if kind is np.float16 else bf16_bits(values)
                table = self.static("uint16_t", half)
            self.lanes(count, f"{name}[l][t] = {table}[{source}[l][t]];")
            return
        value = f"{source}[l][t]"
        if str(a) in ("bf16", "fp16"):
            if str(a) == "fp16" and self.threads == 8 and str(b) == "fp32":
                self.put("#ifdef __F16C__")
                self.each(
                    count,
                    lambda p: (
                        f"{name}[{p}] = ({self.vector(b)})_mm256_cvtph_ps((__m128i){source}[{p}]);"
                    ),
                )
                self.put("#else")
                self.lanes(count, f"{name}[l][t] = from_fp16({value});")
                self.put("#endif")
                return
            value = f"from_{a}({value})"
        if b.narrow and b.kind == "float":
            known = b.values()[: 2 ** (b.bits - 1)]
            known = known[np.isfinite(known)]
            table = self.static("double", known)
            value = f"nearest_code({value}, {table}, {len(known)}, {b.bits})"
        elif b.narrow:
            low, high = b.values().min(), b.values().max()
            value = (
                f"uint8_t(int(std::fmin(std::fmax(std::nearbyint(double({value})), {low}), {high}))"
                f" & {2**b.bits - 1})"
            )
        elif str(b) in ("bf16", "fp16"):
            value = f"to_{b}(float({value}))"
        else:
            value = f"{_element(b)}({value})"
        self.lanes(count, f"{name}[l][t] = {value};")

    def on_elementwise(self, one: ir.Elementwise) -> None:
        out = one.out
        operands: list[tuple[str, np.ndarray | None]] = []
        uniform = True
        for value in one.inputs:
            if isinstance(value, Register):
                at = places(value.held, out.held)
                assert at is not None
                uniform &= bool((at == at[:1]).all())
                operands.append((self.joined(value), at))
            else:
                kind = _element(out.dtype)
                text = f"{float(value)!r}f" if kind == "float" else str(int(value))
                operands.append((f"{kind}({text})", None))
        name, count = self.declare(out), out.held.num_local
        sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}

        def result(a: str, b: str) -> str:
            if one.op in ("min", "max"):
                return f"{a} {'<' if one.op == 'min' else '>'} {b} ? {a} : {b}"
            return f"{a} {sign[one.op]} {b}"

        if uniform and count <= _UNROLLED:
            vector = self.vector(out.dtype)
            for p in range(count):
                terms = [
                    f"{text}[{at[0, p]}]" if at is not None else f"({text} - {vector}{{}})"
                    for text, at in operands
                ]
                self.put(f"{name}[{p}] = {result(*terms)};")
            return
        terms = []
        for text, at in operands:
            if at is None:
                terms.append(text)
            elif (at == np.arange(count)).all():
                terms.append(f"{text}[l][t]")
            else:
                terms.append(f"{text}[{self.static('int32_t', at.T)}[l][t]][t]")
        self.lanes(count, f"{name}[l][t] = {_element(out.dtype)}({result(*terms)});")

    def flat(self, value: Register) -> str:
        """A constant: place of each (place, lane) in the tile, row after row."""
        weights = np.cumprod([1, *value.shape[:0:-1]])[::-1]
        return self.static("int32_t", (value.held.table() @ weights).T)

    def wide(self, value: Register, name: str) -> str:
        """The number of an element, for sums."""
        if value.dtype.narrow:
            return f"{self.static('float', value.dtype.values())}[{name}[l][t]]"
        if str(value.dtype) in ("bf16", "fp16"):
            return f"from_{value.dtype}({name}[l][t])"
        return f"{name}[l][t]"

    def on_reduce(self, one: ir.Reduce) -> None:
        a, out = one.value, one.out
        source, name = self.joined(a), self.declare(one.out)
        weights = np.cumprod([1, *out.shape[:0:-1]])[::-1]
        table = a.held.table()
        goal = (table * (np.asarray(out.shape) > 1)) @ weights
        # Of elements that several hold, the first holder's counts.
        own = np.cumprod([1, *a.shape[:0:-1]])[::-1]
        _, first = np.unique((table @ own).ravel(), return_index=True)
        mine = np.full(goal.size, -1)
        mine[first] = goal.ravel()[first]
        to, spread = self.static("int32_t", mine.reshape(goal.shape).T), self.flat(out)
        size = int(np.prod(out.shape))
        kind = "float" if out.dtype.kind == "float" else "int64_t"
        start = "0" if one.op == "add" else ("-INFINITY" if kind == "float" else "INT64_MIN")
        value = self.wide(a, source)
        step = "s[at] += x;" if one.op == "add" else "if (x > s[at]) s[at] = x;"
        self.put("{")
        self.put(f"  {kind} s[{size}];")
        self.put(f"  for (int i = 0; i < {size}; i++) s[i] = {start};")
        self.lanes(
            a.held.num_local,
            f"{{ const int at = {to}[l][t]; if (at >= 0) {{ const {kind} x = {value}; {step} }} }}",
        )
        back = f"s[{spread}[l][t]]"
        if str(out.dtype) in ("bf16", "fp16"):
            back = f"to_{out.dtype}({back})"
        self.lanes(out.held.num_local, f"{name}[l][t] = {back};")
        self.put("}")

    def on_dot(self, one: ir.Dot) -> None:
        if id(one) in self.fast:
            self.fast_dot(one)
            return
        (m, k), n = one.a.shape, one.b.shape[1]
        a, b, c = self.joined(one.a), self.joined(one.b), self.joined(one.c)
        name = self.declare(one.out)
        kind = "float" if one.c.dtype.kind == "float" else "int64_t"
        self.put("{")
        self.put(f"  static thread_local {kind} left[{m * k}], right[{k * n}];")
        for value, source, into in ((one.a, a, "left"), (one.b, b, "right")):
            at = self.flat(value)
            self.lanes(value.held.num_local, f"{into}[{at}[l][t]] = {self.wide(value, source)};")
        at = self.flat(one.out)
        self.put(f"  for (int l = 0; l < {one.out.held.num_local}; l++)")
        self.put(f"    for (int t = 0; t < {self.threads}; t++) {{")
        self.put(f"      const int i = {at}[l][t] / {n}, j = {at}[l][t] % {n};")
        self.put(f"      {kind} s = 0;")
        self.put(
            f"      for (int q = 0; q < {k}; q++) s += left[i * {k} + q] * right[q * {n} + j];"
        )
        self.put(f"      {name}[l][t] = {c}[l][t] + s;")
        self.put("    }")
        self.put("}")

    # The better form of a product.

    def fast_dot(self, one: ir.Dot) -> None:
        name = self.sums(one)
        if self.tiles:
            self.tile_dot(one, name)
        else:
            self.vector_dot(one, name)
        if id(one.out) not in self.split:
            result = self.declare(one.out)
            vector = self.vector(one.out.dtype)
            self.each(
                one.out.held.num_local, lambda p: f"{result}[{p}] = ({vector})join({name}[{p}]);"
            )

    def vector_dot(self, one: ir.Dot, name: str) -> None:
        """Each chunk of weights is multiplied as soon as it is made."""
        rows, weights, per = self.operands(one)
        vectors = one.b.shape[1] // 8
        self.turn(one.a.shape[1] // 8 // per)
        chunk = weights(per * vectors)
        for c in range(per):
            for i, row in enumerate(rows):
                at = f"{row} + {8 * per} * q + {8 * c}"
                self.put(f"const __m512i e{c}_{i} = four({at}), o{c}_{i} = four({at} + 4);")
            for v in range(vectors):
                text = chunk(c * vectors + v)
                for i in range(len(rows)):
                    s = f"{name}[{i * vectors + v}]"
                    text.append(f"{s} = dot(dot({s}, even, e{c}_{i}), odd, o{c}_{i});")
                self.block(text)
        self.over()

    def tile_dot(self, one: ir.Dot, name: str) -> None:
        """Weights are written to memory, multiplied by matrix tiles, and added to the sums.

        Tiles wait until what they read has arrived in the cache. So, where the operands of the
        next round are known, those are made before the tiles multiply what the round before made.
        """
        vectors = one.b.shape[1] // 8
        parts = [range(v, min(v + 4, vectors)) for v in range(0, vectors, 4)]
        if id(one) not in self.ahead:
            room = self.room(one, 1)
            self.make(one, room, "0")
            for part in parts:
                self.zero(part)
                self.multiply(one, room, "0", part)
                self.add_sums(one, name, room, part)
            return
        made, nest = self.ahead[id(one)], self.nests[id(one)]
        later = {str(loop.variable): self.fresh("n") for loop in nest}
        for loop in nest:
            step = " + 1" if loop is nest[-1] else ""
            self.put(f"int64_t {later[str(loop.variable)]} = {loop.variable}{step};")
        for inner, around in itertools.pairwise(reversed(nest)):
            here, there = later[str(inner.variable)], later[str(around.variable)]
            self.put(f"if ({here} == {inner.count}) {{ {here} = 0; {there}++; }}")
        self.zero(parts[0])
        self.put(f"if ({later[str(nest[0].variable)]} < {nest[0].count}) {{")
        self.indent += "  "
        for variable, known in later.items():
            self.put(f"const int64_t {variable} = {known};")
        between = self.products(made.room, made.slot, parts[0])
        self.make(one, made.room, f"1 - {made.slot}", between)
        self.indent = self.indent[:-2]
        self.put("} else {")
        self.multiply(one, made.room, made.slot, parts[0])
        self.put("}")
        self.add_sums(one, name, made.room, parts[0])
        for part in parts[1:]:
            self.zero(part)
            self.multiply(one, made.room, made.slot, part)
            self.add_sums(one, name, made.room, part)
        self.put(f"{made.slot} = 1 - {made.slot};")

    def run_ahead(self, one: ir.Dot) -> None:
        """Before the loops: memory for the operands of two rounds, and those of the first."""
        nest = self.nests[id(one)]
        made = self.ahead[id(one)] = _Ahead(self.fresh("slot"), self.room(one, 2))
        self.put(f"int {made.slot} = 0;")
        self.put(f"if ({' && '.join(f'{loop.count} > 0' for loop in nest)}) {{")
        self.indent += "  "
        for loop in nest:
            self.put(f"const int64_t {loop.variable} = 0;")
        self.make(one, made.room, "0")
        self.indent = self.indent[:-2]
        self.put("}")

    def operands(self, one: ir.Dot) -> tuple[list[str], _Weights, int]:
        """Rows of activations, weights, and how many eights of K a turn takes."""
        load, stream = self.fast[id(one)]
        (m, k), n = one.a.shape, one.b.shape[1]
        if load is not None:
            view = load.source
            pad = len(load.offsets) - 2
            left = self.fresh("a")
            at = self.place(view.strides, load.offsets, (0, 0))
            self.put(f"const uint16_t* const {left} = {view.name} + {at};")
            rows = [f"{left} + {view.strides[pad] * i}" for i in range(m)]
        else:
            source, left = self.joined(one.a), self.fresh("a")
            self.put(f"alignas(64) uint16_t {left}[{m * k}];")
            flat = self.flat(one.a)
            self.put(f"for (int l = 0; l < {m * k}; l++) {left}[{flat}[l][0]] = {source}[l][0];")
            rows = [f"{left} + {i * k}" for i in range(m)]
        # Eight chunks of words are whole words: what is written for them holds for the next.
        per = k // 8
        if stream is not None and stream.index is None:
            least = 8 // math.gcd(8, n // 8)
            per = least if per % least == 0 else per
        return rows, self.weights(one, stream), per

    def turn(self, count: int) -> None:
        """Begin to go through so many turns; ``q`` is the number of one."""
        self.put(f"for (int q = 0; q < {count}; q++) {{" if count > 1 else "{ const int q = 0;")
        self.indent += "  "

    def over(self) -> None:
        self.indent = self.indent[:-2]
        self.put("}")

    def block(self, lines: Sequence[str]) -> None:
        self.put("{")
        for line in lines:
            self.put("  " + line)
        self.put("}")

    def room(self, one: ir.Dot, slots: int) -> _Room:
        """Memory for the operands of so many products, and for sums."""
        assert self.tiles is not None
        (m, k), n = one.a.shape, one.b.shape[1]
        lines, (_, high) = k // 4, self.tiles
        room = _Room(self.fresh("x"), self.fresh("t"), self.fresh("c"))
        self.put(f"alignas(64) uint16_t {room.weights}[{slots}][{n // 8}][{lines}][32];")
        self.put(f"alignas(64) uint32_t {room.rows}[{slots}][{lines // high}][{2 * m}][{high}];")
        self.put(f"alignas(64) float {room.sums}[4][{2 * m}][16];")
        return room

    def make(
        self, one: ir.Dot, room: _Room, slot: str, between: Sequence[str] | None = None
    ) -> None:
        """Write the operands of a product as matrix tiles want them.

        A line of a tile holds, of eight outputs, two weights for each of two pairs of inputs; a
        line of activations knows one pair only. So each row is two, of even and of odd pairs,
        and of what they give every other number counts.

        Args:
            one: the product.
            room: where.
            slot: which of the room's.
            between: statements to be mixed with these, for each tile along K, number ``h``.
        """
        assert self.tiles is not None
        k, vectors, (_, high) = one.a.shape[1], one.b.shape[1] // 8, self.tiles
        rows, weights, per = self.operands(one)
        for i, row in enumerate(rows):
            at = f"{room.rows}[{slot}][q]"
            self.put(
                f"for (int q = 0; q < {k // 4 // high}; q++) "
                f"deal<{high}>({row} + {4 * high} * q, {at}[{2 * i}], {at}[{2 * i + 1}]);"
            )
        turns, tiles = k // 8 // per, k // 4 // high
        if not between:
            self.turn(turns)
            self.make_turn(weights, room, slot, vectors, per)
            self.over()
            return
        whole = turns % tiles == 0
        self.put(f"for (int h = 0; h < {tiles}; h++) {{" if whole else "{")
        self.indent += "  "
        each = turns // tiles if whole else turns
        texts = (
            list(between)
            if whole
            else [f"{{ const int h = {h}; {text} }}" for h in range(tiles) for text in between]
        )
        for i in range(each):
            self.put(f"{{ const int q = {f'{each} * h + ' if whole else ''}{i};")
            self.indent += "  "
            self.make_turn(weights, room, slot, vectors, per)
            for text in texts[len(texts) * i // each : len(texts) * (i + 1) // each]:
                self.put(text)
            self.over()
        self.over()

    def make_turn(self, weights: _Weights, room: _Room, slot: str, vectors: int, per: int) -> None:
        chunk = weights(per * vectors)
        for c in range(per):
            for v in range(vectors):
                text = chunk(c * vectors + v)
                at = f"{room.weights}[{slot}][{v}][{2 * per} * q + {2 * c}]"
                text.append(f"_mm512_store_si512({at}, even);")
                text.append(f"_mm512_store_si512({at} + 32, odd);")
                self.block(text)

    def zero(self, part: range) -> None:
        self.put("fence();")
        for v in part:
            self.put(f"_tile_zero({v - part[0]});")

    def products(self, room: _Room, slot: str, part: range) -> list[str]:
        """Statements that multiply what was made: tile ``h`` along K, some vectors of outputs."""
        assert self.tiles is not None
        high, out = self.tiles[1], []
        for v in part:
            held = 5 + v % 3
            text = f"_tile_loadd({held}, {room.weights}[{slot}][{v}][{high} * h], 64); "
            text += f"_tile_dpbf16ps({v - part[0]}, 4, {held});"
            if v == part[0]:
                text = f"_tile_loadd(4, {room.rows}[{slot}][h], {4 * high}); {text}"
            out.append(text)
        return out

    def multiply(self, one: ir.Dot, room: _Room, slot: str, part: range) -> None:
        """All of these for all tiles along K."""
        assert self.tiles is not None
        self.put(f"for (int h = 0; h < {one.a.shape[1] // 4 // self.tiles[1]}; h++) {{")
        for text in self.products(room, slot, part):
            self.put("  " + text)
        self.put("}")

    def add_sums(self, one: ir.Dot, name: str, room: _Room, part: range) -> None:
        """Add what the tiles hold to the sums."""
        vectors = one.b.shape[1] // 8
        for v in part:
            self.put(f"_tile_stored({v - part[0]}, {room.sums}[{v - part[0]}], 64);")
        self.put("fence();")
        for i in range(one.a.shape[0]):
            for v in part:
                s, at = f"{name}[{i * vectors + v}]", f"{room.sums}[{v - part[0]}]"
                self.put(
                    f"{s} = _mm512_add_ps({s}, _mm512_mask_load_ps(_mm512_load_ps("
                    f"{at}[{2 * i}]), 0xaaaa, {at}[{2 * i + 1}]));"
                )

    def sums(self, one: ir.Dot) -> str:
        """Where the sums are added to: the old ones' place, if nobody needs those any more."""
        count = one.c.held.num_local
        if id(one.c) in self.split:
            here = self.home[id(one.c)] == self.home[id(one.out)]
            if self.uses[id(one.c)] == 1 and here:
                self.names[id(one.out)] = self.name(one.c)
                return self.name(one.c)
            name = self.declare(one.out)
            source = self.name(one.c)
            self.each(count, lambda p: f"{name}[{p}] = {source}[{p}];")
            return name
        source, name = self.name(one.c), self.fresh("d")
        self.put(f"__m512 {name}[{count}];")
        self.each(count, lambda p: f"{name}[{p}] = split((__m256){source}[{p}]);")
        return name

    def weights(self, one: ir.Dot, stream: _Stream | None) -> _Weights:
        """Text that makes ``even`` and ``odd``, 32 weights each, of a chunk."""
        if stream is not None:
            cast, load = self.made_by[id(one.b)], self.weight_load(one)
            assert isinstance(cast, ir.Cast)
            base = self.fresh("w")
            pad = len(load.offsets) - len(load.out.shape)
            at = self.place(load.source.strides, load.offsets, [0] * (len(load.offsets) - pad))
            self.put(f"const uint8_t* const {base} = (const uint8_t*){load.source.name} + {at};")
            if self.unpack == "recipe":
                return self.recipe(cast.value.dtype, stream, base)
            return self.extraction(cast.value.dtype, stream, base)
        source = self.joined(one.b)
        buffer, count = self.fresh("b"), one.b.held.num_local
        self.put(f"alignas(64) uint16_t {buffer}[{count // 8}][2][8][4];")
        self.lanes(count, f"{buffer}[l / 8][l & 1][t][(l & 7) >> 1] = {source}[l][t];")
        return lambda chunks: lambda c: self.buffered(f"{buffer}[{chunks} * q + {c}]")

    def weight_load(self, one: ir.Dot) -> ir.LoadGlobal:
        """The load of the bytes of a product's weights."""
        cast = self.made_by[id(one.b)]
        assert isinstance(cast, ir.Cast)
        view = self.made_by[id(cast.value)]
        load = self.made_by[id(view.value)] if isinstance(view, ir.View) else view
        assert isinstance(load, ir.LoadGlobal)
        return load

    def buffered(self, buffer: str) -> list[str]:
        return [
            f"const __m512i even = _mm512_load_si512({buffer}[0]), "
            f"odd = _mm512_load_si512({buffer}[1]);"
        ]

    def extraction(self, dtype: TileType, stream: _Stream, base: str) -> _Weights:
        """Element by element: what the recipe is compared with."""
        table = self.static("uint16_t", bf16_bits(dtype.values()))
        bits = dtype.bits
        if stream.index is None:
            # Byte b of a thread's lies in word b / 8, and these lie 64 bytes apart.
            def byte(c: int, b: str) -> str:
                place = f"({c * bits} + {b})"
                return f"[{place} / 8 * 64 + t * 8 + {place} % 8]"
        else:
            index = self.static("uint8_t", np.array(stream.index).reshape(8, 8))

            def byte(c: int, b: str) -> str:
                return f"[{stream.bases[c]} + {index}[t][{b}]]"

        def turn(chunks: int) -> Callable[[int], list[str]]:
            here = self.fresh("w")
            self.put(f"const uint8_t* const {here} = {base} + {8 * bits * chunks} * q;")

            def chunk(c: int) -> list[str]:
                buffer = self.fresh("b")
                return [
                    f"alignas(64) uint16_t {buffer}[2][8][4];",
                    "for (int t = 0; t < 8; t++)",
                    "  for (int j = 0; j < 8; j++) {",
                    f"    const int first = j * {bits};",
                    f"    uint32_t code = {here}{byte(c, '(first >> 3)')} >> (first & 7);",
                    f"    if ((first & 7) + {bits} > 8) "
                    f"code |= uint32_t({here}{byte(c, '((first >> 3) + 1)')}) "
                    "<< (8 - (first & 7));",
                    f"    {buffer}[j & 1][t][j >> 1] = {table}[code & {2**bits - 1}];",
                    "  }",
                    *self.buffered(buffer),
                ]

            return chunk

        return turn

    def constant(self, values: np.ndarray, kind: str) -> str:
        name = self.fresh("q")
        self.put(f"const __m512i {name} = _mm512_load_si512({self.static(kind, values)});")
        return name

    def recipe(self, dtype: TileType, stream: _Stream, base: str) -> _Weights:
        """Cut windows from the lanes, look up: the same for every width."""
        lookup = self.lookup(dtype)
        if stream.index is None:
            return self.words(dtype, base, lookup)
        return self.permuted(dtype, stream, base, lookup)

    def words(self, dtype: TileType, base: str, lookup: Callable[[], list[str]]) -> _Weights:
        """The lanes of a chunk are in a word, or begin in one and end in the next."""
        bits = dtype.bits
        windows = np.tile(np.arange(8) * bits, 8)
        controls: dict[int, str] = {}
        for c in range(8):
            first = bits * c % 8
            at = 8 * first if first + bits <= 8 else 0
            if at not in controls and bits < 8:
                controls[at] = self.constant(windows + at, "uint8_t")

        def turn(chunks: int) -> Callable[[int], list[str]]:
            size = bits * 8 * chunks
            here, known = self.fresh("w"), dict[int, str]()
            self.put(f"const uint8_t* const {here} = {base} + {size} * q;")

            def word(place: int) -> str:
                if place not in known:
                    name = known[place] = self.fresh("d")
                    at = f"{here} + {64 * place}"
                    self.put(f"const __m512i {name} = _mm512_loadu_si512({at});")
                    self.put(f"_mm_prefetch((const char*)({at}) + {_AHEAD}, _MM_HINT_T0);")
                return known[place]

            def chunk(c: int) -> list[str]:
                place, first = divmod(bits * c, 8)
                lanes, at = word(place), 8 * first
                if first + bits > 8:
                    lanes, at = f"_mm512_shrdi_epi64({lanes}, {word(place + 1)}, {at})", 0
                if bits < 8:
                    lanes = f"_mm512_multishift_epi64_epi8({controls[at]}, {lanes})"
                return [f"const __m512i code = {lanes};", *lookup()]

            return chunk

        return turn

    def permuted(
        self, dtype: TileType, stream: _Stream, base: str, lookup: Callable[[], list[str]]
    ) -> _Weights:
        """The bytes of a chunk are brought to their lanes."""
        bits = dtype.bits
        assert stream.index is not None
        index = self.constant(np.array(stream.index), "uint8_t")
        control = self.constant(np.tile(np.arange(8) * bits, 8), "uint8_t")
        size = max(stream.index) + 1
        mask = (1 << size) - 1

        def chunk(c: int) -> list[str]:
            at = f"{base} + {stream.bases[c]}"
            # No more bytes than there are: fewer loads then cross a line of the cache.
            if size == 64:
                load = f"_mm512_loadu_si512({at})"
            elif size > 32:
                load = f"_mm512_maskz_loadu_epi8(0x{mask:x}ull, {at})"
            elif size == 32:
                load = f"_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)({at})))"
            else:
                load = f"_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(0x{mask:x}u, {at}))"
            lanes = f"_mm512_permutexvar_epi8({index}, {load})"
            codes = lanes if bits == 8 else f"_mm512_multishift_epi64_epi8({control}, {lanes})"
            return [
                f"_mm_prefetch((const char*)({at}) + {_AHEAD}, _MM_HINT_T0);",
                f"const __m512i code = {codes};",
                *lookup(),
            ]

        return lambda chunks: chunk

    def lookup(self, dtype: TileType) -> Callable[[], list[str]]:
        """From 64 codes, whose upper bits may be anything, to bf16 in even and in odd bytes."""
        table = bf16_bits(dtype.values())
        if dtype.bits <= 5:
            # One look-up of 16 bits sees 5 bits of its index.
            words = self.constant(np.tile(table, 32 // len(table)), "uint16_t")

            def short() -> list[str]:
                return [
                    f"const __m512i even = _mm512_permutexvar_epi16(code, {words});",
                    "const __m512i odd = "
                    f"_mm512_permutexvar_epi16(_mm512_srli_epi16(code, 8), {words});",
                ]

            return short
        parts = [
            [self.constant(half[i : i + 64], "uint8_t") for i in range(0, len(half), 64)]
            for half in (table & 255, table >> 8)
        ]

        def found(tables: list[str]) -> str:
            if len(tables) == 1:
                return f"_mm512_permutexvar_epi8(code, {tables[0]})"
            pairs = [
                f"_mm512_permutex2var_epi8({tables[i]}, code, {tables[i + 1]})"
                for i in range(0, len(tables), 2)
            ]
            if len(pairs) == 1:
                return pairs[0]
            return f"_mm512_mask_blend_epi8(_mm512_movepi8_mask(code), {pairs[0]}, {pairs[1]})"

        def long() -> list[str]:
            return [
                f"const __m512i low = {found(parts[0])};",
                f"const __m512i high = {found(parts[1])};",
                "const __m512i keep = _mm512_set1_epi16(0xff);",
                # keep selects the low byte of each word: (a & keep) | (b & ~keep).
                "const __m512i even = "
                "_mm512_ternarylogic_epi64(keep, low, _mm512_slli_epi16(high, 8), 0xca);",
                "const __m512i odd = "
                "_mm512_ternarylogic_epi64(keep, _mm512_srli_epi16(low, 8), high, 0xca);",
            ]

        return long


def host_source(
    programs: Sequence[Program], *, unpack: Unpack = "recipe", tiles: bool = False
) -> str:
    """The C++ of programs, one function each: pointers, then whole numbers.

    Args:
        programs: finished ones, for the host.
        unpack: ``recipe``, or ``generic`` for an extraction bit by bit of every element.
        tiles: products use matrix tiles (AMX), which the CPU and the system must grant.

    Raises:
        KernelError: a program is for another machine.
    """
    texts = (_Emit(program, unpack, tiles).source() for program in programs)
    return "\n".join([_PRELUDE, *texts])


@functools.cache
def has_tiles() -> bool:
    """This CPU has matrix tiles for bf16, and the system lets this process use them."""
    return cpu_flags() >= {"amx_tile", "amx_bf16"} and tiles_granted()


def build_host(
    programs: Sequence[Program],
    *,
    name: str,
    unpack: Unpack = "recipe",
    tiles: bool | None = None,
) -> dict[str, Callable[..., Any]]:
    """Compile programs; name -> function of addresses, then whole numbers.

    Args:
        programs: finished ones, for the host.
        name: of the library.
        unpack: as of :func:`host_source`.
        tiles: the same; None for where there are some.

    Raises:
        KernelError: a program is for another machine.
        BuildError: there is no compiler.
    """
    import torch  # noqa: F401 - brings the OpenMP runtime that the library shares

    from shoal.core.native import build
    from shoal.kernel.native import FLAGS

    tiles = has_tiles() if tiles is None else tiles
    text = host_source(programs, unpack=unpack, tiles=tiles)
    library = build(text, name=f"tile-{name}", flags=FLAGS)
    out: dict[str, Callable[..., Any]] = {}
    for program in programs:
        function = getattr(library, program.name)
        function.argtypes = [ctypes.c_void_p] * len(program.pointers)
        function.argtypes += [ctypes.c_int64] * len(program.scalars)
        function.restype = None
        out[program.name] = function
    return out
