"""Live and past runs, as pages show them: which there are, how each stands, its curves.

Nothing here writes, and nothing outside the directory of a run is read through it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar

from shoal.core.errors import ShoalError, StoreError
from shoal.cost.score import RunEntry, Score, ScoredQuantity, run_id
from shoal.ir import Plan, Report, kind_named, kind_of
from shoal.ir.job_kind import RunFollower, follower_of
from shoal.parallel.comm.heartbeat import Heartbeat
from shoal.plan.saved import read_plan
from shoal.train.layout import RunDir

State = Literal["running", "finished", "stopped", "failed"]

# A rank writes its heartbeat many times a second; a long save or a compilation is silent.
QUIET_S = 60.0
# A rank that has left an error is over; a robust run may start it again.
ERROR_S = 10.0
# Before the first heartbeat the ranks start and read the tokens.
START_S = 120.0
# What an event file may have before only its end is read.
MAX_EVENTS_BYTES = 64 * 2**20
_TAIL_BYTES = 64 * 1024
# Starts, faults and restarts that are kept of a run, and what reports them.
MAX_STORY = 2000
# Events of one checkpoint at farther levels.
MAX_LEVELS = 20
# Ranks whose errors a page shows.
_MOST_ERRORS = 8
_STORY = frozenset({"start", "step", "fault", "restart", "stop", "end"})

# Files of a run that can be looked at, with the type they are served as.
FILES = {
    "report.html": "text/html; charset=utf-8",
    "report.json": "application/json",
    "plan.yaml": "text/plain; charset=utf-8",
    "events.jsonl": "text/plain; charset=utf-8",
}
# Pictures that a run has drawn, and how many of them a page shows.
_DRAWN, _MOST_DRAWN = re.compile(r"[\w-]{1,64}\.svg"), 8

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run and how it stands.

    Args:
        entry: where it lies and what it is.
        state: running, finished, stopped on request, or failed (ended without a word).
        numbers: quantity -> measured and predicted, of the report of its newest start.
    """

    entry: RunEntry
    state: State
    numbers: dict[str, ScoredQuantity] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """It runs now."""
        return self.state == "running"


def open_inside(root: Path, name: str) -> BinaryIO | None:
    """A regular file directly in the directory of a run; None if there is none.

    Args:
        root: the directory.
        name: a plain file name; neither a path nor a link is followed.
    """
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        return None
    try:
        # Not blocking: a pipe without a writer must not stop the page.
        fd = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # missing, a link, or not ours to read: for a page it is not there
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def drawn(root: Path) -> list[str]:
    """Names of the pictures directly in the directory of a run."""
    try:
        names = sorted(path.name for path in root.iterdir() if _DRAWN.fullmatch(path.name))
    except OSError:
        return []
    return names[:_MOST_DRAWN]


def file_type(name: str) -> str | None:
    """The type that a file of a run is served as; None if it is none that can be looked at."""
    return "image/svg+xml" if _DRAWN.fullmatch(name) else FILES.get(name)


