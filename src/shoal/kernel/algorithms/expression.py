"""Expressions of elements: parsed, checked and written as C++."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass

from shoal.core.errors import KernelError, suggestion

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.BitAnd: "&", ast.BitOr: "|",
           ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"}  # fmt: skip
_CALLED = {ast.Div: "over", ast.FloorDiv: "floor_over", ast.Mod: "modulo"}
_UNARY = {ast.USub: "-", ast.UAdd: "+", ast.Not: "!", ast.Invert: "~"}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
# Function -> what it is in C++, and its number of arguments.
_FUNCTIONS = {
    "abs": ("magnitude", 1),
    "min": ("lesser", 2),
    "max": ("greater", 2),
    "where": ("chosen", 3),
    "floor": ("real_floor", 1),
    "ceil": ("real_ceil", 1),
    "round": ("real_nearbyint", 1),
    "sqrt": ("real_sqrt", 1),
    "exp": ("real_exp", 1),
    "log": ("real_log", 1),
    "sin": ("real_sin", 1),
    "cos": ("real_cos", 1),
    "tan": ("real_tan", 1),
    "tanh": ("real_tanh", 1),
    "pow": ("power", 2),
    "isnan": ("is_nan", 1),
    "thread": ("omp_get_thread_num", 0),
}
_LONGEST = 4000


@dataclass(frozen=True, slots=True)
class CppExpression:
    """An expression that is C++ already; its names are those of the call, unchanged."""

    text: str


@functools.lru_cache(maxsize=1024)
def cpp(where: str, text: str | CppExpression, names: frozenset[str], real: str) -> str:
    """The expression in C++, over variables of the same names.

    Args:
        where: for messages.
        text: such as ``a + s*b``, in Python's syntax: arithmetic, comparisons, and/or/not,
            ``x if c else y``, and calls of abs, min, max, where, floor, ceil, round, sqrt, exp,
            log, sin, cos, tan, tanh, pow, isnan, thread (the number of the thread).
        names: those that it may use.
        real: type of its literals that are no integers: double or float.

    Raises:
        KernelError: it does not parse, or has an unknown name, function or construct.
    """
    if isinstance(text, CppExpression):
        return f"({text.text})"
    try:
        if len(text) > _LONGEST:
            raise KernelError(
                f"{where}: an expression of {len(text)} characters; expected at most {_LONGEST}"
            )
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as cause:
        raise KernelError(
            f"{where} = {text!r}: not an expression ({cause.msg}); expected one such as 'a + s*b'"
        ) from cause
    return _Writer(where, text, names, real).write(tree.body)


class _Writer:
    def __init__(self, where: str, text: str, names: Collection[str], real: str) -> None:
        self.where, self.text, self.names, self.real = where, text, names, real

    def write(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Constant):
            return self._constant(node.value)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp):
            return f"({_UNARY[type(node.op)]}{self.write(node.operand)})"
        if isinstance(node, ast.BoolOp):
            sign = " && " if isinstance(node.op, ast.And) else " || "
            return f"({sign.join(self.write(value) for value in node.values)})"
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            parts = (self.write(part) for part in (node.test, node.body, node.orelse))
            return f"chosen({', '.join(parts)})"
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._error(f"{type(node).__name__} is not supported in an element function")

    def _error(self, what: str) -> KernelError:
        return KernelError(f"{self.where} = {self.text!r}: {what}")

    def _name(self, name: str) -> str:
        if name in self.names:
            return name
        known = ", ".join(sorted(self.names)) or "none"
        raise self._error(
            f"no array or constant is named {name!r}; expected one of {known}"
            + suggestion(name, self.names)
        )

    def _constant(self, value: object) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise self._error(f"{value} does not fit in 64 bits")
            return f"int64_t({value})" if abs(value) >= 2**31 else str(value)
        if isinstance(value, float):
            return (
                f"{self.real}({value!r})"
                if abs(value) <= 1.7e308
                else f"{self.real}(__builtin_inf())"
            )
        raise self._error(f"{value!r} is no number")

    def _binary(self, node: ast.BinOp) -> str:
        left = self.write(node.left)
        if isinstance(node.op, ast.Pow):
            power = node.right.value if isinstance(node.right, ast.Constant) else None
            if power == 2:
                return f"square({left})"
            if power == 3:
                return f"cube({left})"
            return f"power({left}, {self.write(node.right)})"
        right = self.write(node.right)
        if type(node.op) in _CALLED:
            return f"{_CALLED[type(node.op)]}({left}, {right})"
        if type(node.op) in _BINARY:
            return f"({left} {_BINARY[type(node.op)]} {right})"
        raise self._error("this operator is not supported in an element function")

    def _compare(self, node: ast.Compare) -> str:
        terms = [self.write(term) for term in (node.left, *node.comparators)]
        pairs = []
        for index, sign in enumerate(node.ops):
            if type(sign) not in _COMPARE:
                raise self._error("only <, <=, >, >=, == and != compare numbers")
            pairs.append(f"({terms[index]} {_COMPARE[type(sign)]} {terms[index + 1]})")
        return pairs[0] if len(pairs) == 1 else f"({' && '.join(pairs)})"

    def _call(self, node: ast.Call) -> str:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in _FUNCTIONS:
            raise self._error(
                f"no function {name!r}; there are {', '.join(_FUNCTIONS)}"
                + suggestion(name, _FUNCTIONS)
            )
        written, count = _FUNCTIONS[name]
        if node.keywords or len(node.args) != count:
            raise self._error(f"{name} takes {count} argument{'s' * (count != 1)}")
        return f"{written}({', '.join(self.write(part) for part in node.args)})"


def is_name(text: str) -> bool:
    """Whether an array or constant may be called that."""
    if re.fullmatch(r"(at|step|lane|sum|term|write|r)_(\d+|at)", text):
        return False
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", text) is not None and text not in _TAKEN


# Words of C++.
_WORDS = """
    and asm auto bool break case catch char class const continue default delete do double else
    enum explicit export extern false float for friend goto if inline int long mutable namespace
    new not operator or private protected public register return short signed sizeof static
    struct switch template this throw true try typedef typename union unsigned using virtual
    void volatile while xor
"""
# Names in the generated functions.
_GENERATED = """
    i first last call at task fold finish scan start reduce count place partial result into next
    size all answer join folded integral over floor_over modulo square cube lesser greater
    chosen magnitude is_nan power
"""
_TAKEN = frozenset(f"{_WORDS} {_GENERATED}".split())
