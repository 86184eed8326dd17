r"""The catalogue of log formats: header, masks, and where sessions and labels are.

The nineteen systems are those of Loghub, with the headers, masks and settings of Drain that its
authors' benchmark publishes; the later releases of HDFS and Android take those of the first. The
other formats are those of programs of this machine, with general masks.

Source: Zhu et al., Loghub: A Large Collection of System Log Datasets for AI-driven Log Analytics,
2023; Zhu et al., Tools and Benchmarks for Automated Log Parsing, 2019.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, suggestion
from shoal.core.extras import import_extra
from shoal.fields.data.logs.native import HeaderProgram

CONTENT = "Content"
"""Field of a header that the templates are made of."""

_IP = r"(\d+\.){3}\d+"
_NAME = r"([\w-]+\.){2,}[\w-]+"
_BLOCK = r"blk_-?\d+"
GENERAL = (
    r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    _BLOCK,
    r"(\d+\.){3}\d+(:\d+)?",
    r"(/[\w.+:@~%-]+){2,}/?",
    r"\b0[xX][0-9a-fA-F]+\b",
    r"\b\d+(\.\d+)*\b",
)
"""Masks of what has no format of its own: UUIDs, blocks, addresses, paths, hex, numbers."""

# Share of the lines of a sample that must begin as a format says.
_ENOUGH = 0.6
_SAMPLE = 2000


@dataclass(frozen=True)
class LogFormat:
    r"""How the lines of one program look.

    Args:
        name: as Loghub calls it.
        header: fields as ``<Name>`` between literal text, the last ``<Content>``; ``\`` before a
            sign, ``( ... )?`` around what may be absent, and a space for one or more.
        begins: regular expression of a line's beginning, by which the format is recognized.
        needs: what must occur in some line besides.
        masks: regular expressions of RE2, replaced one after another by ``<*>``.
        depth: of Drain's tree, as published: root, length, depth - 3 tokens, leaf.
        similarity: of Drain.
        session: regular expression of what a request is known by; empty where there is nothing.
        label: field that is ``-`` in lines that are no alerts; empty where there is none.
    """

    name: str
    header: str
    begins: str = ""
    needs: str = ""
    masks: tuple[str, ...] = GENERAL
    depth: int = 4
    similarity: float = 0.4
    session: str = ""
    label: str = ""

    @functools.cached_property
    def program(self) -> HeaderProgram:
        """The header, for the kernel.

        Raises:
            ConfigError: it cannot be read.
        """
        return compiled(self.header)


def _loghub(
    name: str, header: str, begins: str, *masks: str, st: float = 0.5, depth: int = 4, **more: str
) -> LogFormat:
    return LogFormat(name, header, begins, masks=masks, similarity=st, depth=depth, **more)


_DATE, _CLOCK = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d"
_SYSLOG = rf"[A-Z][a-z]{{2}} +\d+ {_CLOCK} \S+ "
_HDFS = _BLOCK, rf"{_IP}(:\d+)?"
_LATER = "<Date> <Time> <Level> <Component>: <Content>"
_ANDROID = (
    r"<Date> <Time>  <Pid>  <Tid> <Level> <Component>: <Content>",
    rf"\d\d-\d\d {_CLOCK}\.\d{{3}} +\d+ +\d+ [VDIWEF] ",
    r"(/[\w-]+)+",
    _NAME,
    r"\b(\-?\+?\d+)\b|\b0[Xx][a-fA-F\d]+\b|\b[a-fA-F\d]{4,}\b",
)

SYSTEMS: tuple[LogFormat, ...] = (
    _loghub(
        "HDFS",
        "<Date> <Time> <Pid> <Level> <Component>: <Content>",
        r"\d{6} \d{6} \d+ [A-Z]+ [\w.$]+: ",
        *_HDFS,
        session=_BLOCK,
    ),
    _loghub(
        "Hadoop",
        r"<Date> <Time> <Level> \[<Process>\] <Component>: <Content>",
        rf"{_DATE} {_CLOCK},\d{{3}} [A-Z]+ \[.*?\] [\w.$]+: ",
        _IP,
    ),
    _loghub(
        "Spark",
        _LATER,
        rf"\d\d/\d\d/\d\d {_CLOCK} [A-Z]+ [\w.$]+: ",
        *(_IP, r"\b[KGTM]?B\b", _NAME),
    ),
    _loghub(
        "Zookeeper",
        r"<Date> <Time> - <Level>  \[<Node>:<Component>@<Id>\] - <Content>",
        rf"{_DATE} {_CLOCK},\d{{3}} - [A-Z]+ +\[.*@\d+\] - ",
        rf"(/|){_IP}(:\d+)?",
    ),
    _loghub(
        "OpenStack",
        r"<Logrecord> <Date> <Time> <Pid> <Level> <Component> \[<ADDR>\] <Content>",
        rf"\S+ {_DATE} {_CLOCK}\.\d+ \d+ [A-Z]+ \S+ \[",
        *(rf"({_IP},?)+", r"/.+?\s", r"\d+"),
        depth=5,
        session=r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    ),
    _loghub(
        "BGL",
        "<Label> <Timestamp> <Date> <Node> <Time> <NodeRepeat> <Type> <Component> <Level> "
        "<Content>",
        r"\S+ \d{10} \d{4}\.\d\d\.\d\d \S+ \d{4}-\d\d-\d\d-\d\d\.\d\d\.\d\d\.\d+ ",
        r"core\.\d+",
        label="Label",
    ),
    _loghub(
        "HPC",
        "<LogId> <Node> <Component> <State> <Time> <Flag> <Content>",
        r"\d+ \S+ \S+ \S+ \d{9,10} \d ",
        r"=\d+",
    ),
    _loghub(
        "Thunderbird",
        r"<Label> <Timestamp> <Date> <User> <Month> <Day> <Time> <Location> "
        r"<Component>(\[<PID>\])?: <Content>",
        rf"\S+ \d{{10}} \d{{4}}\.\d\d\.\d\d \S+ [A-Z][a-z]{{2}} +\d+ {_CLOCK} ",
        _IP,
        label="Label",
    ),
    _loghub(
        "Windows",
        "<Date> <Time>, <Level>                  <Component>    <Content>",
        rf"{_DATE} {_CLOCK}, \w+ +\w+ +",
        r"0x.*?\s",
        st=0.7,
        depth=5,
    ),
    _loghub(
        "Mac",
        r"<Month>  <Date> <Time> <User> <Component>\[<PID>\]( \(<Address>\))?: <Content>",
        _SYSLOG + r"[^\[]+\[\d+\]",
        _NAME,
        st=0.7,
        depth=6,
        needs=r"com\.apple|kernel\[0\]",
    ),
    _loghub("Android", *_ANDROID, st=0.2, depth=6),
    _loghub("Android_v2", *_ANDROID, st=0.2, depth=6),
    _loghub(
        "HealthApp",
        r"<Time>\|<Component>\|<Pid>\|<Content>",
        r"\d{8}-\d+:\d+:\d+:\d+\|\w+\|\d+\|",
        st=0.2,
    ),
    _loghub(
        "Apache",
        r"\[<Time>\] \[<Level>\] <Content>",
        r"\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\] \[\w+\] ",
        _IP,
    ),
    _loghub(
        "OpenSSH",
        r"<Date> <Day> <Time> <Component> sshd\[<Pid>\]: <Content>",
        _SYSLOG + r"sshd\[\d+\]: ",
        *(_IP, _NAME),
        st=0.6,
        depth=5,
    ),
    _loghub(
        "Linux",
        r"<Month> <Date> <Time> <Level> <Component>(\[<PID>\])?: <Content>",
        _SYSLOG + r"[^:]+:",
        *(_IP, r"\d{2}:\d{2}:\d{2}"),
        st=0.39,
        depth=6,
    ),
    _loghub(
        "Proxifier",
        r"\[<Time>\] <Program> - <Content>",
        rf"\[\d\d\.\d\d {_CLOCK}\] \S.* - ",
        *(r"<\d+\ssec", r"([\w-]+\.)+[\w-]+(:\d+)?", r"\d{2}:\d{2}(:\d{2})*", r"[KGTM]B"),
        st=0.6,
        depth=3,
    ),
    _loghub("HDFS_v2", _LATER, rf"{_DATE} {_CLOCK},\d{{3}} [A-Z]+ [\w.$]+: ", *_HDFS),
    _loghub("HDFS_v3", _LATER, rf"{_DATE} {_CLOCK},\d{{3}} [A-Z]+ [\w.$]+: ", *_HDFS),
)

LOCAL: tuple[LogFormat, ...] = (
    LogFormat(
        "dpkg",
        "<Date> <Time> <Content>",
        rf"{_DATE} {_CLOCK} (startup|status|install|upgrade|configure|trigproc|remove|purge|"
        r"disappear|conffile) ",
        similarity=0.2,  # a word and its arguments
    ),
    LogFormat(
        "apt",
        "<Key>: <Content>",
        r"(Start-Date|End-Date|Commandline|Requested-By|Install|Reinstall|Upgrade|Downgrade|Remove|"
        r"Purge|Error): ",
    ),
    LogFormat("kernel", r"\[<Time>\] <Content>", r"\[ *\d+\.\d{6}\] "),
    LogFormat("pytest", "<Content>", r"(\S+\.py(::| [.FEsxX]+)|=+ .* =+$)"),
    LogFormat(
        "ray",
        r"\[<Date> <Time> <Level> <Pid> <Tid>\] <Content>",
        rf"\[{_DATE} {_CLOCK},\d{{3}} [IWEFC] \d+ \d+\] ",
    ),
    LogFormat(
        "ray_python",
        "<Date> <Time>\t<Level> <Source> -- <Content>",
        rf"{_DATE} {_CLOCK},\d{{3}}\t[A-Z]+ \S+ -- ",
    ),
    LogFormat(
        "python_imports",
        "<Content>",
        r"# |import '|Python \d",
        needs=r"_frozen_importlib",
        masks=(
            r"<\S+ object at 0x[0-9a-f]+>",
            r"<[^<>]+>",
            r"'[^']*'",
            r'"[^"]*"',
            r"(/[\w.+:@~%-]+){2,}/?",
        ),
        similarity=0.6,  # short lines of fixed words and a name
    ),
    LogFormat(
        "python",
        "<Level>:<Component>:<Content>",
        r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:",
    ),
)

PLAIN = LogFormat("plain", "<Content>")
"""Lines without a header that is known."""

FORMATS: dict[str, LogFormat] = {one.name: one for one in (*SYSTEMS, *LOCAL, PLAIN)}


def format_named(name: str) -> LogFormat:
    """A format of the catalogue.

    Raises:
        ConfigError: there is no such one; names the nearest.
    """
    known = {one.casefold(): one for one in FORMATS}
    if name.casefold() not in known:
        raise ConfigError(
            f"format = {name!r}: expected auto, or one of {', '.join(FORMATS)}"
            + suggestion(name, FORMATS)
        )
    return FORMATS[known[name.casefold()]]


def recognized(lines: Sequence[bytes]) -> LogFormat:
    """The format that most of some lines begin as; ``plain`` where that is none."""
    some = [line for line in lines[:_SAMPLE] if line.strip()]
    best, most = PLAIN, _ENOUGH
    for one in (*SYSTEMS, *LOCAL):
        begins = re.compile(one.begins.encode())
        share = sum(begins.match(line) is not None for line in some) / max(len(some), 1)
        if share > most and (
            not one.needs or any(re.search(one.needs.encode(), line) for line in some)
        ):
            best, most = one, share
    return best


def compiled(header: str) -> HeaderProgram:
    r"""A header's format for the kernel.

    Args:
        header: as of :class:`LogFormat`.

    Raises:
        ConfigError: a sign of regular expressions that is none of these, a name that stands twice,
            fields without text between them, or no content at the end.
    """
    items: list[list[int]] = []
    texts = b""
    pattern = ""
    fields: list[str] = []
    opened: list[int] = []

    def wrong(why: str) -> ConfigError:
        return ConfigError(
            rf"header = {header!r}: {why}; write fields as <Name> with text between them, the last "
            r"<Content>; \[ for a bracket, and (...)? around what may be absent"
        )

    for token in re.findall(r"<\w+>|\\.|\)\?| +|.", header):
        if re.fullmatch(r"<\w+>", token):
            name = token[1:-1]
            if name in fields:
                raise wrong(f"<{name}> stands twice")
            if items and items[-1][0] == 0:
                raise wrong(f"nothing between <{fields[-1]}> and <{name}>")
            items.append([0, len(fields), 0])
            fields.append(name)
            pattern += f"(?P<{name}>.*?)"
        elif token == "(":  # noqa: S105 - a token of the grammar
            if opened:
                raise wrong("a group in a group")
            opened.append(len(items))
            items.append([2, 0, 0])
            pattern += "(?:"
        elif token == ")?":  # noqa: S105
            if not opened:
                raise wrong("a group that ends and does not begin")
            if not any(kind == 0 for kind, _, _ in items[opened[-1] :]):
                raise wrong("a group without a field")
            items.append([3, 0, 0])
            items[opened.pop()][1] = len(items)
            pattern += ")?"
        elif re.fullmatch(r"[\\.^$*+?{}\[\]()|]", token):
            raise wrong(f"{token!r} is not understood")
        else:
            literal = " " if token.isspace() and token[0] == " " else token.removeprefix("\\")
            if token[0] == "\\" and literal.isalnum():
                raise wrong(f"{token!r} is not understood")
            pattern += r"\ " if literal == " " else re.escape(literal)
            if items and items[-1][0] == 1:
                items[-1][2] += len(literal.encode())
            else:
                items.append([1, len(texts), len(literal.encode())])
            texts += literal.encode()
    if opened:
        raise wrong("a group that does not end")
    if not fields or fields[-1] != CONTENT or items[-1][0] != 0:
        raise wrong("it does not end with <Content>")
    return HeaderProgram(
        tuple(fields),
        np.array(items, np.int32),
        texts,
        re.compile(pattern.replace(r"\ ", r"[\t-\r ]++").encode(), re.DOTALL),
        re.compile(pattern.encode(), re.DOTALL),
    )


def check_masks(masks: Sequence[str]) -> None:
    """Refuse a mask that RE2 does not know, before anything is read.

    Raises:
        ConfigError: names it.
    """
    pa: Any = import_extra("pyarrow", extra="fields", purpose="masking lines")
    compute: Any = import_extra("pyarrow.compute", extra="fields", purpose="masking lines")
    for mask in masks:
        try:
            compute.replace_substring_regex(pa.array([b"a"]), mask, "<*>")
        except pa.ArrowInvalid as cause:
            reason = str(cause).partition("\n")[0]
            raise ConfigError(
                f"masks: {mask!r}: {reason}; give a regular expression of RE2, which has no "
                "look-ahead and no references"
            ) from cause