class Events:
    """What the event file of one run says; each :meth:`refresh` reads only what is new.

    Args:
        root: directory of the run.
        follow: makes what its kind of job reads its events with.
    """

    def __init__(self, root: Path, follow: Callable[[], RunFollower | None] = lambda: None) -> None:
        self._root, self._follow = root, follow
        self._lock = threading.Lock()
        self._file = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self._at = 0
        # Step -> its event; one that was lost and done again counts once.
        self.steps: dict[int, dict[str, Any]] = {}
        self.evaluations: list[dict[str, Any]] = []
        # Step -> the newest event about its checkpoint.
        self.saves: dict[int, dict[str, Any]] = {}
        # Step -> what became of it at farther levels, the newest last.
        self.levels: dict[int, deque[dict[str, Any]]] = {}
        self.start: dict[str, Any] = {}
        self.starts = 0
        # What says how the run went; of steps in a row the first and the newest.
        self.story: deque[dict[str, Any]] = deque(maxlen=MAX_STORY)
        self.sample = ""
        # With which the run has ended; empty once it was started again.
        self.error = ""
        self.skipped_lines = 0
        self.shortened = False
        self.follower = self._follow()

    def refresh(self) -> None:
        """Read what was written since the last time."""
        with self._lock:
            file = open_inside(self._root, "events.jsonl")
            if file is None:
                self._forget()
                return
            with file:
                result = os.fstat(file.fileno())
                if (result.st_dev, result.st_ino) != self._file or result.st_size < self._at:
                    self._forget()
                    self._file = (result.st_dev, result.st_ino)
                if result.st_size - self._at > MAX_EVENTS_BYTES:
                    self._at = result.st_size - MAX_EVENTS_BYTES
                    self.shortened = True
                file.seek(self._at)
                data = file.read(MAX_EVENTS_BYTES)
            whole = data.rfind(b"\n") + 1
            self._at += whole
            for line in data[:whole].splitlines():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["kind"]
            if kind == "step":
                self.steps[int(event["step"])] = event
            elif kind == "eval":
                self.evaluations.append(event)
            elif kind == "start":
                self.start = event
                self.starts += 1
                self.error = ""
            elif kind == "error":
                self.error = str(event["message"])[:2000]
            elif kind in ("checkpoint", "checkpoint_failed"):
                self.saves[int(event["step"])] = event
            elif kind == "checkpoint_level" and event["step"] is not None:
                kept = self.levels.setdefault(int(event["step"]), deque(maxlen=MAX_LEVELS))
                kept.append(event)
            elif kind == "sample":
                self.sample = str(event["text"])[:20_000]
            if self.follower is not None:
                self.follower.take(event)
            if kind in _STORY:
                self._tell(event)
        except (ValueError, TypeError, KeyError, RecursionError):
            self.skipped_lines += 1  # shown on the page

    def _tell(self, event: dict[str, Any]) -> None:
        story = self.story
        newest = [event["kind"], *(one["kind"] for one in itertools.islice(reversed(story), 2))]
        if newest == ["step"] * 3:
            story.pop()
        story.append(event)

    @property
    def last(self) -> dict[str, Any]:
        """The newest step; empty before the first."""
        return self.steps[max(self.steps)] if self.steps else {}

    def curve(
        self,
        key: str,
        factor: float = 1.0,
        points: int = 300,
        window: tuple[float, float] | None = None,
    ) -> tuple[list[float], list[float]]:
        """Steps and values of a curve of at most so many points, each the mean of its steps.

        Args:
            key: field of the events.
            factor: to the unit that is shown.
            points: most points.
            window: first and last step; all of them if None.
        """
        first, last = window or (-math.inf, math.inf)
        pairs = [
            (step, factor * number(event.get(key)))
            for step, event in sorted(self.steps.items())
            if first <= step <= last
        ]
        pairs = [pair for pair in pairs if math.isfinite(pair[1])]
        size = math.ceil(len(pairs) / points) or 1
        parts = [pairs[at : at + size] for at in range(0, len(pairs), size)]
        return (
            [sum(x for x, _ in part) / len(part) for part in parts],
            [sum(y for _, y in part) / len(part) for part in parts],
        )


def number(value: Any) -> float:
    """A number of an event, which may be the text ``nan``; not a number when it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def finite(value: Any) -> float | None:
    """A number of an event; None when it is none, or not finite."""
    result = number(value)
    return result if math.isfinite(result) else None


def rank_errors(root: Path | None) -> list[str]:
    """What the ranks of a run have left as errors, equal ones together; the first few ranks."""
    ranks = None if root is None else RunDir(root).ranks
    if ranks is None or ranks.is_symlink() or not ranks.is_dir():
        return []
    messages: dict[str, list[str]] = {}
    for path in sorted(ranks.glob("rank-*.error"))[:_MOST_ERRORS]:
        file = open_inside(ranks, path.name)
        if file is None:
            continue
        with file:
            raw = file.read(65536)
        try:
            message = str(json.loads(raw)["message"])
        except (ValueError, KeyError, TypeError):
            message = "its error cannot be read"
        messages.setdefault(message, []).append(path.stem)
    return [f"{', '.join(names)}: {message}" for message, names in messages.items()]


class _Cache(Generic[_T]):
    """The last few values, made again when their key changes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: dict[Any, _T] = {}

    def get(self, key: Any, make: Callable[[], _T]) -> _T:
        with self._lock:
            if key in self._kept:
                self._kept[key] = self._kept.pop(key)  # the newest stays longest
                return self._kept[key]
        value = make()
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self._size:
                del self._kept[next(iter(self._kept))]
        return value


