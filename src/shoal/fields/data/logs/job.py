"""The values of a job on logs: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field, NonNegativeInt, model_validator

from shoal.core.config import Kind
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.fields.data.readers import BadRows
from shoal.ir import Job, Plan, Report


class ParseLogsJob(Job):
    r"""Find the templates of a log, and by them anomalies; or make a log small.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a log file or a directory of them, of any ending, also ``.gz``, ``.bz2``, ``.xz``; or
            ``imports``, what this Python says about its imports.
        pattern: of the names of files in a directory.
        format: a name of the catalogue, or ``auto`` to recognize it.
        header: a header of the user's own, such as ``<Date> <Time> <Level>: <Content>``.
        masks: regular expressions of RE2 that are replaced by ``<*>``; None for the format's own.
        parser: how templates are found; None lets the planner choose.
        anomalies: how unusual sessions or windows are found; None finds none.
        session: regular expression of what a request is known by, such as ``blk_-?\d+``; empty for
            the format's own. Lines are grouped by it; where there is none, by ``window``.
        window: lines of a group where there are no sessions.
        stride: lines from one window to the next; 0 for ``window``, less lets them overlap.
        pack: write the log in a small container in the place of templates.
        unpack: ``data`` is such a container; write the log.
        bad: lines that are too long to be read: ``raise`` an error, or ``skip`` and count them.
        seed: random seed.
    """

    job: Literal["parse_logs"] = "parse_logs"
    name: str = Field(default="parse_logs", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    pattern: str = "*"
    format: str = "auto"
    header: str = ""
    masks: tuple[str, ...] | None = None
    parser: Annotated[Choice, Kind("log_parser")] | None = None
    anomalies: Annotated[Choice, Kind("anomaly_detector")] | None = None
    session: str = ""
    window: Annotated[int, Ge(2)] = 100
    stride: NonNegativeInt = 0
    pack: bool = False
    unpack: bool = False
    bad: BadRows = "raise"
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_thing(self) -> ParseLogsJob:
        if self.pack and self.unpack:
            raise ConfigError("pack and unpack are both true; a run does one of them")
        if self.stride > self.window:
            raise ConfigError(
                f"stride = {self.stride}: more than window = {self.window}, which would leave out "
                f"lines; give 1 to {self.window}, or 0"
            )
        return self


class ParseLogsPlan(Plan[ParseLogsJob]):
    """A plan for logs: its job has a parser, and the format that was recognized.

    Args:
        num_bytes: of text.
        format: name of the format.
    """

    num_bytes: float
    format: str


class ParseLogsReport(Report[ParseLogsPlan]):
    """A report on logs; its details have ``templates``: the most frequent, each with its count."""
