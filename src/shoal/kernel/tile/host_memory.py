"""Memory of a tile program in C++: views, loads and stores of global and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.host_base import UNROLLED, ProgramWriter
from shoal.kernel.tile.ir import Expr, Global, Register, Shared
from shoal.kernel.tile.writer import element


class MemoryWriter(ProgramWriter):
    """Global and shared memory."""

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
        """Elements of global memory into registers."""
        out, view = one.out, one.source
        name, bits = self.declare(out), view.dtype.bits
        way = self.rows(out)
        count = out.held.num_local
        plain = bits % 8 == 0 and not view.in_bits and not one.masked and count <= UNROLLED
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
            kind = element(out.dtype)
            read = f"from_bits<{kind}>(get_bits((const uint8_t*){view.name}, at{unit}, {bits}))"
        else:
            read = f"{view.name}[at]"
        self.generic(
            out,
            view,
            one.offsets,
            one.masked,
            lambda p, t, keep: f"{name}[{p}][{t}] = {keep} ? {read} : {element(out.dtype)}(0);",
        )

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        """Registers into global memory, where they lie in bounds."""
        value, view = one.value, one.target
        name = self.joined(value)
        count = value.held.num_local
        whole = self.rows(value) == "row" and view.strides[-1].constant == 1
        if whole and not view.in_bits and count <= UNROLLED:
            table = value.held.table()[0]
            last = value.held.table()[-1, -1]
            if one.masked:
                self.put(f"if ({self.inside(one.offsets, last, view.shape)}) {{")
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
        if whole and not view.in_bits and count <= UNROLLED:
            self.put("}")

    def shared_loop(
        self, value: Register, tensor: Shared, offsets: Sequence[Expr], text: Callable[[str], str]
    ) -> None:
        """A loop over the elements that threads hold of a shared tensor."""
        table = value.held.table().transpose(1, 0, 2)
        pad = len(offsets) - table.shape[2]
        strides = np.array(tensor.layout.strides)
        name = self.static("int32_t", (table * strides[pad:]).sum(-1))
        base = self.place(self.shared_strides(tensor), offsets, ())
        self.put(f"for (int l = 0; l < {table.shape[0]}; l++)")
        self.put(f"  for (int t = 0; t < {self.threads}; t++) {{")
        self.put(f"    const int64_t at = {base} + {name}[l][t];")
        self.put("    " + text(self.swizzled(tensor, "at")))
        self.put("  }")

    def on_loadshared(self, one: ir.LoadShared) -> None:
        """Elements of shared memory into registers."""
        name = self.declare(one.out)
        self.shared_loop(
            one.out, one.source, one.at, lambda at: f"{name}[l][t] = {one.source.name}[{at}];"
        )

    def on_storeshared(self, one: ir.StoreShared) -> None:
        """Registers into shared memory."""
        name = self.joined(one.value)
        self.shared_loop(
            one.value, one.target, one.at, lambda at: f"{one.target.name}[{at}] = {name}[l][t];"
        )

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        """A copy from global to shared memory."""
        # The program waits before it reads: a copy at once is one that arrives early.
        names = [self.fresh("c") for _ in one.shape]
        for name, size in zip(names, one.shape, strict=True):
            self.put(f"for (int64_t {name} = 0; {name} < {size}; {name}++)")
        index = [Expr("name", (name,)) for name in names]
        to = self.place(self.shared_strides(one.target), one.at, index)
        source = self.place(one.source.strides, one.offsets, index)
        inside = self.inside(one.offsets, index, one.source.shape) if one.masked else "true"
        self.put(f"  {{ const int64_t to = {to}, from = {source};")
        if one.source.in_bits:
            raise KernelError(
                f"tile program {self.program.name}: CopyAsync of a view with strides in bits; "
                "expected strides in elements"
            )
        self.put(
            f"    {one.target.name}[{self.swizzled(one.target, 'to')}] = "
            f"{inside} ? {one.source.name}[from] : {element(one.target.dtype)}(0); }}"
        )