class Runs:
    """All runs: those the score knows and those in directories that were given.

    Args:
        folders: directories whose sub-directories are runs.
        score: path of the score; the one in Shoal's home if not given.
    """

    def __init__(self, folders: Sequence[Path] = (), score: Path | None = None) -> None:
        self._folders = tuple(folders)
        self._path = score
        self._events: _Cache[Events] = _Cache(16)
        self._plans: _Cache[Plan[Any]] = _Cache(64)
        self._reports: _Cache[Report[Any]] = _Cache(64)

    def score(self) -> Score:
        """The store, reopened because another process may have replaced it.

        Raises:
            StoreError: it cannot be read, such as one of a newer version.
        """
        return Score(self._path)

    def all(self) -> list[RunStatus]:
        """Every run, live ones first, then newest first; numbers are not read yet.

        Raises:
            StoreError: the score cannot be read.
        """
        entries = self.score().run_dirs()
        known = {entry.id for entry in entries}
        entries += [entry for entry in self._scan() if entry.id not in known]
        results = [
            RunStatus(entry, "finished" if entry.ended or entry.path is None else _state(entry))
            for entry in entries
        ]
        return sorted(results, key=lambda run: (not run.live, -run.entry.started_s))

    def detailed(self, runs: Sequence[RunStatus]) -> list[RunStatus]:
        """The same runs with their numbers and exact states; for the few of a page."""
        ended = [run.entry.report for run in runs if run.entry.ended and run.entry.report]
        numbers = self.score().quantities(ended)
        return [self._detailed(run, numbers) for run in runs]

    def find(self, identity: str) -> RunStatus | None:
        """The run of this id; None if there is none."""
        for run in self.all():
            if run.entry.id == identity:
                return self.detailed([run])[0]
        return None

    def events(self, entry: RunEntry) -> Events:
        """What its event file says up to now."""
        if entry.path is None:
            return Events(Path(os.devnull))
        root = entry.path
        events = self._events.get(root, lambda: Events(root, lambda: follower_of(entry.kind)))
        events.refresh()
        return events

    def plan(self, entry: RunEntry) -> Plan[Any] | None:
        """Its plan; None if there is none.

        Raises:
            ShoalError: it cannot be read.
        """
        if entry.ended:
            report = self.report(entry)
            return None if report is None else report.plan
        return self._plan_file(entry)

    def report(self, entry: RunEntry) -> Report[Any] | None:
        """Its report, or what it would say if the run ended now; None before the first step.

        Raises:
            ShoalError: report or plan cannot be read.
        """
        if entry.ended and entry.report is not None:
            return self.score().report(entry.report)
        plan = self._plan_file(entry)
        if entry.path is None or plan is None:
            return None
        directory = RunDir(entry.path)
        file = open_inside(entry.path, directory.events.name)
        if file is None:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
        # Long runs grow by little between two looks; reading all of it again takes time.
        key = (entry.path, entry.started_s, size if size < 2**20 else int(time.monotonic() / 30))
        try:
            return self._reports.get(key, lambda: kind_of(plan).report(plan, directory.root))
        except StoreError:
            if not self.events(entry).steps:
                return None  # no step is done yet
            raise
        except (KeyError, TypeError, ValueError) as cause:
            raise StoreError(
                f"{directory.events}: an event is invalid for the report ({cause!r}); "
                "did a loss become infinite?"
            ) from cause

    def _plan_file(self, entry: RunEntry) -> Plan[Any] | None:
        if entry.path is None:
            return None
        path = RunDir(entry.path).plan
        file = open_inside(entry.path, path.name)
        if file is None:
            return None
        with file:
            result = os.fstat(file.fileno())
        return self._plans.get((path, result.st_mtime_ns, result.st_size), lambda: read_plan(path))

    def _detailed(self, run: RunStatus, numbers: dict[int, dict[str, ScoredQuantity]]) -> RunStatus:
        entry = run.entry
        if entry.ended and entry.report is not None:
            own = numbers[entry.report]
            over = "finished" not in own or own["finished"].measured
            return replace(run, state="finished" if over else "stopped", numbers=own)
        if entry.path is None:
            return run
        if run.live:
            last = self.events(entry).last
            shown = {key: number(last.get(key)) for key in ("tokens_per_s", "loss", "mfu")}
            return replace(
                run, numbers={k: ScoredQuantity(v) for k, v in shown.items() if math.isfinite(v)}
            )
        return replace(run, numbers=_reported(entry.path))

    def _scan(self) -> Iterator[RunEntry]:
        """Runs in the given directories; a link to a directory is none."""
        for folder in self._folders:
            try:
                with os.scandir(folder) as children:
                    places = [Path(child.path) for child in children if _is_run(child)]
            except OSError as cause:
                raise StoreError(
                    f"{folder}: cannot be read ({cause.strerror}); give --runs a directory of runs"
                ) from cause
            yield from map(_entry, places)


