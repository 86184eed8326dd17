"""``shoal explain compile``: the text that a program of the tile machine becomes."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

from shoal.core.errors import KernelError, nearest, require
from shoal.core.parts import part
from shoal.ir import Explanation, Machine, Progress
from shoal.kernel.tile import compile_kernel, ir, show
from shoal.kernel.tile.build import TileKernel
from shoal.kernel.tile.programs import program

# A product on a GPU takes no less.
_LEAST = {"rows": 16, "step": 32, "columns": 32}
_SUFFIX = {"cpp": "cpp", "cuda": "cu", "ir": "txt", "layout": "txt"}


@part
class CompileStudy:
    """Compile a program of the tile machine to text: checked instructions, C++ or CUDA C++.

    **Examples**

        shoal explain compile lowbit_matmul --settings '{weight: uint3}'

        shoal explain compile lowbit_matmul --emit ir --settings '{weight: float6_e3m2, rows: 4}'

        shoal explain compile lowbit_matmul --emit layout --settings '{weight: int5}' --target cuda

        shoal explain compile stream_copy --emit cuda --out kernels

    Args:
        program: lowbit_matmul, lowbit_pack or stream_copy.
        emit: cpp for this CPU, cuda, ir, or layout (which lane holds which element).
        settings: settings of the program, such as {weight: uint3}.
        target: target of ir and layout: host or cuda; host if not given.
    """

    subject: ClassVar = "program"
    machine: ClassVar = None

    program: str = "lowbit_matmul"
    emit: Literal["cpp", "cuda", "ir", "layout"] = "cpp"
    settings: dict[str, bool | int | str] = field(default_factory=dict)
    target: str | None = None

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        result = program(self.program)
        options = _checked(result, self.settings)
        if self.target is not None:
            require(
                self.emit in ("ir", "layout"),
                "--target",
                self.target,
                expected="no target, because cpp is for the host and cuda for a GPU",
                error=KernelError,
            )
            options["target"] = self.target
            if self.target == "cuda":
                known = result.options()
                options = {key: size for key, size in _LEAST.items() if key in known} | options
        text = (
            _layouts(result, options)
            if self.emit == "layout"
            else compile_kernel(self.program, self.emit, **options)
        )
        name = f"{self.program}.{_SUFFIX[self.emit]}"
        return Explanation(blocks=(text,), data=text, files={name: text + "\n"})


def _checked(found: TileKernel, given: dict[str, bool | int | str]) -> dict[str, Any]:
    """Options of the types that their defaults have.

    Raises:
        KernelError: another type, or no such option.
    """
    known = found.options()
    wanted = {bool: "true or false", int: "a whole number"}
    for key, value in given.items():
        text = f"--settings {key}={value}"
        if key not in known:
            listed = ", ".join(f"{option}={default}" for option, default in known.items())
            raise KernelError(f"{text}: expected one of {listed}; {nearest(key, known)}")
        kind = type(known[key])
        if type(value) is not kind:
            raise KernelError(f"{text}: expected {wanted.get(kind, 'text')}, such as {known[key]}")
    return dict(given)


def _layouts(found: TileKernel, options: dict[str, Any]) -> str:
    """A picture of every layout of the program, under the tensors that lie so."""
    held: dict[str, list[str]] = {}
    for one in ir.walk(found.trace(**options).body):
        for value in ir.writes(one):
            if isinstance(value, ir.Register):
                held.setdefault(show(value.held), []).append(f"%{value.name} {value.dtype}")
    return "\n\n".join(f"{', '.join(names)}\n{picture}" for picture, names in held.items())
