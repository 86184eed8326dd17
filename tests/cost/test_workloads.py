"""Workloads: the same key gives the same arrivals; lengths, prefixes and files are as told."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import write_trace

from shoal.core.errors import ConfigError, DataError, UnknownPartError
from shoal.core.parts import Choice
from shoal.cost.workloads import WORKLOADS
from shoal.cost.workloads.chat import Chat
from shoal.cost.workloads.choose import choose
from shoal.cost.workloads.describe import describe, sentence
from shoal.cost.workloads.trace import TraceWorkload
from shoal.ir import Arrival

SIZES: dict[str, Any] = {"vocab_size": 1000, "max_position": 4096, "seed": 3}
MADE_UP = ("chat", "code", "summary", "multiturn", "shared_prefix")


def shared(a: Arrival, b: Arrival) -> int:
    """Tokens that two prompts start with in common."""
    for place, (x, y) in enumerate(zip(a.prompt, b.prompt, strict=False)):
        if x != y:
            return place
    return min(len(a.prompt), len(b.prompt))


def built(name: str, **options: Any) -> Any:
    """A workload; a public trace from where it usually lies."""
    usual = getattr(WORKLOADS.load(name), "usual_path", None)
    return WORKLOADS.build({"name": name, **({"path": usual} if usual else {}), **options})


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data sets with small traces in the published formats."""
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    azure = tmp_path / "azure-llm-traces" / "conv.csv"
    azure.parent.mkdir()
    with azure.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for second in range(20):
            rows.writerow((f"2023-11-16 18:15:{second + 10}.6805900", 100 + second, 10 + second))
    mooncake = tmp_path / "mooncake-trace" / "conversation_trace.jsonl"
    mooncake.parent.mkdir()
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 1400, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [4]},
    ]
    mooncake.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", [*MADE_UP, "azure", "mooncake"])
def test_the_same_key_gives_the_same_arrivals_that_fit(name: str, data: Path) -> None:
    part = built(name)
    sizes = {**SIZES, "max_position": 600}
    arrivals = part.arrivals(count=3, **sizes)
    assert arrivals == part.arrivals(count=3, **sizes)
    assert len(arrivals) == 3
    other = part.arrivals(count=3, **{**sizes, "seed": 4})
    assert [one.prompt for one in other] != [one.prompt for one in arrivals]
    for one in arrivals:
        assert one.prompt
        assert one.output_tokens >= 1
        assert len(one.prompt) + one.output_tokens <= 600
        assert all(0 <= token < 1000 for token in one.prompt)
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    assert arrivals[0].at == 0


@pytest.mark.parametrize("name", ["chat", "code", "summary", "shared_prefix"])
def test_a_longer_trace_starts_with_the_shorter_one(name: str) -> None:
    part = WORKLOADS.build({"name": name, "rate": 2.0})
    assert part.arrivals(count=20, **SIZES)[:7] == part.arrivals(count=7, **SIZES)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "ranges"),
    [
        ("chat", 400, 120, (8, 2000, 4, 800)),
        ("code", 165, 55, (30, 600, 8, 400)),
        ("summary", 6000, 150, (64, 60000, 8, 2000)),
    ],
)
def test_lengths_have_their_medians_and_ranges(
    name: str, prompt: int, output: int, ranges: tuple[int, int, int, int]
) -> None:
    arrivals = built(name).arrivals(count=800, vocab_size=10, max_position=100_000, seed=0)
    result = describe(arrivals)
    # The standard error of a median of 800 log-normal lengths is 5 % for sigma 1.1.
    assert result["prompt_p50"] == pytest.approx(prompt, rel=0.12)
    assert result["output_p50"] == pytest.approx(output, rel=0.12)
    sizes = [len(one.prompt) for one in arrivals]
    outputs = [one.output_tokens for one in arrivals]
    assert ranges[0] <= min(sizes)
    assert max(sizes) <= ranges[1]
    assert ranges[2] <= min(outputs)
    assert max(outputs) <= ranges[3]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_have_their_rate_and_burstiness(burstiness: float) -> None:
    part = Chat(rate=4.0, burstiness=burstiness, scale=100.0)
    arrivals = part.arrivals(count=4000, **SIZES)
    gaps = np.diff([one.at for one in arrivals])
    assert gaps.mean() == pytest.approx(1 / 4.0, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.15)


def test_without_a_rate_all_come_at_once() -> None:
    arrivals = Chat().arrivals(count=None, **SIZES)
    assert {one.at for one in arrivals} == {0.0}
    assert len(arrivals) == Chat().requests
    assert "all at once" in sentence(arrivals, seed=3)
    assert "seed 3" in sentence(arrivals, seed=3)


