"""Habits of the house that a machine can check, over every source file, room by room."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sources

import shoal

FILES = {str(path.relative_to(sources.PACKAGE)): path for path in sources.paths()}
ROOMS = sorted({name.partition("/")[0] for name in FILES})

# The files that may do what the others may not, and why.
PICKLES = {"core/pool/remote.py"}  # pipes between processes of one pool, never a file
WRITES = {
    "checkpoint/inmemory/fleet.py",  # what a snapshot process prints
    "checkpoint/formats/deepspeed_dump.py",  # inside a directory that is renamed when it is whole
    "checkpoint/universal/atomic.py",  # the same
    "checkpoint/universal/extract.py",  # the same
    "claims/bench/serving/drivers/of_onnxruntime.py",  # renamed with its directory when whole
    "claims/experiments/datastates_rank.py",  # a peer's file, in the claim's own directory
    "claims/experiments/universal_checkpoint_ranks.py",  # the kernel's count of a process's peak
    "checkpoint/remote.py",  # an object that is no checkpoint before its index lies beside it
    "claims/gallery/publish.py",  # inside a directory that is renamed when it is whole
    "fields/retrieve/index/osq/files.py",  # inside a directory that is renamed when it is whole
    "fields/graph/graph.py",  # inside a directory that is renamed when it is whole
    "fields/graph/embedding/deepwalk.py",  # walks, in a directory of its own that is removed
    "fields/retrieve/collections/wal.py",  # a log grows record by record
    "fields/retrieve/grank/log.py",  # a log grows line by line
    "core/files.py",  # what everything else is written with
    "core/meter/jsonl.py",  # a log grows line by line
    "core/native.py",  # the compiler's input, in a temporary directory
    "corpora/tokens.py",  # a lock file without contents
    "machine/core_limit.py",  # control files of the kernel
    "model/huggingface.py",  # inside a directory that is renamed when it is whole
    "parallel/comm/processes.py",  # where a crash leaves a rank's stacks
    "parallel/comm/heartbeat.py",  # a mapped page of a few numbers
    "train/run_lock.py",  # a lock file that names its process
    "train/launchers/ray.py",  # what a rank prints
    "train/supervise.py",  # what a rank prints
    "train/watch/recorder.py",  # a mapped page of records
    "train/worker.py",  # where a crash leaves its stacks
}

# Arguments that say whether what is read may execute.
SAFE = ("allow_pickle", "weights_only")


def tree_of(name: str) -> ast.Module:
    return sources.tree(FILES[name])


def nodes_of(name: str) -> tuple[ast.AST, ...]:
    return sources.nodes(FILES[name])


def dotted(node: ast.AST) -> str:
    """``a.b.c``; what is no name is ``?``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of every call in a file."""
    for node in nodes_of(name):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def says_what_it_is(name: str) -> Iterator[str]:
    if not ast.get_docstring(tree_of(name)):
        yield "no docstring"


def all_names_what_is_there(name: str) -> Iterator[str]:
    tree = tree_of(name)
    defined: set[str] = set()
    public: list[str] = []
    for node in nodes_of(name):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
        targets = list(node.targets) if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            defined |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
            if isinstance(target, ast.Name) and target.id == "__all__":
                public = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    if len(set(public)) < len(public):
        yield "__all__ names something twice"
    for missing in sorted(set(public) - defined):
        yield f"__all__ names {missing}, which is not there"


def nothing_is_left_for_later(name: str) -> Iterator[str]:
    text = sources.text(FILES[name])
    yield from re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b|[Ff]or now\b", text)


def nothing_that_can_execute_is_read(name: str) -> Iterator[str]:
    for called, node in calls(name):
        given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in SAFE}
        bad = (
            given.get("allow_pickle", "False") != "False"
            or called in ("eval", "exec", "marshal.load", "marshal.loads", "shelve.open")
            or (called == "torch.load" and given.get("weights_only") != "True")
            or (
                called in ("pickle.load", "pickle.loads", "dill.load", "cloudpickle.loads")
                and name not in PICKLES
            )
            or (
                called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all")
                and name != "core/files.py"
            )
        )
        if bad:
            yield f"line {node.lineno} calls {called}"


def files_are_written_whole(name: str) -> Iterator[str]:
    if name in WRITES:
        return
    for called, node in calls(name):
        if called.endswith((".write_text", ".write_bytes")):
            yield f"line {node.lineno} calls {called}"
        if called == "open" or called.endswith(".open"):
            constants = [word.value for word in ast.walk(node) if isinstance(word, ast.Constant)]
            if any(re.fullmatch(r"[rbt]*[wax+][rbt+]*", str(word)) for word in constants):
                yield f"line {node.lineno} opens for writing"


def no_error_is_swallowed(name: str) -> Iterator[str]:
    for node in nodes_of(name):
        if isinstance(node, ast.ExceptHandler):
            silent = all(
                isinstance(line, ast.Pass)
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            everything = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            if silent and everything:
                yield f"line {node.lineno} swallows every error"


HABITS: list[Callable[[str], Iterator[str]]] = [
    says_what_it_is,
    all_names_what_is_there,
    nothing_is_left_for_later,
    nothing_that_can_execute_is_read,
    files_are_written_whole,
    no_error_is_swallowed,
]


@pytest.mark.parametrize("room", ROOMS)
def test_habits(room: str) -> None:
    files = [name for name in FILES if name.partition("/")[0] == room]
    results = [f"{name}: {said}" for name in files for habit in HABITS for said in habit(name)]
    assert results == []


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (says_what_it_is, "x = 1"),
        (all_names_what_is_there, "__all__ = ['gone']"),
        (all_names_what_is_there, "__all__ = ['x', 'x']\nx = 1"),
        (nothing_is_left_for_later, "x = 1  # TO" + "DO"),
        (nothing_that_can_execute_is_read, "pickle.loads(x)"),
        (nothing_that_can_execute_is_read, "torch.load(x)"),
        (nothing_that_can_execute_is_read, "numpy.load(x, allow_pickle=True)"),
        (nothing_that_can_execute_is_read, "yaml.load(x)"),
        (files_are_written_whole, "open(x, 'w')"),
        (files_are_written_whole, "x.write_text(y)"),
        (no_error_is_swallowed, "try:\n    x()\nexcept Exception:\n    pass"),
    ],
)
def test_a_bad_habit_is_seen(
    habit: Callable[[str], Iterator[str]],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FILES, text, tmp_path / "bad.py")
    FILES[text].write_text(text)
    assert list(habit(text))


def test_exemptions_are_of_files_that_exist() -> None:
    assert set(FILES) >= PICKLES | WRITES


def test_no_library_changes_how_the_process_rounds() -> None:
    """Linked with these flags, a library makes numbers near zero zero in the whole process."""
    flags = re.compile(r"-Ofast|-ffast-math|-funsafe-math-optimizations")
    found = [
        str(path)
        for path in Path(shoal.__file__).parent.rglob("*.py")
        if flags.search(path.read_text())
    ]
    assert found == []
