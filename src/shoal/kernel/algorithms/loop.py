"""One loop per call: the source that an algorithm and its expressions become, built and called.

The text depends on names, types and strides being 1 or not, and on nothing else: sizes,
addresses, constants and the policy are arguments of the call.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shoal.core.errors import KernelError, require, suggestion
from shoal.core.native import build
from shoal.kernel.algorithms.expression import CppExpression, cpp, is_name
from shoal.kernel.algorithms.memory import TYPES, ArrayView, overlaps
from shoal.kernel.algorithms.policy import Policy
from shoal.kernel.native import FLAGS
from shoal.kernel.native import library as native_library

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Operators whose order does not matter, and what C++ calls them.
NAMED = {"+": "Sum", "*": "Product", "min": "Least", "max": "Greatest"}
_TEXT = 4096
COMPILE_FLAGS = (*FLAGS, "-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True, slots=True)
class LoopReduction:
    """A reduction.

    Args:
        op: one of :data:`NAMED`, or an expression of x and y.
        f: of the elements.
        init: initial value; without one, an empty range is an error, except for + and *.
    """

    op: str | CppExpression
    f: str | CppExpression
    init: float | None = None


class _Call(ctypes.Structure):
    """The struct Call of native/algorithm.h."""

    _fields_ = (
        ("plan", ctypes.c_int64 * 5),
        ("n", ctypes.c_int64),
        ("at", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("real", ctypes.c_void_p),
        ("whole", ctypes.c_void_p),
        ("answers", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    )


class _Answer(ctypes.Structure):
    _fields_ = (
        ("whole", ctypes.c_int64),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("any", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class LoopLibrary:
    """A generated library and the runtime that calls into it.

    Args:
        run: the function of the runtime.
        addresses: of the functions of the library that it is given.
        size: bytes of a partial result; None where it is given none.
        library: keeps the addresses.
    """

    run: Any
    addresses: tuple[int, ...]
    size: int | None
    library: Any


def built(
    text: str, runtime: str, functions: tuple[str, ...], *, sized: bool = True
) -> LoopLibrary:
    """Generated functions, for one of the runtime.

    Args:
        text: code after native/algorithm.h: ``extern "C"`` functions.
        runtime: function of native/algorithms.cpp.
        functions: of the text, in the order in which the runtime takes them.
        sized: the runtime takes the size of a partial result, which ``text`` has as ``size``.

    Raises:
        BuildError: there is no compiler, or it refuses an expression.
    """
    run = getattr(native_library("algorithms"), runtime)
    made = build(_header() + text, name="kernel-algorithm", flags=COMPILE_FLAGS)
    addresses = tuple(ctypes.cast(getattr(made, name), ctypes.c_void_p).value for name in functions)
    size = int(ctypes.c_int64.in_dll(made, "size").value) if sized else None
    run.argtypes = [ctypes.c_void_p] * (1 + len(functions)) + [ctypes.c_int64] * sized
    run.restype = ctypes.c_int64
    return LoopLibrary(run, tuple(int(address or 0) for address in addresses), size, made)


@functools.cache
def _header() -> str:
    import shoal.kernel.native

    place = Path(shoal.kernel.native.__file__).parent / "algorithm.h"
    return place.read_text(encoding="utf-8")


def call(
    made: LoopLibrary,
    policy: Policy,
    n: int,
    arrays: tuple[ArrayView, ...],
    numbers: tuple[float, ...] = (),
    answers: int = 0,
    where: str = "algorithms",
    extra: tuple[int, ...] = (),
) -> list[float | int | None]:
    """Call a generated function.

    Args:
        made: of :func:`built`.
        policy: how.
        n: elements.
        arrays: in the order of the source.
        numbers: constants, in the order of the source.
        answers: how many numbers come back.
        where: for messages.
        extra: further addresses, after those of the arrays.

    Raises:
        KernelError: a task failed; all that did are named.
    """
    count = len(arrays) + len(extra)
    at = (ctypes.c_void_p * max(1, count))(*(a.address for a in arrays), *extra)
    step = (ctypes.c_int64 * max(1, count))(*(a.step for a in arrays))
    real = (ctypes.c_double * max(1, len(numbers)))(*numbers)
    whole = (ctypes.c_int64 * max(1, len(numbers)))(
        *(number if isinstance(number, int) else 0 for number in numbers)
    )
    result = (_Answer * max(1, answers))()
    text = ctypes.create_string_buffer(_TEXT)
    outcome = _Call(
        (ctypes.c_int64 * 5)(*policy.plan()),
        n,
        ctypes.addressof(at),
        ctypes.addressof(step),
        ctypes.addressof(real),
        ctypes.addressof(whole),
        ctypes.addressof(result),
        ctypes.addressof(text),
        len(text),
    )
    sizes = () if made.size is None else (made.size,)
    failed = made.run(ctypes.addressof(outcome), *made.addresses, *sizes)
    if failed:
        lines = text.value.decode(errors="replace").splitlines()
        shown = "; ".join(lines[:8]) + ("; ..." if failed > len(lines[:8]) else "")
        raise KernelError(f"{where}: {failed} of its tasks failed: {shown}")
    return [
        None if not answer.any else (answer.integer if answer.whole else answer.real)
        for answer in result[:answers]
    ]


def check_op(where: str, op: str | CppExpression, policy: Policy, assume_associative: bool) -> None:
    """Only operators that may be regrouped go to threads.

    Raises:
        KernelError: this one is not known to be.
    """
    if not policy.parallel or assume_associative or (isinstance(op, str) and op in NAMED):
        return
    text = op.text if isinstance(op, CppExpression) else op
    raise KernelError(
        f"{where} op = {text!r}: a parallel policy needs an associative operator; use one of "
        f"{', '.join(NAMED)}, set assume_associative=True, or use seq" + suggestion(text, NAMED)
    )


def names_of(
    where: str, arrays: Mapping[str, ArrayView], numbers: Mapping[str, Any]
) -> tuple[int, dict[str, float | int]]:
    """The common length of the arrays and the checked constants.

    Raises:
        KernelError: lengths differ, or something cannot be called so, or is no number.
    """
    lengths = {name: array.n for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise KernelError(f"{where}: elements of {text}; expected equally many")
    checked: dict[str, float | int] = {}
    for name in (*arrays, *numbers):
        require(
            is_name(name),
            f"{where} name",
            name,
            expected="a letter, then letters, digits and _, and not a keyword of C++",
            error=KernelError,
        )
    for name, number in numbers.items():
        if isinstance(number, bool) or hasattr(number, "__index__"):
            checked[name] = int(number)
            require(
                -(2**63) <= checked[name] < 2**63,
                f"{where} {name}",
                number,
                expected="an integer of 64 bits",
                error=KernelError,
            )
        elif isinstance(number, float):
            checked[name] = float(number)
        else:
            raise KernelError(
                f"{where} {name}: {type(number).__name__}; expected a number, or an array among "
                "the inputs"
            )
    return next(iter(lengths.values()), 0), checked


def real_type(types: Collection[str]) -> str:
    """What a constant that is no integer is: float beside arrays of float alone."""
    return "float" if "float32" in types and "float64" not in types else "double"


def loop(
    where: str,
    policy: Policy,
    n: int,
    inputs: Mapping[str, ArrayView],
    outputs: Mapping[str, ArrayView],
    numbers: Mapping[str, float | int],
    writes: Mapping[str, str | CppExpression],
    sums: Mapping[str, LoopReduction],
) -> list[float | int | None]:
    """Elements in, elements and reductions out, in one pass.

    Args:
        where: for messages.
        policy: how.
        n: elements.
        inputs: read, by name.
        outputs: written, by name; also read where an expression names them.
        numbers: constants.
        writes: output -> expression.
        sums: name -> reduction.
    """
    for name, out in outputs.items():
        for other, array in (*inputs.items(), *outputs.items()):
            if other != name and overlaps(out, array):
                raise KernelError(
                    f"{where}: {name} shares memory with {other}, shifted; tasks would read "
                    "elements that others have written; write to another array, or exactly to "
                    "this one"
                )
    arrays = {**inputs, **outputs}
    key = (
        tuple((name, a.dtype, a.step == 1, name in outputs) for name, a in arrays.items()),
        tuple((name, isinstance(number, int)) for name, number in numbers.items()),
        tuple(writes.items()),
        tuple((s.op, s.f, s.init is not None, isinstance(s.init, int)) for s in sums.values()),
        not (policy.parallel or policy.fixed),
    )
    made = _loop(where, key)
    given = tuple(numbers.values()) + tuple(s.init for s in sums.values() if s.init is not None)
    return call(made, policy, n, tuple(arrays.values()), given, len(sums), where)


@functools.lru_cache(maxsize=512)
def _loop(where: str, key: Any) -> LoopLibrary:
    return built(_text(where, *key), "algorithm_run", ("task", "fold", "finish"))


class _Writer:
    """The source of one loop, part by part."""

    def __init__(self, where: str, arrays: Any, numbers: Any, ordered: bool) -> None:
        self.where, self.arrays, self.numbers, self.ordered = where, arrays, numbers, ordered
        self.real = real_type({dtype for _, dtype, _, _ in arrays})
        self.names = frozenset(
            [*(name for name, *_ in arrays), *(name for name, _ in numbers), "i"]
        )
        kinds = [TYPES[dtype] for _, dtype, _, _ in arrays]
        kinds += ["int64_t" if whole else self.real for _, whole in numbers]
        known = [*(name for name, *_ in arrays), *(name for name, _ in numbers)]
        pairs = zip([*kinds, "int64_t"], [*known, "i"], strict=True)
        self.parameters = ", ".join(f"{kind} {name}" for kind, name in pairs)
        self.given = ", ".join([*known, "i"])
        self.zero = ", ".join(f"{kind}()" for kind in [*kinds, "int64_t"])
        self.functions: list[str] = []

    def element(self, name: str, text: str | CppExpression) -> None:
        """A function of one element."""
        code = cpp(self.where, text, self.names, self.real)
        self.functions.append(f"inline auto {name}({self.parameters}) {{ return {code}; }}")

    def pointers(self) -> str:
        lines = []
        for index, (name, whole) in enumerate(self.numbers):
            kind, held = ("int64_t", "whole") if whole else (self.real, "real")
            lines.append(f"const {kind} {name} = {kind}(call->{held}[{index}]);")
        for index, (_, dtype, unit, written) in enumerate(self.arrays):
            kind = ("" if written else "const ") + TYPES[dtype]
            lines.append(f"{kind}* at_{index} = ({kind}*)call->at[{index}];")
            if not unit:
                lines.append(f"const int64_t step_{index} = call->step[{index}];")
        return " ".join(lines)

    def place(self, index: int) -> str:
        return f"at_{index}[{'i' if self.arrays[index][2] else f'i * step_{index}'}]"

    def load(self) -> str:
        return " ".join(
            f"const {TYPES[dtype]} {name} = {self.place(index)};"
            for index, (name, dtype, _, _) in enumerate(self.arrays)
        )


def _text(where: str, arrays: Any, numbers: Any, writes: Any, sums: Any, ordered: bool) -> str:
    writer = _Writer(where, arrays, numbers, ordered)
    index_of = {name: index for index, (name, *_) in enumerate(arrays)}
    body = []
    for index, (name, text) in enumerate(writes):
        writer.element(f"write_{index}", text)
        at = index_of[name]
        kind = TYPES[arrays[at][1]]
        body.append(f"{writer.place(at)} = {kind}(write_{index}({writer.given}));")
    before, inner, after, joins, ends = [], [], [], [], []
    fields, next_init = [], len(numbers)
    for index, (op, text, has_init, whole) in enumerate(sums):
        writer.element(f"term_{index}", text)
        kind, named = f"R_{index}", isinstance(op, str) and op in NAMED
        functions = writer.functions
        functions.append(f"using {kind} = Wide<decltype(term_{index}({writer.zero}))>;")
        functions.append(operator(where, op, f"Op_{index}", kind, writer.real))
        fields.append(f"Part<{kind}> r_{index};")
        value = f"{kind}(term_{index}({writer.given}))"
        if named and not ordered:
            before.append(f"{kind} lane_{index}[kLanes]; for ({kind}& x : lane_{index}) ")
            before.append(f"x = Op_{index}::none({kind}());")
            inner.append(f"lane_{index}[lane_at] = Op_{index}()(lane_{index}[lane_at], {value});")
            after.append(f"partial->r_{index} = {{folded(lane_{index}, Op_{index}()), 1}};")
        else:
            before.append(f"Part<{kind}> sum_{index} = {{}};")
            inner.append(f"join(sum_{index}, Part<{kind}>{{{value}, 1}}, Op_{index}());")
            after.append(f"partial->r_{index} = sum_{index};")
        joins.append(f"join(into->r_{index}, next->r_{index}, Op_{index}());")
        result = f"all->r_{index}"
        if has_init:
            init = f"{kind}(call->{'whole' if whole else 'real'}[{next_init}])"
            next_init += 1
            ends.append(
                f"{{ Part<{kind}> start = {{{init}, 1}}; join(start, {result}, Op_{index}()); "
                f"{result} = start; }}"
            )
        elif op in ("+", "*"):
            ends.append(f"if (!{result}.any) {result} = {{Op_{index}::none({kind}()), 1}};")
        ends.append(f"call->answers[{index}] = answer({result});")
    element = " ".join([writer.load(), *body])
    if sums:
        work = f"""Partial* partial = (Partial*)result;
    {" ".join(before)}
    int64_t at = first;
    for (; at + kLanes <= last; at += kLanes) {{
#pragma GCC ivdep
      for (int lane_at = 0; lane_at < kLanes; lane_at++) {{
        const int64_t i = at + lane_at; {element} {" ".join(inner)}
      }}
    }}
    for (int lane_at = 0; at < last; at++, lane_at++) {{
      const int64_t i = at; (void)lane_at; {element} {" ".join(inner)}
    }}
    {" ".join(after)}"""
    else:
        work = f"""(void)result;
