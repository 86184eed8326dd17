"""CUDA C++ of a program: a block is a block, a thread a thread.

Every register tensor is an array of the thread; since indices are sums of digits, the place of an
element is what the thread's number says plus a constant for each place in the thread. Products
are the tensor core's ``mma.sync.m16n8k16`` of bf16, asynchronous copies ``cp.async``; codes of few
bits are cut from 32-bit words in registers. For compute capability 8.0 and later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Global, Register, Shared, TileProgram, number
from shoal.kernel.tile.target import CUDA
from shoal.kernel.tile.types import TileType, tile_type
from shoal.kernel.tile.verify import places

__all__ = ["cuda_source"]

_ELEMENT = {
    "fp32": "float",
    "bf16": "unsigned short",
    "fp16": "unsigned short",
    "uint16": "unsigned short",
    "int16": "short",
    "uint32": "unsigned int",
    "int32": "int",
}

_WORD = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

_PRELUDE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <cstdio>

__device__ inline float from_bf16(unsigned short x) {
  return __uint_as_float((unsigned int)x << 16);
}
__device__ inline unsigned short to_bf16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ inline float from_fp16(unsigned short x) { return __half2float(__ushort_as_half(x)); }
__device__ inline unsigned short to_fp16(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
__device__ inline unsigned int get_bits(const unsigned char* s, long long at, int n) {
  unsigned int out = s[at >> 3] >> (at & 7);
  if ((at & 7) + n > 8) out |= (unsigned int)s[(at >> 3) + 1] << (8 - (at & 7));
  return out & ((1u << n) - 1);
}
__device__ inline unsigned int word_bits(const unsigned int* s, int at, int n, int words) {
  const int i = at >> 5;
  unsigned int out = s[i] >> (at & 31);
  if ((at & 31) + n > 32 && i + 1 < words) out |= s[i + 1] << (32 - (at & 31));
  return n == 32 ? out : out & ((1u << n) - 1);
}
__device__ inline void mma(float* c, const unsigned short* a, const unsigned short* b) {
  const unsigned int* x = reinterpret_cast<const unsigned int*>(a);
  const unsigned int* y = reinterpret_cast<const unsigned int*>(b);
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}
__device__ inline void copy16(void* to, const void* from) {
  const unsigned int at = (unsigned int)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}
// The smallest code whose value is nearest; ties to even.
__device__ inline unsigned char nearest_code(float x, const float* known, int count, int bits) {
  const float size = fabsf(x);
  int low = 0;
  while (low + 1 < count) {
    const float between = 0.5f * (known[low] + known[low + 1]);
    if (size < between || (size == between && low % 2 == 0)) break;
    low++;
  }
  return (unsigned char)(low | (signbit(x) ? 1 << (bits - 1) : 0));
}
"""


def _element(dtype: TileType) -> str:
    return _ELEMENT.get(str(dtype), "unsigned char")


