"""CUDA C++ of a program: a block is a block, a thread a thread.

Every register tensor is an array of the thread; since indices are sums of digits, the place of an
element is what the thread's number says plus a constant for each place in the thread. Products
are the tensor core's ``mma.sync.m16n8k16`` of bf16, asynchronous copies ``cp.async``; codes of few
bits are cut from 32-bit words in registers. For compute capability 8.0 and later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Global, Register, Shared, TileProgram, number
from shoal.kernel.tile.layout import row_strides, suffixes
from shoal.kernel.tile.target import CUDA
from shoal.kernel.tile.types import TileType, tile_type
from shoal.kernel.tile.verify import places
from shoal.kernel.tile.writer import CodeWriter, element, literal, operation

_WORD = {16: "uint4", 8: "uint2", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}

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


class _Emit(CodeWriter):
    """Writes the CUDA C++ of one program."""

    target = "cuda"

    def __init__(self, program: TileProgram) -> None:
        super().__init__(program)
        if len(program.grid) > 3:
            raise KernelError(f"tile program {program.name}: a GPU's grid has 3 dimensions")
        self.helpers: dict[str, str] = {}
        self.scratch = 0

    def fail(self, one: ir.Instruction, why: str) -> KernelError:
        return KernelError(f"tile program {self.program.name}: {type(one).__name__}: {why}")

    def storage(self, value: Register) -> str:
        return f"alignas(16) {element(value.dtype)}"

    def each(self, count: int, text: Callable[[object], str]) -> None:
        self.put("#pragma unroll")
        self.put(f"for (int l = 0; l < {count}; l++) {text('l')}")

    # Indices: what the thread says, and a constant for each place.

    def spatial(self, value: Register) -> list[Expr]:
        """An expression of the thread's number for each dimension."""
        layout, after = value.held, 1
        dims, weights = layout.dims(), suffixes(layout)
        out = [number(0)] * len(layout.shape)
        for mode in reversed(layout.spatial_modes):
            size = layout.mode_shape[mode] if mode >= 0 else -mode
            if mode >= 0:
                digit = Expr("name", ("t",)) // after % size
                out[dims[mode]] += digit * weights[mode]
            after *= size
        return out

    def indices(self, value: Register, offsets: Sequence[Expr]) -> tuple[list[Expr], np.ndarray]:
        """Names of the first index in each dimension of a tensor, and [L, rank] to add."""
        names = []
        for first in self.shifted(offsets, self.spatial(value)):
            names.append(Expr("name", (self.fresh("d"),)))
            self.put(f"const int64_t {names[-1]} = {first};")
        return names, value.held.table()[0]

    # The program.

    def source(self) -> str:
        program = self.program
        given = [f"void* p_{p.name}" for p in program.pointers]
        given += [f"int64_t {name}" for name in program.scalars]
        calls = [*(f"p_{p.name}" for p in program.pointers), *program.scalars]
        self.body(program.body)
        grid = [*(str(count) for count in program.grid), "1", "1"][:3]
        head = [
            f'extern "C" __global__ void __launch_bounds__({program.threads}) '
            f"{program.name}({', '.join(given)}) {{",
            "  const int t = threadIdx.x;",
            *(f"  const int64_t block{d} = blockIdx.{'xyz'[d]};" for d in range(len(program.grid))),
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

    # Memory.

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
            at = self.place(view.strides, names, more[p])
            inside = self.inside(names, more[p], view.shape)
            text, here = f"{view.name}[{at}]", f"{name}[{p}]"
            if bits % 8 or view.in_bits:
                unit = at if view.in_bits else at * bits
                text = f"get_bits((const uint8_t*){view.name}, {unit}, {bits})"
                if bits % 8 == 0:
                    text = f"{view.name}[{unit} / {bits}]"
            elif run > 1:
                word = _WORD[run * size]
                text, here = f"*({word}*)&{text}", f"*({word}*)&{here}"
            if load:
                zero = f"({element(value.dtype)})0"
                self.put(f"{here} = {f'{inside} ? {text} : {zero}' if masked else text};")
            else:
                self.put(f"{f'if ({inside}) ' if masked else ''}{text} = {here};")

    def on_loadglobal(self, one: ir.LoadGlobal) -> None:
        self.declare(one.out)
        self.access(one.out, one.source, one.offsets, one.masked, one.vector, True)

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        self.access(one.value, one.target, one.offsets, one.masked, one.vector, False)

    def on_loadshared(self, one: ir.LoadShared) -> None:
        name = self.declare(one.out)
        for p, at in enumerate(self.shared_places(one.out, one.source, one.at)):
            self.put(f"{name}[{p}] = {at};")

    def on_storeshared(self, one: ir.StoreShared) -> None:
        for p, at in enumerate(self.shared_places(one.value, one.target, one.at)):
            self.put(f"{at} = {self.name(one.value)}[{p}];")

    def shared_places(
        self, value: Register, tensor: Shared, offsets: Sequence[Expr]
    ) -> Iterator[str]:
        """The element of a shared tensor for each place of a value."""
        names, more = self.indices(value, offsets)
        for add in more:
            at = self.swizzled(tensor, self.place(self.shared_strides(tensor), names, add))
            yield f"{tensor.name}[{at}]"

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        target, source = one.target, one.source
        run = 16 // target.dtype.storage_bytes
        fits = (
            not one.masked
            and not source.in_bits
            and source.strides[-1].constant == 1
            and target.layout.swizzle is None
            and one.shape[-1] % run == 0
            and all(
                e.divisor % run == 0 for e in (one.offsets[-1], one.at[-1], *source.strides[:-1])
            )
        )
        step = run if fits else 1
        rest = i = Expr("name", (self.fresh("i"),))
        digits: list[Expr] = []
        for extent in (one.shape[-1] // step, *one.shape[-2::-1]):
            digits.insert(0, rest % extent)
            rest = rest // extent
        digits[-1] = digits[-1] * step
        to = self.swizzled(target, self.place(self.shared_strides(target), one.at, digits))
        to, at = f"{target.name}[{to}]", self.place(source.strides, one.offsets, digits)
        total = math.prod(one.shape) // step
        with self.braces(f"for (int {i} = t; {i} < {total}; {i} += {self.threads}) {{"):
            if fits:
                self.put(f"copy16(&{to}, &{source.name}[{at}]);")
            elif one.masked:
                inside = self.inside(one.offsets, digits, source.shape)
                zero = f"({element(target.dtype)})0"
                self.put(f"{to} = {inside} ? {source.name}[{at}] : {zero};")
            else:
                self.put(f"{to} = {source.name}[{at}];")

    def on_commitgroup(self, one: ir.CommitGroup) -> None:
        self.put('asm volatile("cp.async.commit_group;" ::);')

    def on_waitgroup(self, one: ir.WaitGroup) -> None:
        self.put(f'asm volatile("cp.async.wait_group {one.pending};" ::: "memory");')

    def on_sync(self, one: ir.Sync) -> None:
        self.put("__syncthreads();")

    # Arithmetic.

    def on_allocregister(self, one: ir.AllocRegister) -> None:
        name, dtype = self.declare(one.out), one.out.dtype
        value = f"({element(dtype)})({literal(dtype, one.fill)})"
        self.each(one.out.held.num_local, lambda p: f"{name}[{p}] = {value};")

    def on_view(self, one: ir.View) -> None:
        a, b = one.value, one.out
        source, name = self.name(a), self.declare(b)
        words = -(-a.thread_bits // 32)
        s = self.fresh("s")
        self.put(f"uint32_t {s}[{words}];")
        self.each(words, lambda p: f"{s}[{p}] = 0;")
        n, mask = a.dtype.bits, (1 << a.dtype.bits) - 1
        if n == 32:
            self.each(words, lambda p: f"{s}[{p}] = *(const uint32_t*)&{source}[{p}];")
        else:
            self.each(
                a.held.num_local,
                lambda p: (
                    f"{{ const int at = {p} * {n}; "
                    f"const uint32_t x = (uint32_t){source}[{p}] & {mask}u; "
                    f"{s}[at >> 5] |= x << (at & 31); "
                    f"if ((at & 31) + {n} > 32) {s}[(at >> 5) + 1] |= x >> (32 - (at & 31)); }}"
                ),
            )
        n, kind = b.dtype.bits, element(b.dtype)
        decode = "__uint_as_float" if str(b.dtype) == "fp32" else f"({kind})"
        self.each(
            b.held.num_local,
            lambda p: f"{name}[{p}] = {decode}(word_bits({s}, {p} * {n}, {n}, {words}));",
        )

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
        source, name = self.name(one.value), self.declare(one.out)
        self.each(
            one.out.held.num_local,
            lambda p: f"{name}[{p}] = ({element(b)})({self.converted(f'{source}[{p}]', a, b)});",
        )

    def converted(self, text: str, a: TileType, b: TileType) -> str:
        """What a number of one type is in another, or what becomes that when it is stored."""
        if a.narrow:
            text = f"{self.decoder(a)}({text})"
        elif str(a) in ("bf16", "fp16"):
            text = f"from_{a}({text})"
        if b.narrow and b.kind == "float":
            known = b.magnitudes
            table = f"known_{b}"
            values = ", ".join(f"{float(v)!r}f" for v in known)
            self.helpers[table] = f"__device__ const float {table}[] = {{{values}}};"
            return f"nearest_code({text}, {table}, {len(known)}, {b.bits})"
        if b.narrow:
            low, high = float(b.values().min()), float(b.values().max())
            return f"((int)fminf(fmaxf(rintf({text}), {low}f), {high}f) & {2**b.bits - 1})"
        return f"to_{b}((float)({text}))" if str(b) in ("bf16", "fp16") else text

    def on_elementwise(self, one: ir.Elementwise) -> None:
        out = one.out
        terms = []
        for value in one.inputs:
            if not isinstance(value, Register):
                terms.append((f"({element(out.dtype)})({value!r})", None))
                continue
            at = places(value.held, out.held)
            if at is None or (at != at[:1]).any():
                raise self.fail(
                    one, f"{value} has {value.held}; expected the same place in every thread"
                )
            terms.append((self.name(value), at[0]))
        name = self.declare(out)
        for p in range(out.held.num_local):
            a, b = (text if at is None else f"{text}[{at[p]}]" for text, at in terms)
            self.put(f"{name}[{p}] = ({element(out.dtype)})({operation(one.op, a, b)});")

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
        weights = [number(stride) for stride in row_strides(a.shape)]
        names, more = self.indices(a, zeros)
        for p, add in enumerate(more):
            self.put(f"{s}[{self.place(weights, names, add)}] = {self.name(a)}[{p}];")
        self.put("__syncthreads();")
        names, more = self.indices(out, zeros)
        for p, add in enumerate(more):
            at = self.place(weights, names, add)
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
        warps = self.threads // CUDA.warp
        bf16, fp32 = tile_type("bf16"), tile_type("fp32")
        if (one.a.dtype, one.b.dtype, one.c.dtype) != (bf16, bf16, fp32):
            raise self.fail(one, f"{one.a} times {one.b}; expected bf16, and sums in fp32")
        CUDA.check(m, n, k, warps)
        wanted = (CUDA.a(m, k, warps), CUDA.b(k, n, warps), CUDA.c(m, n, warps))
        for value, layout in zip((one.a, one.b, one.c), wanted, strict=True):
            if not value.held.same(layout):
                raise self.fail(one, f"{value} has {value.held}; expected {layout}")
        name = self.declare(one.out)
        self.assign(name, one.out, self.name(one.c))
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
        KernelError: an instruction is for another target, or is not supported on a GPU.
    """
    written = [_Emit(program) for program in programs]
    texts = [one.source() for one in written]
    helpers = {name: text for one in written for name, text in one.helpers.items()}
    return "\n".join([_PRELUDE, *helpers.values(), *texts])
