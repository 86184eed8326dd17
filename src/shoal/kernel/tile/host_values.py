"""Arithmetic of a tile program in C++: registers, casts, elements and sums."""

from __future__ import annotations

import numpy as np

from shoal.kernel.tile import ir
from shoal.kernel.tile.host_base import UNROLLED, bf16_bits
from shoal.kernel.tile.host_memory import MemoryWriter
from shoal.kernel.tile.ir import Register
from shoal.kernel.tile.layout import row_strides
from shoal.kernel.tile.verify import places
from shoal.kernel.tile.writer import element, literal, operation


class ValueWriter(MemoryWriter):
    """Writes registers and their operations."""

    def on_allocregister(self, one: ir.AllocRegister) -> None:
        """Registers, with what they begin with."""
        name, count = self.declare(one.out), one.out.held.num_local
        if id(one.out) in self.split:
            value = "_mm512_setzero_ps()"
            if one.fill:
                value = f"split(_mm256_set1_ps({float(one.fill)!r}f))"
            self.each(count, lambda p: f"{name}[{p}] = {value};")
            return
        dtype = one.out.dtype
        value = f"{element(dtype)}({literal(dtype, one.fill)})"
        self.each(count, lambda p: f"{name}[{p}] = {value} - {self.vector(dtype)}{{}};")

    def lanes(self, count: int, text: str) -> None:
        """A statement for each vector and lane."""
        self.put(f"for (int l = 0; l < {count}; l++)")
        self.put(f"  for (int t = 0; t < {self.threads}; t++) {text}")

    def on_view(self, one: ir.View) -> None:
        """The same bits as another type, in the same registers."""
        a, b = one.value, one.out
        source = self.joined(a)
        name = self.declare(b)
        kind, bits = element(b.dtype), b.dtype.bits
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
        """Every element as another type."""
        a, b = one.value.dtype, one.out.dtype
        source = self.joined(one.value)
        name, count = self.declare(one.out), one.out.held.num_local
        if a.narrow:
            if b.kind != "float":
                whole = np.nan_to_num(np.trunc(a.values()), posinf=2**31 - 1, neginf=-(2**31))
                table = self.static(element(b), whole)
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
            known = b.magnitudes
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
            value = f"{element(b)}({value})"
        self.lanes(count, f"{name}[l][t] = {value};")

    def on_elementwise(self, one: ir.Elementwise) -> None:
        """An expression of elements, lane by lane."""
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
                kind = element(out.dtype)
                text = f"{float(value)!r}f" if kind == "float" else str(int(value))
                operands.append((f"{kind}({text})", None))
        name, count = self.declare(out), out.held.num_local
        if uniform and count <= UNROLLED:
            vector = self.vector(out.dtype)
            for p in range(count):
                terms = [
                    f"{text}[{at[0, p]}]" if at is not None else f"({text} - {vector}{{}})"
                    for text, at in operands
                ]
                self.put(f"{name}[{p}] = {operation(one.op, *terms)};")
            return
        terms = []
        for text, at in operands:
            if at is None:
                terms.append(text)
            elif (at == np.arange(count)).all():
                terms.append(f"{text}[l][t]")
            else:
                terms.append(f"{text}[{self.static('int32_t', at.T)}[l][t]][t]")
        self.lanes(count, f"{name}[l][t] = {element(out.dtype)}({operation(one.op, *terms)});")

    def flat(self, value: Register) -> str:
        """A constant: place of each (place, lane) in the tile, row after row."""
        return self.static("int32_t", (value.held.table() @ row_strides(value.shape)).T)

    def wide(self, value: Register, name: str) -> str:
        """The number of an element, for sums."""
        if value.dtype.narrow:
            return f"{self.static('float', value.dtype.values())}[{name}[l][t]]"
        if str(value.dtype) in ("bf16", "fp16"):
            return f"from_{value.dtype}({name}[l][t])"
        return f"{name}[l][t]"

    def on_reduce(self, one: ir.Reduce) -> None:
        """Sums over a dimension."""
        a, out = one.value, one.out
        source, name = self.joined(a), self.declare(one.out)
        table = a.held.table()
        goal = (table * (np.asarray(out.shape) > 1)) @ row_strides(out.shape)
        # Of elements that several hold, the first holder's counts.
        _, first = np.unique((table @ row_strides(a.shape)).ravel(), return_index=True)
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
