"""Products of a tile program in C++: with vectors, and with matrix tiles a round ahead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from shoal.kernel.tile import ir
from shoal.kernel.tile.host_base import (
    AHEAD,
    CodeStream,
    PipelinedProduct,
    ProductBuffers,
    Weights,
    bf16_bits,
)
from shoal.kernel.tile.host_values import ValueWriter
from shoal.kernel.tile.types import TileType


class ProductWriter(ValueWriter):
    """Products: plain, and the better form of one with weights of few bits."""

    def on_dot(self, one: ir.Dot) -> None:
        """A product, in its better form where it has one."""
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

    def fast_dot(self, one: ir.Dot) -> None:
        """A product by vectors, or by tiles where there are some."""
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
        with self.turn(one.a.shape[1] // 8 // per):
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
        more = f"if ({later[str(nest[0].variable)]} < {nest[0].count}) {{"
        with self.braces(more, "} else {"):
            for variable, known in later.items():
                self.put(f"const int64_t {variable} = {known};")
            between = self.products(made.room, made.slot, parts[0])
            self.make(one, made.room, f"1 - {made.slot}", between)
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
        made = self.ahead[id(one)] = PipelinedProduct(self.fresh("slot"), self.room(one, 2))
        self.put(f"int {made.slot} = 0;")
        with self.braces(f"if ({' && '.join(f'{loop.count} > 0' for loop in nest)}) {{"):
            for loop in nest:
                self.put(f"const int64_t {loop.variable} = 0;")
            self.make(one, made.room, "0")

    def operands(self, one: ir.Dot) -> tuple[list[str], Weights, int]:
        """Rows of activations, weights, and how many eights of K a turn takes."""
        load, stream = self.fast[id(one)]
        (m, k), n = one.a.shape, one.b.shape[1]
        if load is not None:
            view = load.source
            pad = len(load.offsets) - 2
            left = self.fresh("a")
            at = self.place(view.strides, load.offsets, ())
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

    def turn(self, count: int) -> AbstractContextManager[None]:
        """Lines that are gone through so many times; ``q`` is the number of a time."""
        many = f"for (int q = 0; q < {count}; q++) {{"
        return self.braces(many if count > 1 else "{ const int q = 0;")

    def block(self, lines: Sequence[str]) -> None:
        """Lines in braces."""
        with self.braces():
            for line in lines:
                self.put(line)

    def room(self, one: ir.Dot, slots: int) -> ProductBuffers:
        """Memory for the operands of so many products, and for sums."""
        assert self.tiles is not None
        (m, k), n = one.a.shape, one.b.shape[1]
        lines, (_, high) = k // 4, self.tiles
        room = ProductBuffers(self.fresh("x"), self.fresh("t"), self.fresh("c"))
        self.put(f"alignas(64) uint16_t {room.weights}[{slots}][{n // 8}][{lines}][32];")
        self.put(f"alignas(64) uint32_t {room.rows}[{slots}][{lines // high}][{2 * m}][{high}];")
        self.put(f"alignas(64) float {room.sums}[4][{2 * m}][16];")
        return room

    def make(
        self, one: ir.Dot, room: ProductBuffers, slot: str, between: Sequence[str] | None = None
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
            with self.turn(turns):
                self.make_turn(weights, room, slot, vectors, per)
            return
        whole = turns % tiles == 0
        each = turns // tiles if whole else turns
        texts = (
            list(between)
            if whole
            else [f"{{ const int h = {h}; {text} }}" for h in range(tiles) for text in between]
        )
        with self.braces(f"for (int h = 0; h < {tiles}; h++) {{" if whole else "{"):
            for i in range(each):
                with self.braces(f"{{ const int q = {f'{each} * h + ' if whole else ''}{i};"):
                    self.make_turn(weights, room, slot, vectors, per)
                    for text in texts[len(texts) * i // each : len(texts) * (i + 1) // each]:
                        self.put(text)

    def make_turn(
        self, weights: Weights, room: ProductBuffers, slot: str, vectors: int, per: int
    ) -> None:
        """Weights of one turn, made into a slot."""
        chunk = weights(per * vectors)
        for c in range(per):
            for v in range(vectors):
                text = chunk(c * vectors + v)
                at = f"{room.weights}[{slot}][{v}][{2 * per} * q + {2 * c}]"
                text.append(f"_mm512_store_si512({at}, even);")
                text.append(f"_mm512_store_si512({at} + 32, odd);")
                self.block(text)

    def zero(self, part: range) -> None:
        """Set the tiles of sums to zero."""
        self.put("fence();")
        for v in part:
            self.put(f"_tile_zero({v - part[0]});")

    def products(self, room: ProductBuffers, slot: str, part: range) -> list[str]:
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

    def multiply(self, one: ir.Dot, room: ProductBuffers, slot: str, part: range) -> None:
        """All of these for all tiles along K."""
        assert self.tiles is not None
        with self.braces(f"for (int h = 0; h < {one.a.shape[1] // 4 // self.tiles[1]}; h++) {{"):
            for text in self.products(room, slot, part):
                self.put(text)

    def add_sums(self, one: ir.Dot, name: str, room: ProductBuffers, part: range) -> None:
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
        """Where the sums are added to: the old ones' place, if those are no longer needed."""
        count = one.c.held.num_local
        if id(one.c) in self.split:
            here = self.home[id(one.c)] == self.home[id(one.out)]
            if self.uses[id(one.c)] == 1 and here:
                self.names[id(one.out)] = self.name(one.c)
                return self.name(one.c)
            name = self.declare(one.out)
            self.assign(name, one.c)
            return name
        source, name = self.name(one.c), self.fresh("d")
        self.put(f"__m512 {name}[{count}];")
        self.each(count, lambda p: f"{name}[{p}] = split((__m256){source}[{p}]);")
        return name

    def weights(self, one: ir.Dot, stream: CodeStream | None) -> Weights:
        """Text that makes ``even`` and ``odd``, 32 weights each, of a chunk."""
        if stream is not None:
            cast, load = self.made_by[id(one.b)], self.weight_load(one)
            assert isinstance(cast, ir.Cast)
            base = self.fresh("w")
            at = self.place(load.source.strides, load.offsets, ())
            self.put(f"const uint8_t* const {base} = (const uint8_t*){load.source.name} + {at};")
            if self.unpack == "recipe":
                return self.recipe(cast.value.dtype, stream, base)
            return self.extraction(cast.value.dtype, stream, base)
        source = self.joined(one.b)
        buffer, count = self.fresh("b"), one.b.held.num_local
        self.put(f"alignas(64) uint16_t {buffer}[{count // 8}][2][8][4];")
        self.lanes(count, f"{buffer}[l / 8][l & 1][t][(l & 7) >> 1] = {source}[l][t];")
        return lambda chunks: lambda c: self.buffered(f"{buffer}[{chunks} * q + {c}]")

    def buffered(self, buffer: str) -> list[str]:
        """The two vectors of a turn that a buffer holds."""
        return [
            f"const __m512i even = _mm512_load_si512({buffer}[0]), "
            f"odd = _mm512_load_si512({buffer}[1]);"
        ]

    def extraction(self, dtype: TileType, stream: CodeStream, base: str) -> Weights:
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
        """A constant vector; its name."""
        name = self.fresh("q")
        self.put(f"const __m512i {name} = _mm512_load_si512({self.static(kind, values)});")
        return name

    def recipe(self, dtype: TileType, stream: CodeStream, base: str) -> Weights:
        """Cut windows from the lanes, look up: the same for every width."""
        lookup = self.lookup(dtype)
        if stream.index is None:
            return self.words(dtype, base, lookup)
        return self.permuted(dtype, stream, base, lookup)

    def words(self, dtype: TileType, base: str, lookup: Callable[[], list[str]]) -> Weights:
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
                    self.put(f"_mm_prefetch((const char*)({at}) + {AHEAD}, _MM_HINT_T0);")
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
        self, dtype: TileType, stream: CodeStream, base: str, lookup: Callable[[], list[str]]
    ) -> Weights:
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
                f"_mm_prefetch((const char*)({at}) + {AHEAD}, _MM_HINT_T0);",
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
