"""What programs mean: an interpreter in torch, all threads of a block at a time.

Registers are tensors [threads, places]; a thread reads its own only, but in Reduce and Dot.
Asynchronous copies are really late: they happen when they are waited for, and a thread that reads
their target before gets an error. So does one that reads shared memory that was written, or
writes what was read, since the last Sync. Narrow types are held as their codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Global, Register, Shared, TileProgram
from shoal.kernel.tile.types import TileType
from shoal.kernel.tile.verify import places

_TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "uint32": torch.uint32,
    "int32": torch.int32,
}


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def torch_dtype(dtype: TileType) -> torch.dtype:
    """The type of a torch tensor whose memory a pointer of this type is; bytes for narrow ones."""
    return _TORCH.get(str(dtype), torch.uint8)


@dataclass
class _Shared:
    """The memory of one shared tensor, and which thread touched what since the last Sync."""

    data: Tensor
    flight: np.ndarray
    written: np.ndarray
    read: np.ndarray


@dataclass
class _Copy:
    target: _Shared
    at: np.ndarray
    source: Tensor


@dataclass
class _Block:
    """The state of one block."""

    env: dict[str, int]
    registers: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, _Shared] = field(default_factory=dict)
    begun: list[_Copy] = field(default_factory=list)
    groups: list[list[_Copy]] = field(default_factory=list)


def numbers(codes: Tensor, dtype: TileType) -> Tensor:
    """What elements mean, fp32 (int64 for wide integers)."""
    if dtype.narrow:
        return torch.from_numpy(dtype.values().astype(np.float32))[codes.long()]
    return codes.float() if dtype.kind == "float" else codes.long()


def _converted(values: Tensor, source: TileType, target: TileType) -> Tensor:
    result = numbers(values, source)
    if target.narrow:
        codes = target.encode(result.double().numpy())
        return torch.from_numpy(codes)
    if target.kind == "float":
        return result.to(torch_dtype(target))
    return (
        result.trunc().long().to(torch_dtype(target))
        if result.is_floating_point()
        else result.to(torch_dtype(target))
    )


def interpret(
    program: TileProgram, pointers: Mapping[str, Tensor], scalars: Mapping[str, int] | None = None
) -> None:
    """Run a program on tensors, whose memory it changes.

    Args:
        program: a finished one.
        pointers: name -> contiguous tensor of the pointer's type; uint8, a dense bit stream, for
            narrow types.
        scalars: name -> number.

    Raises:
        KernelError: a parameter is missing or has another type, a tile lies outside its view, or
            shared memory is read too early or written too late.
    """
    given = dict(scalars or {})
    if set(pointers) != {p.name for p in program.pointers} or set(given) != set(program.scalars):
        raise KernelError(
            f"tile program {program.name}: given {', '.join([*pointers, *given]) or 'nothing'}; "
            f"expected {', '.join([*(p.name for p in program.pointers), *program.scalars])}"
        )
    for pointer in program.pointers:
        tensor, wanted = pointers[pointer.name], torch_dtype(pointer.dtype)
        if tensor.dtype != wanted or not tensor.is_contiguous():
            raise KernelError(
                f"tile program {program.name}: {pointer.name} is {tensor.dtype}; expected "
                f"contiguous {wanted}"
            )
    sizes = [count.evaluate(given) for count in program.grid]
    for index in itertools.product(*map(range, sizes)):
        env = given | {f"block{d}": i for d, i in enumerate(index)}
        _Run(program, pointers, _Block(env)).body(program.body)


class _Run:
    def __init__(self, program: TileProgram, pointers: Mapping[str, Tensor], block: _Block) -> None:
        self.program, self.pointers, self.block = program, pointers, block

    def fail(self, one: ir.Instruction, why: str) -> KernelError:
        place = {name: n for name, n in self.block.env.items() if name.startswith("block")}
        return KernelError(
            f"tile program {self.program.name}, block {list(place.values())}: "
            f"{type(one).__name__}: {why}"
        )

    def number(self, value: Expr) -> int:
        return value.evaluate(self.block.env)

    def get(self, value: Register) -> Tensor:
        return self.block.registers[id(value)]

    def put(self, value: Register, data: Tensor) -> None:
        self.block.registers[id(value)] = data

    def body(self, body: list[ir.Instruction]) -> None:
        for one in body:
            value = getattr(self, f"on_{type(one).__name__.lower()}", None)
            if value is not None:
                value(one)

    # Control.

    def value(self, value: ir.Value) -> int | Tensor:
        return self.get(value) if isinstance(value, Register) else self.number(value)

    def bind(self, name: ir.Value, value: int | Tensor) -> None:
        if isinstance(name, Register):
            assert isinstance(value, Tensor)
            self.put(name, value)
        else:
            self.block.env[str(name.args[0])] = int(value)

    def rounds(self, one: ir.For | ir.While) -> None:
        results = [self.value(c.yielded) for c in one.carried]
        for carried, value in zip(one.carried, results, strict=True):
            self.bind(carried.argument, value)

    def begin(self, one: ir.For | ir.While) -> None:
        for carried, value in [(c, self.value(c.init)) for c in one.carried]:
            self.bind(carried.argument, value)

    def end(self, one: ir.For | ir.While) -> None:
        for carried in one.carried:
            self.bind(carried.result, self.value(carried.argument))

    def on_for(self, one: ir.For) -> None:
        self.begin(one)
        for index in range(self.number(one.count)):
            self.block.env[str(one.variable.args[0])] = index
            self.body(one.body)
            self.rounds(one)
        self.end(one)

    def on_while(self, one: ir.While) -> None:
        self.begin(one)
        while self.number(one.condition):
            self.body(one.body)
            self.rounds(one)
        self.end(one)

    def on_if(self, one: ir.If) -> None:
        chosen = bool(self.number(one.condition))
        self.body(one.body if chosen else one.otherwise)
        for carried in one.carried:
            self.bind(carried.result, self.value(carried.init if chosen else carried.yielded))

    # Memory.

    def address(
        self, one: ir.Instruction, view: Global, index: np.ndarray, masked: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places in the pointer's memory, in bits, and which of them are inside the view."""
        shape = np.array([self.number(size) for size in view.shape])
        inside = np.asarray(((index >= 0) & (index < shape)).all(-1))
        if not masked and not inside.all():
            worst = index[~inside][0]
            raise self.fail(
                one,
                f"element {worst.tolist()} of a view of shape {shape.tolist()}; expected a tile "
                "inside it, or masked=True",
            )
        strides = np.array([self.number(step) for step in view.strides])
        bits = (index * strides).sum(-1) * (1 if view.in_bits else view.dtype.bits)
        return bits, inside

    def gather(self, one: ir.Instruction, view: Global, index: np.ndarray, masked: bool) -> Tensor:
        bits, inside = self.address(one, view, index, masked)
        memory = self.pointers[view.pointer.name].view(torch.uint8).flatten()
        at = torch.from_numpy(np.where(inside, bits, 0))
        zero = torch.from_numpy(~inside)
        last = memory.numel() - 1
        if view.dtype.bits % 8:
            low = memory[at >> 3].long()
            high = memory[((at >> 3) + 1).clamp(max=last)].long()
            result = ((low | high << 8) >> (at & 7)) & (2**view.dtype.bits - 1)
            codes: Tensor = result.to(torch.uint8).masked_fill(zero, 0)
            return codes
        size = view.dtype.bits // 8
        bytes_ = memory[(at // 8)[..., None] + torch.arange(size)]
        bytes_ = bytes_.masked_fill(zero[..., None], 0).contiguous()
        return bytes_.view(torch_dtype(view.dtype))[..., 0]

    def index(self, value: Register, offsets: tuple[Expr, ...]) -> np.ndarray:
        """Index of every element of a tile in the tensor it lies in: [T, L, rank of that]."""
        table = value.held.table()
        at = np.array([self.number(offset) for offset in offsets])
        out = np.broadcast_to(at, (*table.shape[:2], len(at))).copy()
        out[..., len(at) - table.shape[2] :] += table
        return out

    def on_loadglobal(self, one: ir.LoadGlobal) -> None:
        index = self.index(one.out, one.offsets)
        self.put(one.out, self.gather(one, one.source, index, one.masked))

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        index = self.index(one.value, one.offsets)
        bits, inside = self.address(one, one.target, index, one.masked)
        memory = self.pointers[one.target.pointer.name].view(torch.uint8).flatten()
        size = one.value.dtype.bits // 8
        data = self.get(one.value).contiguous().view(torch.uint8).view(*bits.shape, size)
        at = torch.from_numpy(bits // 8)[..., None] + torch.arange(size)
        keep = torch.from_numpy(inside)
        memory[at[keep]] = data[keep]

    def on_allocshared(self, one: ir.AllocShared) -> None:
        size = one.out.layout.size
        # What was there before is not known; ones in all bits show reads of it.
        data = torch.full((size * one.out.dtype.storage_bytes,), 255, dtype=torch.uint8)
        flags = [np.zeros(size, dtype=bool) for _ in range(3)]
        self.block.shared[id(one.out)] = _Shared(data.view(torch_dtype(one.out.dtype)), *flags)

    def places(self, tensor: Shared, index: np.ndarray) -> np.ndarray:
        flat = index.reshape(-1, index.shape[-1])
        if (flat < 0).any() or (flat >= np.array(tensor.shape)).any():
            raise KernelError(
                f"tile program {self.program.name}: a tile of %{tensor.name} outside its shape "
                f"{list(tensor.shape)}; expected it inside"
            )
        results = [tensor.layout.place(tuple(int(i) for i in row)) for row in flat]
        return np.array(results).reshape(index.shape[:-1])

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        shared = self.block.shared[id(one.target)]
        tile = np.stack(np.meshgrid(*(np.arange(n) for n in one.shape), indexing="ij"), -1).reshape(
            -1, len(one.shape)
        )

        def whole(offsets: tuple[Expr, ...]) -> np.ndarray:
            at = np.array([self.number(offset) for offset in offsets])
            out = np.broadcast_to(at, (len(tile), len(at))).copy()
            out[:, len(at) - tile.shape[1] :] += tile
            return out

        at = self.places(one.target, whole(one.at))
        self.writable(one, shared, at)
        shared.flight[at] = True
        source = self.gather(one, one.source, whole(one.offsets), one.masked)
        self.block.begun.append(_Copy(shared, at, source))

    def writable(self, one: ir.Instruction, shared: _Shared, at: np.ndarray) -> None:
        if shared.read[at].any():
            raise self.fail(one, "other threads may still read what it writes; Sync first")
        if shared.flight[at].any():
            raise self.fail(one, "a copy into the same place has not finished; WaitGroup first")

    def on_commitgroup(self, one: ir.CommitGroup) -> None:
        self.block.groups.append(self.block.begun)
        self.block.begun = []

    def on_waitgroup(self, one: ir.WaitGroup) -> None:
        while len(self.block.groups) > one.pending:
            for copy in self.block.groups.pop(0):
                copy.target.data[torch.from_numpy(copy.at)] = copy.source
                copy.target.flight[copy.at] = False
                copy.target.written[copy.at] = True

    def on_sync(self, one: ir.Sync) -> None:
        for shared in self.block.shared.values():
            shared.written[:] = False
            shared.read[:] = False

    def on_loadshared(self, one: ir.LoadShared) -> None:
        shared = self.block.shared[id(one.source)]
        at = self.places(one.source, self.index(one.out, one.at))
        if shared.flight[at].any():
            raise self.fail(
                one, "a copy to what it reads has not arrived; CommitGroup and WaitGroup first"
            )
        if shared.written[at].any():
            raise self.fail(one, "what it reads was written since the last Sync; Sync first")
        shared.read[at] = True
        self.put(one.out, shared.data[torch.from_numpy(at)])

    def on_storeshared(self, one: ir.StoreShared) -> None:
        shared = self.block.shared[id(one.target)]
        at = self.places(one.target, self.index(one.value, one.at))
        self.writable(one, shared, at)
        shared.written[at] = True
        shared.data[torch.from_numpy(at)] = self.get(one.value)

    # Arithmetic.

    def on_allocregister(self, one: ir.AllocRegister) -> None:
        layout, dtype = one.out.held, one.out.dtype
        shape = (layout.num_threads, layout.num_local)
        if dtype.narrow:
            code = int(dtype.encode(np.array(one.fill)))
            self.put(one.out, torch.full(shape, code, dtype=torch.uint8))
        else:
            self.put(one.out, torch.full(shape, one.fill).to(torch_dtype(dtype)))

    def on_view(self, one: ir.View) -> None:
        source, target = one.value.dtype, one.out.dtype
        data = self.get(one.value)
        raw = data.contiguous().view(torch.uint8).numpy()
        if source.bits % 8:
            bits = np.unpackbits(raw[..., None], axis=-1, bitorder="little")[..., : source.bits]
        else:
            bits = np.unpackbits(raw, axis=-1, bitorder="little")
        bits = bits.reshape(len(raw), -1)
        if target.bits % 8:
            wide = np.zeros((len(raw), bits.shape[1] // target.bits, 8), dtype=np.uint8)
            wide[..., : target.bits] = bits.reshape(len(raw), -1, target.bits)
            codes = np.packbits(wide, axis=-1, bitorder="little")[..., 0]
            self.put(one.out, torch.from_numpy(codes))
        else:
            stream = torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))
            self.put(one.out, stream.view(torch_dtype(target)))

    def on_cast(self, one: ir.Cast) -> None:
        self.put(one.out, _converted(self.get(one.value), one.value.dtype, one.out.dtype))

    def on_elementwise(self, one: ir.Elementwise) -> None:
        dtype = one.out.dtype
        tensors: list[Tensor] = []
        for value in one.inputs:
            if not isinstance(value, Register):
                wide = torch.float32 if dtype.kind == "float" else torch.int64
                tensors.append(torch.tensor(value, dtype=wide))
                continue
            at = places(value.held, one.out.held)
            assert at is not None
            data = self.get(value).gather(1, torch.from_numpy(np.ascontiguousarray(at)))
            tensors.append(data if dtype.kind == "float" else data.long())
        a, b = tensors
        if one.op in ("and", "or", "xor"):
            a, b = a.long(), b.long()
            out = {"and": a & b, "or": a | b, "xor": a ^ b}[one.op]
        elif one.op == "div":
            out = a / b if dtype.kind == "float" else torch.div(a, b, rounding_mode="trunc")
        else:
            out = _BINARY[one.op](a, b)
        self.put(one.out, out.to(torch_dtype(dtype)))

    def tile(self, value: Register) -> Tensor:
        """The whole tile, from whichever thread holds each element."""
        data = self.get(value)
        table = torch.from_numpy(value.held.table().copy())
        out = torch.empty(value.shape, dtype=data.dtype)
        out[tuple(table[..., d] for d in range(table.shape[-1]))] = data
        return out

    def spread(self, value: Register, tile: Tensor) -> None:
        table = torch.from_numpy(value.held.table().copy())
        self.put(value, tile[tuple(table[..., d] for d in range(table.shape[-1]))])

    def on_reduce(self, one: ir.Reduce) -> None:
        tile = numbers(self.tile(one.value), one.value.dtype)
        total = tile.sum(one.dim, True) if one.op == "add" else tile.amax(one.dim, True)
        if one.out.dtype.narrow:
            total = torch.from_numpy(one.out.dtype.encode(total.double().numpy()))
        self.spread(one.out, total.to(torch_dtype(one.out.dtype)))

    def on_dot(self, one: ir.Dot) -> None:
        a = numbers(self.tile(one.a), one.a.dtype)
        b = numbers(self.tile(one.b), one.b.dtype)
        c = self.tile(one.c)
        self.spread(one.out, (a @ b + numbers(c, one.c.dtype)).to(c.dtype))

    def on_print(self, one: ir.Print) -> None:
        from rich import print as show

        value = one.value
        shown = self.tile(value) if isinstance(value, Register) else self.number(value)
        show(f"{one.text}{shown}")
