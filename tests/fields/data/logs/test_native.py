"""The native functions for logs are those of reference.py, and formats are read as meant."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.fields.data.logs import native, reference
from shoal.fields.data.logs.formats import (
    FORMATS,
    LOCAL,
    SYSTEMS,
    check_masks,
    compiled,
    format_named,
    recognized,
)
from shoal.fields.data.logs.native import SplitLines

WORDS = st.sampled_from([b"a", b"b", b"open", b"x7", b"<*>", b"closed", b"12", b"\xff"])
LINES = st.lists(st.lists(WORDS, max_size=5).map(b" ".join), max_size=40)
TEXTS = st.binary(max_size=60) | st.text("a \n\r:[]x", max_size=60).map(str.encode)


def column(lines: list[bytes]) -> pa.Array:
    return pa.array(lines, pa.large_binary())


@given(text=TEXTS)
@settings(deadline=None)
def test_lines_are_cut_and_nothing_is_lost(text: bytes) -> None:
    begin, end, ending = native.split_lines(text)
    lines = [text[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
    assert list(zip(lines, ending.tolist(), strict=True)) == reference.split_lines(text)
    assert (
        b"".join(line + (b"\n", b"\r\n", b"")[e] for line, e in zip(lines, ending, strict=True))
        == text
    )


@given(
    lines=LINES,
    routed=st.integers(0, 3),
    similarity=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    children=st.integers(2, 4),
    exact=st.booleans(),
    runs=st.booleans(),
    cut=st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_the_tree_is_that_of_the_reference(
    lines: list[bytes],
    routed: int,
    similarity: float,
    children: int,
    exact: bool,
    runs: bool,
    cut: int,
) -> None:
    """Also where a batch ends in the middle, and though lines that return are cached."""
    given_ = routed, similarity, children
    slow = reference.SlowTemplateTree(*given_, exact=exact, runs=runs)
    expected = slow.add(lines)
    tree = native.TemplateTree(*given_, exact=exact, runs=runs)
    groups = [*tree.add(column(lines[:cut])), *tree.add(column(lines[cut:]))]
    assert groups == expected
    assert tree.templates() == slow.templates()


@given(
    lines=st.lists(TEXTS.map(lambda text: text.replace(b"\n", b"")), max_size=10),
    header=st.sampled_from(
        [
            "<A> <Content>",
            r"\[<A>\] <Content>",
            r"<A>(\[<B>\])?: <Content>",
            r"<A>:<B>( <C>)? x<Content>",
            "<Content>",
        ]
    ),
    flexible=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_headers_are_those_of_a_regular_expression(
    lines: list[bytes], header: str, flexible: bool
) -> None:
    text = b"\n".join(lines)
    cut = native.split_lines(text)
    program = compiled(header)
    spans, ok = native.header_fields(text, cut, program, flexible=flexible)
    pattern = program.pattern if flexible else program.exact
    for at, (begin, end) in enumerate(zip(cut.begin.tolist(), cut.end.tolist(), strict=True)):
        line = text[begin:end].strip(b" \t\n\r\v\f") if flexible else text[begin:end]
        found = pattern.fullmatch(line)
        assert ok[at] == (found is not None)
        for place, name in enumerate(program.fields):
            a, b = spans[at, place].tolist()
            got = None if a < 0 else text[a:b]
            if found is not None:
                assert got == found.group(name)
            else:
                assert got == (line if place == len(program.fields) - 1 else None)


def test_a_line_without_a_header_does_not_take_forever() -> None:
    line = b"word " * 4000
    lines = SplitLines(np.array([0]), np.array([len(line)]), np.zeros(1, np.uint8))
    _, ok = native.header_fields(line, lines, FORMATS["HDFS"].program, flexible=True)
    assert not ok[0]


@given(
    template=st.lists(st.sampled_from([b"a", b"<*>", b"b<*>", b"c"]), max_size=4).map(b" ".join),
    line=st.lists(st.sampled_from([b"a", b"b1", b"c", b" ", b"7"]), max_size=6).map(b" ".join),
    flexible=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_parameters_are_those_of_a_regular_expression(
    template: bytes, line: bytes, flexible: bool
) -> None:
    found = native.parameters(column([line]), np.zeros(1, np.int32), [template], flexible=flexible)
    expected = reference.parameters(template, line, flexible=flexible)
    assert found.ok[0] == (expected is not None)
    if expected is not None:
        assert found.values.to_pylist() == expected


def test_without_a_compiler_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"1 INFO a: got 5 of 7\n2 WARN b: got 6 of 8\r\nnothing\n"
    program = compiled("<Time> <Level> <Name>: <Content>")
    ids, templates = np.zeros(3, np.int32), [b"got <*> of <*>"]

    def all_of_it() -> list[object]:
        lines = native.split_lines(text)
        spans, ok = native.header_fields(text, lines, program, flexible=True)
        contents = native.gather(text, spans[:, -1])
        tree = native.TemplateTree(1, 0.4, 10)
        groups = tree.add(contents)
        found = native.parameters(contents, ids, templates, flexible=True)
        return [
            spans.tolist(),
            ok.tolist(),
            contents.to_pylist(),
            groups.tolist(),
            tree.templates(),
            found.counts.tolist(),
            found.values.to_pylist(),
            found.ok.tolist(),
        ]

    quick = all_of_it()
    monkeypatch.setattr(native, "native", lambda: None)
    assert all_of_it() == quick
    assert quick[4] == [b"got <*> of <*>", b"nothing"]
    assert quick[7] == [True, True, False]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("<A> <B>", "does not end with <Content>"),
        ("<A><B> <Content>", "nothing between <A> and <B>"),
        ("<A> <A> <Content>", "stands twice"),
        ("<A>* <Content>", "is not understood"),
        ("(<A> <Content>", "does not end"),
        ("( x)? <Content>", "without a field"),
    ],
)
def test_headers_that_cannot_be_read(header: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compiled(header)


def test_masks_are_those_of_re2() -> None:
    for form in FORMATS.values():
        check_masks(form.masks)
        assert form.program.fields[-1] == "Content"
    with pytest.raises(ConfigError, match="no look-ahead"):
        check_masks([r"(?=x)y"])


def test_the_catalogue() -> None:
    assert len(SYSTEMS) == 19
    assert format_named("hdfs") is FORMATS["HDFS"]
    with pytest.raises(ConfigError, match="did you mean 'Zookeeper'"):
        format_named("Zookeper")


SAMPLES = {
    "HDFS": b"081109 203615 148 INFO dfs.DataNode$PacketResponder: PacketResponder 1 terminating",
    "Hadoop": b"2015-10-18 18:01:47,978 INFO [main] org.apache.hadoop.v2.App: Created app",
    "Spark": b"17/06/09 20:10:40 INFO spark.SecurityManager: Changing view acls to: yarn",
    "Zookeeper": b"2015-07-29 17:41:44,747 - INFO  [Quorum[myid=1]/0:2181:Fast@774] - Time out",
    "OpenStack": b"nova-api.log.1 2017-05-16 00:00:00.008 25746 INFO nova.osapi [req-3 a] 10.1 GET",
    "BGL": b"- 1117838570 2005.06.03 R02-M1 2005-06-03-15.42.50.675872 R02 RAS KERNEL INFO error",
    "HPC": b"134681 node-246 unix.hw state_change.unavailable 1077804742 1 Component State",
    "Thunderbird": b"- 1131566461 2005.11.09 dn228 Nov 9 12:01:01 dn228/dn228 crond[2915]: run",
    "Windows": b"2016-09-28 04:30:30, Info                  CBS    Loaded Servicing Stack",
    "Mac": b"Jul  1 09:00:55 host kernel[0]: IOThunderboltSwitch",
    "Android": b"03-17 16:13:38.811  1702  2395 D WindowManager: printFreezing",
    "HealthApp": b"20171223-22:15:29:606|Step_LSC|30002312|onStandStepChanged 3579",
    "Apache": b"[Sun Dec 04 04:47:44 2005] [notice] workerEnv.init() ok",
    "OpenSSH": b"Dec 10 06:55:46 LabSZ sshd[24200]: Invalid user webmaster",
    "Linux": b"Jun 14 15:16:01 combo sshd(pam_unix)[19939]: authentication failure",
    "Proxifier": b"[10.30 16:49:06] chrome.exe - proxy.cse.cuhk.edu.hk:5070 close",
    "HDFS_v2": b"2016-10-06 16:26:03,985 INFO org.apache.hadoop.NameNode: registered UNIX signal",
    "dpkg": b"2025-06-24 14:36:25 status unpacked libc6:amd64 2.36-9",
    "apt": b"Start-Date: 2025-06-24  14:36:25",
    "kernel": b"[    0.000000] Linux version 6.1",
    "pytest": b"tests/test_a.py::test_b PASSED                    [ 10%]",
    "ray": b"[2024-01-01 10:00:00,123 I 1234 5678] (raylet) main.cc:123: started",
    "python": b"INFO:root:started",
    "plain": b"something else entirely",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_formats_are_recognized_and_their_headers_match(name: str) -> None:
    line = SAMPLES[name]
    assert recognized([line] * 3).name == name
    assert FORMATS[name].program.pattern.fullmatch(line)


def test_every_format_has_a_beginning() -> None:
    for form in (*SYSTEMS, *LOCAL):
        re.compile(form.begins)
        assert form.begins
