"""Every kernel of an operator against its peers, on this machine, with its roofline.

Kernels of one case are timed in turns, over operands that together exceed the last cache. The
roof is what the probed machine could do at best: bytes that must move over its bandwidth, or
operations over its peak. A time below the roof's is a measurement that went wrong, and says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.core.errors import ConfigError, KernelError, nearest
from shoal.core.measure import Spread, interleave
from shoal.core.svg import Chart, Series
from shoal.ir import Machine
from shoal.kernel.base import roof_s
from shoal.kernel.calls import LinearCall, LowbitLinearCall, PagedAttentionCall, PointwiseCall
from shoal.kernel.dispatch import here, kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.protocols import Call, Kernel, Ready
from shoal.kernel.tensors import dtype_of

# Half of what nothing should be faster than: a bandwidth is probed with some spread, too.
_WRONG = 1.15


@dataclass(frozen=True, kw_only=True)
class KernelBenchOptions:
    """What is measured.

    Args:
        ops: operators; empty for all of :data:`OPERATORS`.
        rows: numbers of rows (tokens, or requests).
        shapes: (outputs, inputs) of products.
        formats: weight formats of ``linear_lowbit``.
        dtype: fp32 or bf16.
        pairs: timed rounds.
        rotated_bytes: of operands that are gone through in turn.
        wanted: backends; empty for all that can and are no reference.
    """

    ops: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 4, 16, 64)
    shapes: tuple[tuple[int, int], ...] = ((4096, 4096),)
    formats: tuple[str, ...] = ("int4-g128",)
    dtype: str = "bf16"
    pairs: int = 15
    rotated_bytes: int = 640 * 2**20
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelCase:
    """One call, and how its kernels are run.

    Args:
        text: what is computed.
        rows: its rows.
        call: of the operator.
        made: a prepared kernel -> a function of the number of the turn, all turns other operands.
    """

    text: str
    rows: int
    call: Call
    made: Callable[[Kernel], Callable[[int], object]]


@dataclass(frozen=True)
class KernelBenchRow:
    """What a kernel reached.

    Args:
        op: operator.
        text: case.
        rows: of the case.
        backend: kernel.
        seconds: of a call.
        bytes_per_s: bytes that must move, by its time.
        roof: the roof's time over its own; 1 is the best that can be.
        speedup: the peer's time over its own, if there is a peer.
        wrong: it seems faster than the roof allows.
    """

    op: str
    text: str
    rows: int
    backend: str
    seconds: Spread
    bytes_per_s: float
    roof: float
    speedup: Spread | None
    wrong: bool


def _turns(options: KernelBenchOptions, size: float) -> int:
    return max(2, int(options.rotated_bytes // max(1.0, size)))


def _products(options: KernelBenchOptions) -> Iterator[KernelCase]:
    dtype = dtype_of(options.dtype)  # type: ignore[arg-type]
    for (n, k), rows in itertools.product(options.shapes, options.rows):
        call = LinearCall(rows, n, k, options.dtype)  # type: ignore[arg-type]
        weights = _copies(torch.randn(n, k).to(dtype), options)
        x = torch.randn(rows, k).to(dtype)

        def made(kernel: Kernel, call=call, weights=weights, x=x):  # type: ignore[no-untyped-def]
            ready = [kernel.prepare(call, weight) for weight in weights]
            return lambda turn: ready[turn % len(ready)](x)

        yield KernelCase(f"{n}x{k} {options.dtype}", rows, call, made)


def _copies(tensor: torch.Tensor, options: KernelBenchOptions) -> list[torch.Tensor]:
    number = _turns(options, tensor.numel() * tensor.element_size())
    return [tensor, *(tensor.clone() for _ in range(number - 1))]


def _lowbit(options: KernelBenchOptions) -> Iterator[KernelCase]:
    dtype = dtype_of(options.dtype)  # type: ignore[arg-type]
    for text, (n, k), rows in itertools.product(options.formats, options.shapes, options.rows):
        form = weight_format(text)
        call = LowbitLinearCall(rows, n, k, text, form.bits, options.dtype)  # type: ignore[arg-type]
        packed = form.quantize(torch.randn(n, k))
        x = torch.randn(rows, k).to(dtype)
        number = _turns(options, packed.nbytes)

        def made(kernel: Kernel, call=call, packed=packed, x=x, number=number):  # type: ignore[no-untyped-def]
            # Each prepares a copy of its own.
            ready = [kernel.prepare(call, packed) for _ in range(number)]
            return lambda turn: ready[turn % len(ready)](x)

        yield KernelCase(f"{n}x{k} {text} {options.dtype}", rows, call, made)


def _paged(options: KernelBenchOptions) -> Iterator[KernelCase]:
    dtype = dtype_of(options.dtype)  # type: ignore[arg-type]
    size, context, heads, kv_heads, dim = 16, 1024, 16, 4, 64
    for rows in options.rows:
        call = PagedAttentionCall(
            rows,
            context,
            heads,
            kv_heads,
            dim,
            size,
            options.dtype,  # type: ignore[arg-type]
        )
        blocks = context // size
        need = rows * blocks
        number = _turns(options, 4.0 * need * size * kv_heads * dim)
        slots = need * size * min(number, 64)
        keys, values = (torch.randn(slots, kv_heads, dim).to(dtype) for _ in range(2))
        tables = torch.randperm(slots // size, dtype=torch.int32).view(-1, rows, blocks)
        lengths = torch.full((rows,), context)
        q = torch.randn(rows, heads, dim).to(dtype)

        def made(  # type: ignore[no-untyped-def]
            kernel: Kernel, call=call, keys=keys, values=values, tables=tables, lengths=lengths, q=q
        ):
            ready: Ready = kernel.prepare(call)
            return lambda turn: ready(q, keys, values, tables[turn % len(tables)], lengths)

        yield KernelCase(f"{heads}/{kv_heads} heads of {dim}, {context} tokens", rows, call, made)


def _pointwise(op: str) -> Callable[[KernelBenchOptions], Iterator[KernelCase]]:
    def cases(options: KernelBenchOptions) -> Iterator[KernelCase]:
        dtype = dtype_of(options.dtype)  # type: ignore[arg-type]
        for rows in options.rows:
            n, out, constants, more = _POINTWISE[op](rows, dtype)
            call = PointwiseCall(op, rows, n, out, options.dtype)  # type: ignore[arg-type]
            xs = [torch.randn(rows, n).to(dtype) for _ in range(8)]

            def made(  # type: ignore[no-untyped-def]
                kernel: Kernel, call=call, xs=xs, constants=constants, more=more
            ):
                ready: Ready = kernel.prepare(call, *constants)
                return lambda turn: ready(xs[turn % len(xs)], *more)

            yield KernelCase(f"rows of {n} {options.dtype}", rows, call, made)

    return cases


def _norm_case(
    rows: int, dtype: torch.dtype
) -> tuple[int, int, tuple[object, ...], tuple[object, ...]]:
    return 4096, 4096, (torch.ones(4096, dtype=dtype), 1e-6), ()


def _swiglu_case(
    rows: int, dtype: torch.dtype
) -> tuple[int, int, tuple[object, ...], tuple[object, ...]]:
    return 22016, 11008, (), ()


def _rope_case(
    rows: int, dtype: torch.dtype
) -> tuple[int, int, tuple[object, ...], tuple[object, ...]]:
    heads, kv_heads, half = 32, 8, 64
    angle = torch.rand(2048, half)
    constants = (angle.cos(), angle.sin(), None, None, heads, kv_heads, 1e-6)
    width = (heads + 2 * kv_heads) * 2 * half
    return width, width, constants, (torch.arange(rows),)


def _sample_case(
    rows: int, dtype: torch.dtype
) -> tuple[int, int, tuple[object, ...], tuple[object, ...]]:
    one = torch.ones(rows, dtype=torch.float64)
    settings = (0.8 * one, torch.zeros(rows, dtype=torch.int64), 0.95 * one, 0.5 * one)
    return 32000, 1, (), settings


_POINTWISE = {
    "rms_norm": _norm_case,
    "rope": _rope_case,
    "swiglu": _swiglu_case,
    "sample": _sample_case,
}

OPERATORS: Mapping[str, Callable[[KernelBenchOptions], Iterator[KernelCase]]] = {
    "linear": _products,
    "linear_lowbit": _lowbit,
    "paged_attention": _paged,
    **{op: _pointwise(op) for op in _POINTWISE},
}
"""Operators that are measured, and their cases."""


def bench(
    options: KernelBenchOptions,
    *,
    machine: Machine | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[KernelBenchRow]:
    """Time all kernels that can compute the cases.

    Args:
        options: what.
        machine: whose roofline; this one's.
        progress: called with (text, cases done, cases).

    Raises:
        ConfigError: an operator that is not measured.
    """
    for op in options.ops:
        if op not in OPERATORS:
            hint = nearest(op, OPERATORS)
            raise ConfigError(
                f"--op {op}: expected some of {', '.join(OPERATORS)}"
                + (f"; {hint}" if hint else "")
            )
    target = machine or here()
    ops = options.ops or tuple(OPERATORS)
    total = sum(_count(op, options) for op in ops)
    rows: list[KernelBenchRow] = []
    done = 0
    with torch.inference_mode():
        for op in ops:
            for case in OPERATORS[op](options):
                if progress is not None:
                    progress(f"{op} {case.text}, {case.rows} rows", done, total)
                rows += _measured(op, case, options, target)
                done += 1
    return rows


def _count(op: str, options: KernelBenchOptions) -> int:
    shapes = len(options.shapes) if op.startswith("linear") else 1
    formats = len(options.formats) if op == "linear_lowbit" else 1
    return shapes * formats * len(options.rows)


def _measured(
    op: str, case: KernelCase, options: KernelBenchOptions, machine: Machine
) -> list[KernelBenchRow]:
    methods: dict[str, Callable[[], object]] = {}
    for backend, kernel in kernels_of(op).items():
        if backend in ("reference", "integer") or kernel.refuses(case.call) is not None:
            continue
        if options.wanted and backend not in options.wanted:
            continue
        if kernel.interpreted(case.call) and not options.wanted:
            continue
        try:
            run = case.made(kernel)
        except KernelError:  # it refuses these constants, which no call reports
            continue
        turn = itertools.count()
        methods[backend] = lambda run=run, turn=turn: run(next(turn))  # type: ignore[misc]
    if not methods:
        return []
    paired = interleave(methods, options.pairs)
    roof = roof_s(case.call, machine)
    results = []
    for backend in methods:
        seconds = paired.median(backend)
        peer = "torch" if "torch" in methods and backend != "torch" else None
        results.append(
            KernelBenchRow(
                op,
                case.text,
                case.rows,
                backend,
                seconds,
                case.call.moved_bytes / seconds.value,
                roof / seconds.value,
                None if peer is None else paired.ratio(peer, backend),
                roof / seconds.value > _WRONG,
            )
        )
    return results


def format_rows(rows: Sequence[KernelBenchRow]) -> str:
    """A table as text."""
    head = (
        f"{'operator':16} {'case':34} {'rows':>5} {'kernel':12} {'us':>9} {'GB/s':>7} "
        f"{'of roof':>8} {'x torch':>8}"
    )
    lines = [head]
    for row in rows:
        ratio = "" if row.speedup is None else f"{row.speedup.value:.2f}"
        lines.append(
            f"{row.op:16} {row.text:34} {row.rows:5d} {row.backend:12} "
            f"{1e6 * row.seconds.value:9.1f} {row.bytes_per_s / 1e9:7.1f} {row.roof:8.0%} "
            f"{ratio:>8}" + ("  above the roofline: invalid" if row.wrong else "")
        )
    return "\n".join(lines)


def draw(rows: Sequence[KernelBenchRow], op: str) -> str:
    """Share of the roof by rows, a line a kernel, as SVG."""
    mine = [row for row in rows if row.op == op]
    first = mine[0].text
    series = [
        Series(
            name=backend,
            x=[row.rows for row in mine if row.backend == backend and row.text == first],
            y=[row.roof for row in mine if row.backend == backend and row.text == first],
            points=True,
        )
        for backend in dict.fromkeys(row.backend for row in mine)
    ]
    return Chart(
        title=f"{op}, {first}",
        x_label="rows",
        y_label="share of the roofline",
        series=series,
        log_x=True,
    ).render()
