"""Launch files of another engine, for the best plan that it can run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.files import write_atomic
from shoal.core.parts import table
from shoal.ir import Plan


def emit(
    plans: Sequence[Plan[Any]],
    engine: str,
    directory: Path | None = None,
    parts: str = "emitter",
) -> tuple[Plan[Any], dict[str, str]]:
    """Launch files of an engine for the best plan that it can run.

    Args:
        plans: best first.
        engine: such as torchtitan, megatron or vllm.
        directory: where they are written, the plan beside them; nothing is written if None.
        parts: kind of part that writes them.

    Returns:
        That plan, and name -> text of the files.

    Raises:
        UnknownPartError: there is no such engine.
        PlanError: it can run none of them; says why not the first.
    """
    emitter = table(parts).build(engine, where="--emit")
    chosen = next((plan for plan in plans if not emitter.refuses(plan)), plans[0])
    files: dict[str, str] = emitter.emit(chosen)
    if directory is not None:
        for name, text in files.items():
            write_atomic(directory / name, text)
        chosen.save(
            directory / "plan.yaml", header=f"What the files of {engine} beside this were made of."
        )
    return chosen, files