#pragma GCC ivdep
    for (int64_t i = first; i < last; i++) {{ {element} }}"""
    functions_ = "\n".join(writer.functions)
    return f"""
namespace {{
{functions_}
struct Partial {{ {" ".join(fields)} }};
}}
extern "C" {{
extern const int64_t size;
const int64_t size = {"sizeof(Partial)" if sums else "0"};
const char* task(const Call* call, int64_t first, int64_t last, void* result) {{
  try {{
    {writer.pointers()}
    {work}
    return nullptr;
  }} {CATCH}
}}
void fold(const Call*, void* to, const void* from) {{
  Partial* into = (Partial*)to; const Partial* next = (const Partial*)from;
  (void)into, (void)next; {" ".join(joins)}
}}
void finish(const Call* call, void* from) {{
  Partial* all = (Partial*)from; (void)all, (void)call; {" ".join(ends)}
}}
}}
"""


CATCH = 'catch (const char* what) { return what; } catch (...) { return "an exception"; }'


def operator(where: str, op: str | CppExpression, name: str, kind: str, real: str) -> str:
    """A type in C++ whose values combine two numbers of a kind."""
    if isinstance(op, str) and op in NAMED:
        return f"using {name} = {NAMED[op]};"
    code = cpp(where, op, frozenset(["x", "y"]), real)
    return (
        f"struct {name} {{ {kind} operator()({kind} x, {kind} y) const "
        f"{{ (void)x, (void)y; return {kind}({code}); }} }};"
    )


@functools.cache
def _background() -> ThreadPoolExecutor:
    made = ThreadPoolExecutor(1, thread_name_prefix="shoal-algorithm")
    atexit.register(made.shutdown, wait=False, cancel_futures=True)
    return made


def schedulable(algorithm: Callable[_P, _T]) -> Callable[_P, _T]:
    """An algorithm whose first argument is a policy; ``task(policy)`` makes it return a future."""

    @functools.wraps(algorithm)
    def scheduled(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        policy = args[0] if args else kwargs.get("policy")
        if not isinstance(policy, Policy):
            raise KernelError(
                f"algorithms.{algorithm.__name__}: the policy is {policy!r}; expected seq, par, "
                "par_unseq or one made of them as the first argument"
            )
        if not policy.task:
            return algorithm(*args, **kwargs)
        now: tuple[Any, ...] = (replace(policy, task=False), *args[1:])
        future: Future[_T] = _background().submit(algorithm, *now, **kwargs)
        return future

    return scheduled
