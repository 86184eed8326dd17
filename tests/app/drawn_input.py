"""Bad input, drawn: command lines, jobs in YAML, values in Python. Each is used or refused.

A module of its own, because it is also run in a process that has no torch.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from drawn import LEAST, STEADY
from shoal.app.cli import app
from shoal.core.config import parse
from shoal.core.counts import count, duration
from shoal.core.errors import ShoalError
from shoal.core.parts import KINDS, table
from shoal.cost.shapes import resolve
from shoal.ir import Machine, kind_named
from shoal.ir.job_kind import kinds
from shoal.machine.described import load

RUN = CliRunner()
# Longest that one input may take: a hang is no answer.
LIMIT_S = 60

# Lines that do nothing but plan, show or refuse, to which bad options are added.
LINES = (
    "train job.yaml --dry-run",
    "run train job.yaml --dry-run",
    "run serve shoal-4m --dry-run",
    "run cluster nowhere.npy --dry-run",
    "plan train shoal-4m --tokens 2M --planner rules -m laptop",
    "plan serve shoal-4m --no-compare --requests 3 -m laptop",
    "plan drafter nowhere",
    "serve nowhere --dry-run",
    "train diagnose nowhere",
    "score",
    "explain price",
    "explain fold",
    "model ls nowhere",
    "model convert nowhere out",
    "model generate nowhere",
    "bench tune nowhere",
    "bench serve --model nowhere --anyway",
    "claims check nowhere.json",
    "claims report --results nowhere",
    "probe --show laptop",
    "check nowhere.py",
)
SMALL = {
    "model": "shoal-4m",
    "steps": 2,
    "microbatch": 4,
    "parallel": {"dp": 1},
    "shard": "replicated",
}
# These begin something that is no matter of bad input.
SKIP = {"install_completion", "show_completion", "help", "peers", "url", "budget", "results", "out"}
BAD = (
    *("", " ", "-", "=", "a=b=c", "--", "0", "-1", "1.5", "nan", "inf", "-inf", "1e400", "1e-400"),
    *("99999999999999999999", "true", "null", "[", "{", "{a: ", "[bold]", "[/x]", "a: b: c", "%s"),
    *("..", "/", "/dev/null", "/dev/full", ".", "nowhere/deep/er", "~", "\\", "\n", "\t", "'", '"'),
    *("x" * 5000, "é", "𝕏", "\u202e", "name: x", "optimizer=lion", "parallel.dp=0", "steps=-1"),
    *("parallel=7", "optimizer={name: adamw, lr: -1}", "model=[]", "seq_len=1e9", "a.b.c=1", "=1"),
    *("0xH100", "1x", "xH100", "8xNOPE", "8xH100@", "99999999xH100", "0x10", "1_000", "١", "Ⅷ"),
)

texts = st.one_of(
    st.sampled_from(BAD),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.integers(-5, 5).map(str),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from([10**20, -(10**20), float("nan"), float("inf"), 1e-300, *BAD]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["name", "x", "dp"]), inner)
    ),
    max_leaves=4,
)

# Way in -> inputs that were refused.
REFUSED: Counter[str] = Counter()


class Lasted(Exception):  # noqa: N818
    """An input that was neither used nor refused in time."""


@contextlib.contextmanager
def limited(what: object) -> Iterator[None]:
    """Raise where an input takes longer than it may."""

    def late(_number: int, _frame: object) -> None:
        raise Lasted(f"{what}: still working after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(door: str, *words: str) -> None:
    """Run a line: it may be used, or be refused in one line that leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    with limited(words):
        done = RUN.invoke(app, list(words))
    error = done.exception
    if error is None:
        return
    trace = "".join(traceback.format_exception(error))
    assert isinstance(error, (ShoalError, SystemExit)), f"{words}\n{trace}"
    if isinstance(error, ShoalError):
        assert str(error).strip(), words
    assert done.exit_code in (1, 2), (words, done.output)
    assert "Traceback" not in done.output, (words, done.output)
    assert sorted(Path().rglob("*")) == before, words
    REFUSED[door] += done.exit_code != 0


