"""The text of a program: as it is after all passes, in C++, or in CUDA C++."""

from __future__ import annotations

from typing import Any, Literal

from shoal.core.errors import KernelError, require
from shoal.kernel.tile.build import TileKernel
from shoal.kernel.tile.programs import program

Emit = Literal["ir", "cpp", "cuda"]


def compile_kernel(name: str | TileKernel, emit: Emit = "cpp", **options: Any) -> str:
    """What a program is compiled to.

    Args:
        name: of one of :data:`shoal.kernel.tile.programs.PROGRAMS`, or a function marked with
            ``@tile.kernel``.
        emit: ``ir``, the checked program; ``cpp``, for this host; ``cuda``.
        options: of the program, such as ``weight="uint3"``; and ``target`` and ``warps``.

    Raises:
        KernelError: an unknown name, option or ``emit``, or a program that is wrong.
    """
    require(
        emit in ("ir", "cpp", "cuda"),
        "tile.compile_kernel emit",
        emit,
        expected="ir, cpp or cuda",
        error=KernelError,
    )
    result = name if isinstance(name, TileKernel) else program(name)
    known = result.options()
    if emit == "cuda":
        options.setdefault("target", "cuda")
        if "step" in known and "columns" in known:
            options = {"step": 32, "columns": 32} | options
        if "rows" in known and "step" in known:
            options = {"rows": 16} | options
    traced = result.trace(**options)
    if emit == "ir":
        return str(traced)
    if emit == "cpp":
        from shoal.kernel.native.tiles import has_tiles
        from shoal.kernel.tile.host import host_source

        return host_source([traced], tiles=has_tiles())
    from shoal.kernel.tile.cuda import cuda_source

    return cuda_source(traced)