def test_scale_divides_lengths() -> None:
    whole = Chat().arrivals(count=200, **SIZES)
    small = Chat(scale=8.0).arrivals(count=200, **SIZES)
    for a, b in zip(whole, small, strict=True):
        # Both are rounded.
        assert abs(len(b.prompt) - len(a.prompt) / 8) <= 0.57
    assert describe(small)["output_p50"] == pytest.approx(15, rel=0.2)


def test_turns_of_a_conversation_send_its_history_again() -> None:
    arrivals = WORKLOADS.build({"name": "multiturn", "turns": 3}).arrivals(count=60, **SIZES)
    talks: dict[str, list[Arrival]] = {}
    for one in arrivals:
        talks.setdefault(one.session, []).append(one)
    assert any(len(turns) == 3 for turns in talks.values())
    for turns in talks.values():
        for earlier, later in itertools.pairwise(turns):
            assert later.at > earlier.at
            assert shared(earlier, later) == len(earlier.prompt)
            # The question before it, its answer, and a question of its own.
            assert len(later.prompt) > len(earlier.prompt) + earlier.output_tokens
    first, second = list(talks.values())[:2]
    assert shared(first[0], second[0]) < 4


def test_prompts_share_long_prefixes() -> None:
    options = {"name": "shared_prefix", "prefixes": 2, "prefix_tokens": 64}
    arrivals = WORKLOADS.build(options).arrivals(count=30, **SIZES)
    assert {one.prompt[:64] for one in arrivals} == {
        arrivals[0].prompt[:64],
        next(one.prompt[:64] for one in arrivals if one.prompt[0] != arrivals[0].prompt[0]),
    }
    assert all(
        shared(a, b) in range(60, 67) or shared(a, b) < 4
        for a in arrivals
        for b in arrivals
        if a is not b
    )


def test_azure_keeps_times_and_lengths(data: Path) -> None:
    arrivals = built("azure").arrivals(count=None, **SIZES)
    assert [one.at for one in arrivals] == pytest.approx(list(range(20)))
    assert [len(one.prompt) for one in arrivals] == list(range(100, 120))
    assert [one.output_tokens for one in arrivals] == list(range(10, 30))
    fast = built("azure", rate=4.0, scale=2.0)
    again = fast.arrivals(count=None, **SIZES)
    assert again[-1].at == pytest.approx(19 / 4)
    assert len(again[10].prompt) == 55


def test_mooncake_shares_what_its_hashes_share(data: Path) -> None:
    arrivals = built("mooncake").arrivals(count=None, **SIZES)
    assert [one.at for one in arrivals] == [0.0, 0.5, 3.0]
    assert [len(one.prompt) for one in arrivals] == [1100, 1400, 512]
    assert 1024 <= shared(arrivals[0], arrivals[1]) < 1030
    assert shared(arrivals[0], arrivals[2]) < 4
    small = built("mooncake", scale=16).arrivals(count=None, **SIZES)
    assert [len(one.prompt) for one in small] == [69, 88, 32]
    assert 64 <= shared(small[0], small[1]) < 67


def test_a_trace_is_written_and_read_again(tmp_path: Path) -> None:
    arrivals = WORKLOADS.build({"name": "multiturn", "rate": 2.0}).arrivals(count=9, **SIZES)
    path = tmp_path / "trace.jsonl"
    write_trace(path, arrivals)
    assert TraceWorkload(path=str(path)).arrivals(count=None, **SIZES) == arrivals
    assert TraceWorkload(path=str(path), requests=4).arrivals(count=None, **SIZES) == arrivals[:4]
    faster = TraceWorkload(path=str(path), rate=100.0).arrivals(count=None, **SIZES)
    assert faster[-1].at == pytest.approx(0.08)


