"""Habits of the house that a machine can check, over every source file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
IDS = [str(path.relative_to(SOURCE)) for path in FILES]

# The files that may do what the others may not, and why.
PICKLES = {"core/pool/remote.py"}  # pipes between processes of one pool, never a file
WRITES = {
    "claims/gallery/publish.py",  # inside a directory that is renamed when it is whole
    "core/files.py",  # what everything else is written with
    "core/meter/jsonl.py",  # a log grows line by line
    "core/native.py",  # the compiler's input, in a temporary directory
    "corpora/tokens.py",  # a lock file without contents
    "model/huggingface.py",  # inside a directory that is renamed when it is whole
    "parallel/processes.py",  # where a crash leaves a rank's stacks
    "parallel/heartbeat.py",  # a mapped page of a few numbers
    "train/supervise.py",  # what a rank prints
    "train/watch/recorder.py",  # a mapped page of records
    "train/worker.py",  # where a crash leaves its stacks
}

each_file = pytest.mark.parametrize("path", FILES, ids=IDS)


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """(dotted name, call) of every call in a file."""
    return [
        (ast.unparse(node.func), node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


@each_file
def test_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)


@each_file
def test_all_names_what_is_there(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined: set[str] = set()
    public: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            defined |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
            if isinstance(target, ast.Name) and target.id == "__all__":
                public = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    if public is not None:
        assert len(set(public)) == len(public)
        assert set(public) <= defined


@each_file
def test_nothing_is_left_for_later(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b|[Ff]or now\b", text)
    assert not found


@each_file
def test_nothing_that_can_execute_is_read(path: Path) -> None:
    name = str(path.relative_to(SOURCE))
    for called, node in calls(path):
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert keywords.get("allow_pickle", "False") == "False"
        assert called not in ("eval", "exec", "marshal.load", "marshal.loads", "shelve.open")
        if called in ("torch.load",):
            assert keywords.get("weights_only") == "True"
        if called in ("pickle.load", "pickle.loads", "dill.load", "cloudpickle.loads"):
            assert name in PICKLES
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
            assert name == "core/files.py"


@each_file
def test_files_are_written_whole(path: Path) -> None:
    name = str(path.relative_to(SOURCE))
    if name in WRITES:
        return
    for called, node in calls(path):
        assert not called.endswith((".write_text", ".write_bytes")), f"line {node.lineno}"
        if called == "open" or called.endswith(".open"):
            constants = [word.value for word in ast.walk(node) if isinstance(word, ast.Constant)]
            modes = [word for word in constants if re.fullmatch(r"[rbt]*[wax+][rbt+]*", str(word))]
            assert not modes, f"line {node.lineno} opens for writing"


@each_file
def test_no_error_is_swallowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            silent = all(
                isinstance(line, ast.Pass)
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            everything = node.type is None or ast.unparse(node.type) in (
                "Exception",
                "BaseException",
            )
            assert not (silent and everything), f"line {node.lineno}"


def test_exemptions_are_of_files_that_exist() -> None:
    assert set(IDS) >= PICKLES | WRITES