def _is_run(child: os.DirEntry[str]) -> bool:
    return child.is_dir(follow_symlinks=False) and Path(child.path, "plan.yaml").is_file()


def _entry(root: Path) -> RunEntry:
    file = open_inside(root, "plan.yaml")
    head, started = "", 0.0
    if file is not None:
        with file:
            head = file.read(4096).decode(errors="replace")
            started = os.fstat(file.fileno()).st_mtime
    head = head.partition("\nmachine:")[0]
    # Only three words of the job are needed, and reading a whole plan takes 15 ms.
    words = {
        key: value.strip("'\"")
        for key, value in re.findall(r"^  (job|name|model): (\S+)$", head, flags=re.MULTILINE)
    }
    return RunEntry(
        id=run_id(root),
        kind=words.get("job", "train"),
        name=words.get("name", root.name),
        model=words.get("model", ""),
        path=root.resolve(),
        started_s=started,
    )


def _state(entry: RunEntry) -> State:
    assert entry.path is not None
    last = _last_word(entry.path)
    if last == "end":
        return "finished"
    if last == "stop":
        return "stopped"
    if last == "error":
        return "failed"
    # When a run started is known by the wall clock alone, which may have been set since.
    quiet = max(0.0, time.time() - entry.started_s) - START_S + QUIET_S
    for rank in itertools.count():
        beat = Heartbeat.read(RunDir(entry.path).beat(rank), rank)
        if beat is None:
            break
        quiet = beat.age_s if rank == 0 else min(quiet, beat.age_s)
    # The next start of the ranks removes the errors of the one before.
    limit = ERROR_S if rank_errors(entry.path) else QUIET_S
    return "running" if quiet < limit else "failed"


def _last_word(root: Path) -> str:
    """Kind of the newest event that says how the run stands."""
    file = open_inside(root, "events.jsonl")
    if file is None:
        return ""
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).splitlines()
    for line in reversed(lines):
        match = re.search(rb'"kind": "(end|stop|error|step|start|eval|checkpoint)"', line[:200])
        if match:
            return match[1].decode()
    return ""


def _reported(root: Path) -> dict[str, ScoredQuantity]:
    """The numbers of ``report.json`` of a run that the score does not know."""
    file = open_inside(root, "report.json")
    if file is None:
        return {}
    with file:
        raw = file.read(4 * 2**20)
    try:
        data = json.loads(raw)
        kind = kind_named(data["plan"]["job"].get("job", "train"))
        report = kind.report_type.model_validate(data)
    except (ValueError, KeyError, TypeError, AttributeError, ShoalError):
        return {}  # cut short, or of another version: the page of the run shows more
    numbers = {}
    for name, value in report.measured.items():
        error = report.errors.get(name)
        numbers[name] = ScoredQuantity(value, None if error is None else value / (1 + error))
    return numbers