def used(*makers: Callable[[], object], what: object) -> None:
    """Make values of one input: each may be made, or be refused."""
    refused = False
    for make in makers:
        with limited(what):
            try:
                make()
            except ShoalError:
                refused = True
    REFUSED["Python"] += refused


def _options(line: str) -> list[str]:
    """Options of a line's command that take a value."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("shoal", ["x"], resilient_parsing=True)
    words = line.split()
    while words and hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(context, words)
        context = type(context)(command, info_name="shoal", parent=context)
    return [
        param.opts[0]
        for param in command.params
        if param.opts[0].startswith("--")
        and not getattr(param, "is_flag", False)
        and param.name not in SKIP
    ]


OPTIONS: Mapping[str, list[str]] = {line: _options(line) for line in LINES}

line_inputs = st.sampled_from(LINES).flatmap(
    lambda line: st.lists(
        st.tuples(st.sampled_from(OPTIONS[line] or ["--nope"]), texts), min_size=1, max_size=2
    ).map(lambda given: (line, given))
)


def _paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in schema.get("properties", {}):
        yield f"{prefix}{name}"


JOBS = {name: list(_paths(kind.job_type.model_json_schema())) for name, kind in kinds().items()}
job_inputs = st.sampled_from(sorted(JOBS)).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        st.one_of(
            st.dictionaries(st.sampled_from([*JOBS[kind], "nope", "job"]), values, max_size=3),
            values,
        ),
    )
)
part_inputs = st.tuples(st.sampled_from(sorted(set(KINDS) - {"claim", "job"})), values)


@settings(max_examples=110, **STEADY)
@given(line_inputs)
@example(("train job.yaml --dry-run", [("--model", "x" * 5000)]))
@example(("probe --show laptop", [("--picture", "")]))
@example(("plan drafter nowhere", [("--top", "0")]))
def lines(drawn: tuple[str, list[tuple[str, str]]]) -> None:
    """Command lines with one or two bad values."""
    line, given_ = drawn
    tried("command line", *line.split(), *(f"{option}={value}" for option, value in given_))


@settings(max_examples=60, **STEADY)
@given(job_inputs)
def jobs(drawn: tuple[str, Any]) -> None:
    """Jobs in YAML with bad values, and files that are no jobs."""
    kind, raw = drawn
    if kind == "train" and isinstance(raw, dict):
        raw = SMALL | raw  # what is good after all is planned in no time
    Path("bad.yaml").write_text(yaml.safe_dump(raw, allow_unicode=True), encoding="utf-8")
    tried("YAML", "run", kind, "bad.yaml", "--dry-run", "-m", "laptop")


@settings(max_examples=60, **STEADY)
@given(job_inputs, part_inputs, texts)
@example(("serve", {"model": "x" * 300}), ("schedule", None), "x" * 300)
@example(("train", {"model": "~nobody-here/x"}), ("schedule", None), "~nobody-here/x")
def python_values(job: tuple[str, Any], part: tuple[str, Any], text: str) -> None:
    """Values that Python code makes of what users wrote."""
    kind, raw = job
    used(
        lambda: parse(kind_named(kind).job_type, raw, where="job"),
        lambda: parse(Machine, raw, where="machine"),
        what=raw,
    )
    used(lambda: table(part[0]).build(part[1], where="x"), what=part)
    used(
        *(functools.partial(read, text) for read in (load, resolve, count)),
        lambda: duration(text, "x"),
        what=text,
    )


def every() -> None:
    """All of them, in a working directory of their own; enough of them are refused."""
    REFUSED.clear()
    Path("job.yaml").write_text(yaml.safe_dump(SMALL))
    lines()
    jobs()
    python_values()
    for door in ("command line", "YAML", "Python"):
        assert REFUSED[door] >= LEAST[door], REFUSED