class _Emit:
    """Writes the CUDA C++ of one program."""

    def __init__(self, program: TileProgram) -> None:
        if program.target != "cuda":
            raise KernelError(
                f"tile program {program.name} is for {program.target}; expected target='cuda'"
            )
        self.program = program
        self.lines: list[str] = []
        self.helpers: dict[str, str] = {}
        self.indent = "  "
        self.count = 0
        self.names: dict[int, str] = {}
        self.scratch = 0

    def fail(self, one: ir.Instruction, why: str) -> KernelError:
        return KernelError(f"tile program {self.program.name}: {type(one).__name__}: {why}")

    def put(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}_{self.count}"

    def name(self, value: Register) -> str:
        return self.names.get(id(value), f"r_{value.name}")

    def declare(self, value: Register, name: str | None = None) -> str:
        name = name or self.name(value)
        self.put(f"alignas(16) {_element(value.dtype)} {name}[{value.held.num_local}];")
        return name

    def loop(self, count: int, text: str) -> None:
        self.put("#pragma unroll")
        self.put(f"for (int l = 0; l < {count}; l++) {text}")

    # Indices: what the thread says, and a constant for each place.

    def spatial(self, value: Register) -> list[str]:
        """An expression of the thread's number for each dimension."""
        layout = value.held
        dims, after = layout.dims(), 1
        weights = [1] * len(layout.mode_shape)
        for mode in range(len(weights) - 2, -1, -1):
            if dims[mode] == dims[mode + 1]:
                weights[mode] = weights[mode + 1] * layout.mode_shape[mode + 1]
        terms: list[list[str]] = [[] for _ in layout.shape]
        for mode in reversed(layout.spatial_modes):
            size = layout.mode_shape[mode] if mode >= 0 else -mode
            if mode >= 0:
                digit = f"(t / {after} % {size})" if after > 1 else f"(t % {size})"
                terms[dims[mode]].append(f"{digit} * {weights[mode]}")
            after *= size
        return [" + ".join(part) or "0" for part in terms]

    def indices(self, value: Register, offsets: Sequence[Expr]) -> tuple[list[str], np.ndarray]:
        """Names of the first index in each dimension of a tensor, and [L, rank] to add."""
        own = self.spatial(value)
        pad = len(offsets) - len(own)
        names = []
        for d, offset in enumerate(offsets):
            name = self.fresh("d")
            tail = f" + {own[d - pad]}" if d >= pad else ""
            self.put(f"const long long {name} = {offset}{tail};")
            names.append(name)
        local = value.held.table()[0]
        return names, np.pad(local, ((0, 0), (pad, 0)))

    @staticmethod
    def at(names: Sequence[str], more: Sequence[int], strides: Sequence[Expr]) -> str:
        """Place of an element."""
        return " + ".join(
            f"({name} + {int(m)}) * {stride}"
            for name, m, stride in zip(names, more, strides, strict=True)
        )

    # The program.

    def source(self) -> str:
        program = self.program
        given = [f"void* p_{p.name}" for p in program.pointers]
        given += [f"long long {name}" for name in program.scalars]
        calls = [*(f"p_{p.name}" for p in program.pointers), *program.scalars]
        self.body(program.body)
        grid = [*(str(count) for count in program.grid), "1", "1"][:3]
        head = [
            f'extern "C" __global__ void __launch_bounds__({program.threads}) '
            f"{program.name}({', '.join(given)}) {{",
            "  const int t = threadIdx.x;",
            *(
                f"  const long long block{d} = blockIdx.{'xyz'[d]};"
                for d in range(len(program.grid))
            ),
        ]
        if program.shared_bytes or self.scratch:
            head.append(f"  __shared__ __align__(128) unsigned char shared[{self.top()}];")
        tail = [
            "}",
            f'extern "C" int launch_{program.name}({", ".join([*given, "void* stream"])}) {{',
            f"  {program.name}<<<dim3({', '.join(grid)}), {program.threads}, 0, "
            f"(cudaStream_t)stream>>>({', '.join(calls)});",
            "  return (int)cudaGetLastError();",
            "}",
            "",
        ]
        return "\n".join([*head, *self.lines, *tail])

    def top(self) -> int:
        """Bytes of shared memory: the program's tensors, then room for reductions."""
        return -(-self.program.shared_bytes // 128) * 128 + self.scratch

    def body(self, body: list[ir.Instruction]) -> None:
        if len(self.program.grid) > 3:
            raise KernelError(f"tile program {self.program.name}: a GPU's grid has 3 dimensions")
        for one in body:
            value = getattr(self, f"on_{type(one).__name__.lower()}", None)
            if value is not None:
                value(one)

    def inside(self, body: list[ir.Instruction]) -> None:
        indent, self.indent = self.indent, self.indent + "  "
        self.body(body)
        self.indent = indent

    # Control.

    def assign(self, target: str, value: ir.Value) -> None:
        if isinstance(value, Expr):
            self.put(f"{target} = {value};")
        elif self.name(value) != target:
            self.loop(value.held.num_local, f"{target}[l] = {self.name(value)}[l];")

    def target(self, value: ir.Value) -> str:
        return self.name(value) if isinstance(value, Register) else str(value)

    def rounds(self, one: ir.For | ir.While) -> None:
        # All are read before any is written: one may go to another's place.
        late = []
        for c in one.carried:
            name = self.fresh("c")
            if isinstance(c.yielded, Register):
                self.declare(c.yielded, name)
                self.assign(name, c.yielded)
                count = c.yielded.held.num_local
            else:
                self.put(f"const long long {name} = {c.yielded};")
                count = 0
            late.append((self.target(c.argument), name, count))
        for target, name, count in late:
            if count:
                self.loop(count, f"{target}[l] = {name}[l];")
            else:
                self.put(f"{target} = {name};")

    def around(self, one: ir.For | ir.While, head: str) -> None:
        for c in one.carried:
            if isinstance(c.argument, Register):
                self.assign(self.declare(c.argument), c.init)
            else:
                self.put(f"long long {c.argument} = {c.init};")
        self.put(head)
        self.inside(one.body)
        indent, self.indent = self.indent, self.indent + "  "
        self.rounds(one)
        self.indent = indent
        self.put("}")
        for c in one.carried:
            if isinstance(c.result, Register) and isinstance(c.argument, Register):
                self.names[id(c.result)] = self.name(c.argument)
            else:
                self.put(f"const long long {c.result} = {c.argument};")

    def on_for(self, one: ir.For) -> None:
        i = one.variable
        self.around(one, f"for (long long {i} = 0; {i} < {one.count}; {i}++) {{")

    def on_while(self, one: ir.While) -> None:
        self.around(one, f"while ({one.condition}) {{")

    def on_if(self, one: ir.If) -> None:
        for c in one.carried:
            if isinstance(c.result, Register):
                self.declare(c.result)
            else:
                self.put(f"long long {c.result};")
        for head, body, first in (
            (f"if ({one.condition}) {{", one.body, True),
            ("} else {", one.otherwise, False),
        ):
            self.put(head)
            self.inside(body)
            for c in one.carried:
                self.assign(self.target(c.result), c.init if first else c.yielded)
        self.put("}")

    # Memory.

    def on_globalview(self, one: ir.GlobalView) -> None:
        kind = _element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)p_{one.out.pointer.name};")

    def access(
        self,
        value: Register,
        view: Global,
        offsets: Sequence[Expr],
        masked: bool,
        vector: int,
        load: bool,
    ) -> None:
        name, bits = self.name(value), view.dtype.bits
        names, more = self.indices(value, offsets)
        size = max(1, bits // 8)
        run = max(1, vector // size) if vector and not masked else 1
        for p in range(0, len(more), run):
            at = self.at(names, more[p], view.strides)
            inside = " && ".join(
                f"{n} + {int(m)} < {limit}"
                for n, m, limit in zip(names, more[p], view.shape, strict=True)
            )
            zero = f"({_element(value.dtype)})0"
            if bits % 8 or view.in_bits:
                unit = f"({at})" if view.in_bits else f"({at}) * {bits}"
                text = f"get_bits((const unsigned char*){view.name}, {unit}, {bits})"
                if bits % 8 == 0:
                    text = f"{view.name}[{unit} / {bits}]"
                keep = f"{inside} ? {text} : {zero}" if masked else text
                self.put(f"{name}[{p}] = {keep};")
            elif run > 1:
                word = _WORD[run * size]
                a, b = f"*({word}*)&{name}[{p}]", f"*({word}*)&{view.name}[{at}]"
                self.put(f"{a} = {b};" if load else f"{b} = {a};")
            elif load:
                text = f"{view.name}[{at}]"
                self.put(f"{name}[{p}] = {f'{inside} ? {text} : {zero}' if masked else text};")
            else:
                guard = f"if ({inside}) " if masked else ""
                self.put(f"{guard}{view.name}[{at}] = {name}[{p}];")

    def on_loadglobal(self, one: ir.LoadGlobal) -> None:
        self.declare(one.out)
        self.access(one.out, one.source, one.offsets, one.masked, one.vector, True)

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        self.access(one.value, one.target, one.offsets, one.masked, one.vector, False)

    def on_allocshared(self, one: ir.AllocShared) -> None:
        kind = _element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)(shared + {one.out.address});")

    def swizzled(self, tensor: Shared, at: str) -> str:
        if tensor.layout.swizzle is None:
            return at
        width, base, shift = tensor.layout.swizzle
        return f"(({at}) ^ (((({at}) >> {base + shift}) & {(1 << width) - 1}) << {base}))"

    def shared_place(self, tensor: Shared, names: Sequence[str], more: Sequence[int]) -> str:
        strides = [number(int(s)) for s in tensor.layout.strides]
        return self.swizzled(tensor, self.at(names, more, strides))

    def on_loadshared(self, one: ir.LoadShared) -> None:
        name = self.declare(one.out)
        names, more = self.indices(one.out, one.at)
        for p, add in enumerate(more):
            at = self.shared_place(one.source, names, add)
            self.put(f"{name}[{p}] = {one.source.name}[{at}];")

    def on_storeshared(self, one: ir.StoreShared) -> None:
        names, more = self.indices(one.value, one.at)
        for p, add in enumerate(more):
            at = self.shared_place(one.target, names, add)
            self.put(f"{one.target.name}[{at}] = {self.name(one.value)}[{p}];")

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        size = one.target.dtype.storage_bytes
        row = one.shape[-1]
        pad = len(one.offsets) - len(one.shape)
        run = 16 // size
        fits = (
            not one.masked
            and not one.source.in_bits
            and one.source.strides[-1].constant == 1
            and one.target.layout.swizzle is None
            and row % run == 0
            and all(
                e.divisor % run == 0
                for e in (one.offsets[-1], one.at[-1], *one.source.strides[:-1])
            )
        )
        step = run if fits else 1
        total = int(np.prod(one.shape)) // step
        i = self.fresh("i")
        self.put(f"for (int {i} = t; {i} < {total}; {i} += {self.program.threads}) {{")
        rest = i
        digits: list[str] = []
        for d in reversed(range(len(one.shape))):
            extent = one.shape[d] // (step if d == len(one.shape) - 1 else 1)
            digits.insert(0, f"({rest} % {extent})")
            rest = f"({rest} / {extent})"
        if step > 1:
            digits[-1] = f"({digits[-1]} * {step})"

        def place(offsets: Sequence[Expr], strides: Sequence[Expr]) -> str:
            gap = len(offsets) - len(digits)
            return " + ".join(
                f"({offset}{f' + {digits[d - gap]}' if d >= gap else ''}) * {stride}"
                for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True))
            )

        to = self.swizzled(
            one.target, place(one.at, [number(s) for s in one.target.layout.strides])
        )
        source = place(one.offsets, one.source.strides)
        if fits:
            self.put(f"  copy16(&{one.target.name}[{to}], &{one.source.name}[{source}]);")
        else:
            inside = " && ".join(
                f"{offset}{f' + {digits[d - pad]}' if d >= pad else ''} < {one.source.shape[d]}"
                for d, offset in enumerate(one.offsets)
            )
            keep = f"{inside} ? " if one.masked else ""
            tail = f" : ({_element(one.target.dtype)})0" if one.masked else ""
            self.put(f"  {one.target.name}[{to}] = {keep}{one.source.name}[{source}]{tail};")
        self.put("}")

    def on_commitgroup(self, one: ir.CommitGroup) -> None:
        self.put('asm volatile("cp.async.commit_group;" ::);')

    def on_waitgroup(self, one: ir.WaitGroup) -> None:
        self.put(f'asm volatile("cp.async.wait_group {one.pending};" ::: "memory");')

    def on_sync(self, one: ir.Sync) -> None:
        self.put("__syncthreads();")

    # Arithmetic.

    def on_allocregister(self, one: ir.AllocRegister) -> None:
        name, dtype = self.declare(one.out), one.out.dtype
        if dtype.narrow:
            value = str(int(dtype.encode(np.array(one.fill))))
        elif str(dtype) in ("bf16", "fp16"):
            value = f"to_{dtype}({float(one.fill)!r}f)"
        else:
            value = f"({_element(dtype)})({one.fill!r})"
        self.loop(one.out.held.num_local, f"{name}[l] = {value};")

    def on_view(self, one: ir.View) -> None:
        a, b = one.value, one.out
        source, name = self.name(a), self.declare(b)
        words = -(-a.thread_bits // 32)
        s = self.fresh("s")
        self.put(f"unsigned int {s}[{words}];")
        self.loop(words, f"{s}[l] = 0;")
        if a.dtype.bits == 32:
            self.loop(words, f"{s}[l] = *(const unsigned int*)&{source}[l];")
        else:
            n, mask = a.dtype.bits, (1 << a.dtype.bits) - 1
            self.loop(
                a.held.num_local,
                f"{{ const int at = l * {n}; "
                f"const unsigned int x = (unsigned int){source}[l] & {mask}u; "
                f"{s}[at >> 5] |= x << (at & 31); "
                f"if ((at & 31) + {n} > 32) {s}[(at >> 5) + 1] |= x >> (32 - (at & 31)); }}",
            )
        n, kind = b.dtype.bits, _element(b.dtype)
        text = f"word_bits({s}, l * {n}, {n}, {words})"
        if str(b.dtype) == "fp32":
            text = f"__uint_as_float({text})"
        self.loop(b.held.num_local, f"{name}[l] = ({kind})({text});")

    def decoder(self, dtype: TileType) -> str:
        """Name of a function from codes to fp32; arithmetic, for tables are slow in a GPU."""
        name = f"value_{dtype}"
        n, mask = dtype.bits, (1 << dtype.bits) - 1
        if dtype.kind == "uint":
            text = f"return (float)(c & {mask}u);"
        elif dtype.kind == "int":
            text = f"return (float)((int)(c << {32 - n}) >> {32 - n});"
        else:
            half, y = 1 << (n - 1), dtype.mantissa
            scale = 127 - (2 ** (dtype.exponent - 1) - 1)
            text = f"const unsigned int size = c & {half - 1}u; "
            if dtype.exponent == 5:
                top = 31 << y
                text += (
                    f"if (size >= {top}u) return size > {top}u ? __int_as_float(0x7fc00000) : "
                    f"__int_as_float(c & {half}u ? 0xff800000 : 0x7f800000); "
                )
            if (dtype.exponent, y) == (4, 3):
                text += "if (size == 127u) return __int_as_float(0x7fc00000); "
            # The fields where fp32 has them, and the difference of the biases as a factor;
            # so subnormal numbers come out right, too.
            text += (
                f"const float x = __uint_as_float(size << {23 - y}) * "
                f"__uint_as_float({scale + 127}u << 23); return c & {half}u ? -x : x;"
            )
        self.helpers[name] = f"__device__ inline float {name}(unsigned int c) {{ {text} }}"
        return name

    def on_cast(self, one: ir.Cast) -> None:
        a, b = one.value.dtype, one.out.dtype
        source, name = f"{self.name(one.value)}[l]", self.declare(one.out)
        if a.narrow:
            source = f"{self.decoder(a)}({source})"
        elif str(a) in ("bf16", "fp16"):
            source = f"from_{a}({source})"
        if b.narrow and b.kind == "float":
            known = b.values()[: 2 ** (b.bits - 1)]
            known = known[np.isfinite(known)]
            table = f"known_{b}"
            values = ", ".join(f"{float(v)!r}f" for v in known)
            self.helpers[table] = f"__device__ const float {table}[] = {{{values}}};"
            source = f"nearest_code({source}, {table}, {len(known)}, {b.bits})"
        elif b.narrow:
            low, high = float(b.values().min()), float(b.values().max())
            source = (
                f"(unsigned char)((int)fminf(fmaxf(rintf({source}), {low}f), {high}f) & "
                f"{2**b.bits - 1})"
            )
        elif str(b) in ("bf16", "fp16"):
            source = f"to_{b}((float)({source}))"
        self.loop(one.out.held.num_local, f"{name}[l] = ({_element(b)})({source});")

    def on_elementwise(self, one: ir.Elementwise) -> None:
        out = one.out
        terms = []
        for value in one.inputs:
            if not isinstance(value, Register):
                terms.append((f"({_element(out.dtype)})({value!r})", None))
                continue
            at = places(value.held, out.held)
            if at is None or (at != at[:1]).any():
                raise self.fail(
                    one, f"{value} has {value.held}; expected the same place in every thread"
                )
            terms.append((self.name(value), at[0]))
        name = self.declare(out)
        sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
        for p in range(out.held.num_local):
            a, b = (text if at is None else f"{text}[{at[p]}]" for text, at in terms)
            result = (
                f"{a} {sign[one.op]} {b}"
                if one.op in sign
                else (f"{a} {'<' if one.op == 'min' else '>'} {b} ? {a} : {b}")
            )
            self.put(f"{name}[{p}] = ({_element(out.dtype)})({result});")

    def on_reduce(self, one: ir.Reduce) -> None:
        """Through shared memory: every thread writes what it holds, then sums what it needs."""
        a, out = one.value, one.out
        if str(a.dtype) != "fp32":
            raise self.fail(one, f"{a}; expected fp32 on a GPU")
        self.scratch = max(self.scratch, 4 * int(np.prod(a.shape)))
        name, s = self.declare(out), self.fresh("s")
        base = -(-self.program.shared_bytes // 128) * 128
        self.put("__syncthreads();")
        self.put(f"float* const {s} = (float*)(shared + {base});")
        zeros = [number(0)] * len(a.shape)
        weights = [number(int(w)) for w in np.cumprod([1, *a.shape[:0:-1]])[::-1]]
        names, more = self.indices(a, zeros)
        for p, add in enumerate(more):
            self.put(f"{s}[{self.at(names, add, weights)}] = {self.name(a)}[{p}];")
        self.put("__syncthreads();")
        names, more = self.indices(out, zeros)
        for p, add in enumerate(more):
            at = self.at(names, add, weights)
            self.put(f"{name}[{p}] = {s}[{at}];")
            step = (
                f"{name}[{p}] += x;" if one.op == "add" else f"{name}[{p}] = fmaxf({name}[{p}], x);"
            )
            self.put(
                f"for (int q = 1; q < {a.shape[one.dim]}; q++) "
                f"{{ const float x = {s}[{at} + q * {weights[one.dim]}]; {step} }}"
            )

    def on_dot(self, one: ir.Dot) -> None:
        (m, k), n = one.a.shape, one.b.shape[1]
        warps = self.program.threads // CUDA.warp
        bf16, fp32 = tile_type("bf16"), tile_type("fp32")
        if (one.a.dtype, one.b.dtype, one.c.dtype) != (bf16, bf16, fp32):
            raise self.fail(one, f"{one.a} times {one.b}; expected bf16, and sums in fp32")
        CUDA.check(m, n, k, warps)
        wanted = (CUDA.a(m, k, warps), CUDA.b(k, n, warps), CUDA.c(m, n, warps))
        for value, layout in zip((one.a, one.b, one.c), wanted, strict=True):
            if not value.held.same(layout):
                raise self.fail(one, f"{value} has {value.held}; expected {layout}")
        name = self.declare(one.out)
        self.loop(one.out.held.num_local, f"{name}[l] = {self.name(one.c)}[l];")
        a, b = self.name(one.a), self.name(one.b)
        mt, nt, kt = m // 16, n // (8 * warps), k // 16
        for i in range(mt):
            for j in range(nt):
                for q in range(kt):
                    self.put(
                        f"mma(&{name}[{(i * nt + j) * 4}], &{a}[{(i * kt + q) * 8}], "
                        f"&{b}[{(q * nt + j) * 4}]);"
                    )

    def on_print(self, one: ir.Print) -> None:
        if isinstance(one.value, Expr):
            text = one.text.replace('"', "'").replace("%", "%%").replace("\\", "/")
            self.put(f'if (t == 0) printf("{text}%lld\\n", (long long)({one.value}));')


def cuda_source(*programs: TileProgram) -> str:
    """The CUDA C++ of programs: each a kernel, and ``launch_NAME`` with the same parameters.

    ``launch_NAME`` gets a stream after these, and returns CUDA's error, 0 if there is none.

    Raises:
        KernelError: one is for another machine, or needs what a GPU's recipe lacks.
    """
    written = [_Emit(program) for program in programs]
    texts = [one.source() for one in written]
    helpers = {name: text for one in written for name, text in one.helpers.items()}
    return "\n".join([_PRELUDE, *helpers.values(), *texts])
