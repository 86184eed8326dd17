"""A log that every machine has: what this Python says about its imports, with its truth.

The interpreter writes each line by a format of its own source, so that the template of a line is
known without looking at the log: those of ``importlib`` are read from its source, and those of the
interpreter's C code are listed here.
"""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import io
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import DataError
from shoal.core.files import locked, shoal_home, write_atomic
from shoal.fields.data.logs.protocols import WILDCARD

_TIMEOUT_S = 300.0
# Modules that open windows, browsers or print.
_LEFT_OUT = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test"}
# CPython, Python/pylifecycle.c, Python/sysmodule.c, Python/import.c and Objects/moduleobject.c.
_OF_C = (
    "import _frozen_importlib # frozen",
    "import _imp # builtin",
    "# clear sys.audit hooks",
    "# cleanup[1] set builtins._, sys.path, ...",
    "# clear {}",
    "# restore {}",
    "# cleanup[2] removing {}",
    "# cleanup[3] wiping {}",
    "# destroy {}",
    "# cleanup[{}] wiping {}",
    "# installing zipimport hook",
    "# installed zipimport hook",
    "# can't import zipimport.zipimporter",
    "#   clear[{}] {}",
)


def imports_log() -> Path:
    """The log, in Shoal's home; the truth lies beside it in Loghub's layout.

    Raises:
        DataError: this Python says nothing.
    """
    path = shoal_home() / "logs" / f"imports-{platform.python_version()}.log"
    with locked(path.with_suffix(".lock"), lambda: None, error=DataError, limit_s=2 * _TIMEOUT_S):
        if not path.exists():
            text = _spoken()
            write_atomic(path.with_name(f"{path.name}_structured.csv"), _truth(text))
            write_atomic(path, text)
    return path


def _spoken() -> bytes:
    names = sorted(name for name in sys.stdlib_module_names - _LEFT_OUT if not name.startswith("_"))
    code = (
        "import importlib, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"for name in {names!r}:\n"
        "    try:\n        importlib.import_module(name)\n    except ImportError:\n        pass\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-v", "-c", code],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise DataError(
            f"data = 'imports': this Python does not run ({cause}); give a file"
        ) from None
    if done.stderr.count(b"\n") < 100:
        raise DataError("data = 'imports': this Python says nothing about its imports; give a file")
    return done.stderr


def _formats() -> Iterator[str]:
    """Formats of the messages in the source of importlib and of site."""
    for name in ("importlib._bootstrap", "importlib._bootstrap_external", "zipimport", "site"):
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called, text = ast.unparse(node.func), _format(node.args[0])
            if text and called.endswith("_verbose_message"):
                yield text if text.startswith(("#", "import ")) else f"# {text}"
            elif text and called == "_trace":
                yield text
    yield from _OF_C


def _format(node: ast.expr) -> str:
    """The format that an expression is; empty where it is none."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        pieces = (one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
        return "".join(map(str, pieces))
    return ""


def _truth(text: bytes) -> str:
    templates: dict[str, None] = dict.fromkeys(
        re.sub(r"\{[^{}]*\}", WILDCARD, one) for one in _formats()
    )
    # The most literal text first: several formats may fit a line.
    order = sorted(templates, key=lambda one: (-len(one.replace(WILDCARD, "")), one))
    patterns = [
        (template, re.compile(".*?".join(map(re.escape, template.split(WILDCARD)))))
        for template in order
    ]
    rows = io.StringIO()
    out = csv.writer(rows, lineterminator="\n")
    out.writerow(("LineId", "Content", "EventId", "EventTemplate"))
    known: dict[str, str] = {}
    for at, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        template = next((name for name, one in patterns if one.fullmatch(line)), line)
        out.writerow((at, line, known.setdefault(template, f"E{len(known) + 1}"), template))
    return rows.getvalue()