@pytest.mark.parametrize("name", [*MADE_UP, "azure", "mooncake"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("requests", 0, "expected 1 to 10,000,000"),
        ("rate", -1.0, "expected above 0, finite"),
        ("scale", 0.5, "expected at least 1, finite"),
    ],
)
def test_refuses_wrong_options(name: str, option: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"workload.{name}.{option} = {value}: .*{message}"):
        built(name, **{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "chat", "burstiness": 0}, "burstiness = 0: expected above 0"),
        ({"name": "shared_prefix", "prefixes": 0}, "prefixes = 0: expected at least 1"),
        ({"name": "shared_prefix", "prefix_tokens": 0}, "prefix_tokens = 0: expected at least 1"),
        ({"name": "multiturn", "turns": 0}, "turns = 0: expected 1 to 1000"),
        ({"name": "multiturn", "think_s": -1}, "think_s = -1: expected 0 to 1,000,000"),
        ({"name": "trace", "path": "x", "rate": 0}, "rate = 0: expected above 0"),
        ({"name": "trace", "path": "x", "requests": 0}, "requests = 0: expected 1 to 10,000,000"),
    ],
)
def test_refuses_wrong_options_of_its_own(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WORKLOADS.build(options)


@pytest.mark.parametrize("name", [*MADE_UP, "azure", "mooncake"])
@pytest.mark.parametrize(
    ("argument", "value"), [("count", 0), ("vocab_size", 0), ("max_position", 1)]
)
def test_refuses_arguments_that_nothing_fits(
    name: str, argument: str, value: int, data: Path
) -> None:
    with pytest.raises(ConfigError, match=f"workload: {argument} = {value}"):
        built(name).arrivals(**{"count": 2, **SIZES, argument: value})


@pytest.mark.parametrize("name", ["azure", "mooncake"])
def test_says_where_to_get_a_missing_trace(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(DataError, match=r"SHOAL_DATA.*get the file from github.com/"):
        built(name).arrivals(count=1, **SIZES)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"there is none at {tmp_path}"):
        built(name).arrivals(count=1, **SIZES)


AZURE_HEAD = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
BROKEN = [
    ("azure", b"a,b\n1,2\n", "columns a, b: expected TIMESTAMP, ContextTokens, GeneratedTokens"),
    ("azure", AZURE_HEAD, "no request in it"),
    ("azure", AZURE_HEAD + b"yesterday,1,2\n", "line 2: .*expected a time and two whole numbers"),
    ("azure", AZURE_HEAD + b"2023-11-16 18:15:10,1\n", "line 2"),
    ("azure", AZURE_HEAD + b"2023-11-16 18:15:10,-1,2\n", "line 2: -1 and 2 tokens"),
    ("azure", b"\xff\xfe\x00", "not text in UTF-8"),
    ("mooncake", b"", "no request in it"),
    ("mooncake", b"{", "line 1: not JSON"),
    ("mooncake", b"[1]", "line 1: expected an object of keys, found list"),
    ("mooncake", b"\xff", "not text in UTF-8"),
    ("mooncake", b'{"timestamp": "a"}', "timestamp = 'a': expected a number of 0 or more"),
    (
        "mooncake",
        b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        "hash_ids has 1 entries: expected 2",
    ),
    (
        "mooncake",
        b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
        "hash_ids: expected a list of whole numbers",
    ),
    ("trace", b"", "no request in it"),
    ("trace", b"\xff", "not text in UTF-8"),
    ("trace", b'{"at": -1, "prompt": [1], "output_tokens": 1}', "line 1: at = -1: expected"),
    ("trace", b'{"at": 0, "prompt": [], "output_tokens": 1}', "line 1: prompt: expected a list"),
    ("trace", b'{"at": 0, "prompt": [1000], "output_tokens": 1}', "token ids from 0 to 999"),
    ("trace", b'{"at": 0, "prompt": [true], "output_tokens": 1}', "token ids from 0 to 999"),
    ("trace", b'{"at": 0, "prompt": [1], "output_tokens": 0}', "output_tokens = 0: expected"),
    ("trace", b'{"at": 0, "prompt": [1], "output_tokens": 1, "x": 1}', "'x': no such key"),
    ("trace", b'{"at": 0, "prompt": [1], "output_tokens": 1, "session": 1}', "session = 1"),
    (
        "trace",
        b'{"at": 1, "prompt": [1], "output_tokens": 1}\n'
        b'{"at": 0, "prompt": [1], "output_tokens": 1}',
        "request 2: at = 0.0 is before the one above it, 1.0; sort",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=range(len(BROKEN)))
def test_refuses_broken_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        WORKLOADS.build({"name": name, "path": str(path)}).arrivals(count=None, **SIZES)


def test_refuses_a_trace_that_is_not_there() -> None:
    with pytest.raises(DataError, match=r"workload.trace.path = 'nowhere.jsonl': no such file"):
        TraceWorkload(path="nowhere.jsonl").arrivals(count=None, **SIZES)


def test_a_workload_is_named_with_its_file() -> None:
    assert choose(None) is None
    assert choose("chat") == Choice(name="chat")
    assert choose(None, "a.jsonl") == Choice(name="trace", options={"path": "a.jsonl"})
    assert choose("azure", "a.csv") == Choice(name="azure", options={"path": "a.csv"})
    usual = choose("mooncake")
    assert usual is not None
    assert usual.options == {"path": "mooncake-trace/conversation_trace.jsonl"}
    with pytest.raises(ConfigError, match="--trace = 'a': expected no file for workload chat"):
        choose("chat", "a")
    with pytest.raises(ConfigError, match="--workload = 'trace': expected --trace FILE"):
        choose("trace")
    with pytest.raises(UnknownPartError, match="--workload = 'cha': expected one of chat"):
        choose("cha")
