"""What a shell completes: models, machines, emitters, parts, runs and claims.

A value is completed by the name of its option or argument, for every command alike, those of
kinds of job and of parts too. What is none of these is a path, which the shell completes itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError

Names = Callable[[str], Iterable[str]]
"""What has begun -> everything that it may become."""

# Options whose values are the parts of a table.
_PARTS = {
    "planner": "planner",
    "scheduler": "scheduler",
    "balancer": "balancer",
    "launch": "launch",
    "launcher": "pool",
    "locator": "locator",
    "kv": "kv",
    "finetune": "peft",
    "workload": "workload",
    "tuner": "tuner",
}
_SHORTHAND = re.compile(r"(?:\d+x)+")


def complete(command: Any, path: tuple[str, ...] = ()) -> Any:
    """Let a command, and every command below it, complete its values.

    Args:
        command: of the command line.
        path: words that lead to it.
    """
    for param in command.params:
        names = _names(path, param.name)
        if names is not None:
            param._custom_shell_complete = _completer(names)
    below = getattr(command, "get_command", None)
    if below is not None:

        def get_command(ctx: Any, name: str) -> Any:
            sub = below(ctx, name)
            return None if sub is None else complete(sub, (*path, name))

        command.get_command = get_command
    return command


def _completer(names: Names) -> Callable[[Any, Any, str], list[str]]:
    def completed(ctx: Any, param: Any, incomplete: str) -> list[str]:
        try:
            return [name for name in names(incomplete) if name.startswith(incomplete)]
        except (ShoalError, OSError):
            return []  # a line that is being typed is no place for an error

    return completed


def _names(path: tuple[str, ...], param: str) -> Names | None:
    """What completes a parameter; None for the shell's own completion."""
    if path[:1] == ("claims",) and param == "names":
        return _claims
    if param == "machine" or (path == ("probe",) and param in ("show", "compare")):
        return _machines
    if param in ("model", "subject"):
        return _models_of_runs if path == ("serve",) else _models
    if param in ("directory", "run"):
        return _models_of_runs if path == ("model", "generate") else _runs
    if param == "emit":
        return lambda _: _emitters(path)
    if param in _PARTS:
        return lambda _: _table(_PARTS[param])
    return None


def _table(kind: str) -> Iterable[str]:
    from shoal.core.parts import table

    return table(kind)


def _emitters(path: tuple[str, ...]) -> Iterable[str]:
    """Those of the kind of job that is planned; of training and serving, the launch files."""
    from shoal.core.parts import table
    from shoal.ir import kind_named
    from shoal.ir.job_kind import emits_of

    planned = path[-1] if path[-1] in table("job") else ""
    return _table((planned and emits_of(kind_named(planned))) or "emitter")


def _models(incomplete: str) -> Iterable[str]:
    from shoal.cost.shapes import names

    return names()


def _machines(incomplete: str) -> Iterable[str]:
    from shoal.machine.described import names

    counts = _SHORTHAND.match(incomplete)
    if counts:
        return [counts[0] + name for name in names()]
    return ["local", *names()]


def _claims(incomplete: str) -> Iterable[str]:
    from shoal.claims import CLAIMS

    return CLAIMS


def _runs(incomplete: str) -> Iterable[str]:
    """Directories of runs below here, and of those that the score knows."""
    from shoal.core.files import shoal_home
    from shoal.cost.score import Score

    found = [path.parent for path in sorted(Path("runs").glob("*/plan.yaml"))]
    if (shoal_home() / "score.db").exists():
        found += [entry.path for entry in Score().run_dirs() if entry.path and entry.path.is_dir()]
    here = Path.cwd()
    near = (path.relative_to(here) if path.is_relative_to(here) else path for path in found)
    return dict.fromkeys(map(os.fspath, near))


def _models_of_runs(incomplete: str) -> Iterable[str]:
    """The models that runs have trained, as directories."""
    exports = (Path(run, "export") for run in _runs(incomplete))
    return [os.fspath(path) for path in exports if path.is_dir()]
