"""Calls that wait and name no limit of time, found in the source."""

from __future__ import annotations

import ast
from collections import Counter

import sources

LIMITS = frozenset({"timeout", "timeout_s", "limit_s"})

# Method -> positional arguments from which on one is a limit.
METHODS = {
    "wait": 1,
    "join": 1,
    "result": 1,
    "exception": 1,
    "communicate": 2,
    "acquire": 1,
    "get": 1,
    "wait_for": 2,
    "wait_closed": 1,
    "barrier": 1,
    "synchronize": 9,
    "accept": 9,
    "recv": 9,
    "recv_into": 9,
    "recv_bytes": 9,
    "recv_bytes_into": 9,
    "recvmsg": 9,
    "sendall": 9,
    "send_bytes": 9,
    "drain": 9,
    "flock": 9,
    "lockf": 9,
}
# Functions of modules that wait, the same.
FUNCTIONS = {
    "select.select": 4,
    "subprocess.run": 99,
    "subprocess.call": 99,
    "subprocess.check_call": 99,
    "subprocess.check_output": 99,
    "asyncio.wait": 99,
    "asyncio.gather": 99,
    "wait": 2,
    "os.waitpid": 99,
    "os.wait": 99,
}
# Pipes of other processes.
PIPES = frozenset({"stdout", "stderr", "stdin", "pipe", "reader", "_reader"})
NAMES = frozenset({*METHODS, *(name.rpartition(".")[2] for name in FUNCTIONS), "read", "readline"})


def unlimited(source: ast.Module) -> Counter[tuple[str, str]]:
    """(function, call) -> how often it is there, of calls that wait and name no limit."""
    counts: Counter[tuple[str, str]] = Counter()

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call) and _waits(node):
            text = ast.unparse(node.func)
            counts[".".join(path) or "module", text] += 1
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(source, ())
    return counts


def _waits(call: ast.Call) -> bool:
    # Most calls are told apart by their last name, which costs nothing.
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last not in NAMES or (last in ("get", "join") and (call.args or call.keywords)):
        return False
    if LIMITS & {word.arg for word in call.keywords}:
        return False
    text = ast.unparse(call.func)
    if text in FUNCTIONS:
        return len(call.args) < FUNCTIONS[text]
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
        return isinstance(call.func, ast.Attribute) and (
            call.func.attr in ("read", "readline")
            and ast.unparse(call.func.value).rpartition(".")[2] in PIPES
        )
    name, given = call.func.attr, ast.unparse(call)
    if text == "sys.exception":
        return False
    if name in ("result", "exception", "acquire") and call.args:
        return False
    if name in ("flock", "lockf") and ("LOCK_NB" in given or "LOCK_UN" in given):
        return False
    if name == "acquire" and any(word.arg == "blocking" for word in call.keywords):
        return False
    return len(call.args) < METHODS[name]


def everywhere() -> Counter[tuple[str, str, str]]:
    """(file, function, call) -> how often, in the whole package."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for path in sources.paths():
        if any(isinstance(node, ast.Call) and _waits(node) for node in sources.nodes(path)):
            place = path.relative_to(sources.PACKAGE).as_posix()
            for (function, call), number in unlimited(sources.tree(path)).items():
                counts[place, function, call] = number
    return counts
