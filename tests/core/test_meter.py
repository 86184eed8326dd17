"""The meter and its sinks: what is written can be read back by the tools it is for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, MissingExtraError, StoreError
from shoal.core.meter import SINKS, EventTail, Meter, Sink, SinkWriter, read_events


def jsonl(path: Path) -> Sink:
    sink = SINKS.build({"name": "jsonl", "path": str(path)})
    assert isinstance(sink, Sink)
    return sink


def test_events_are_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with Meter([jsonl(path)], {"rank": "0"}) as meter:
        meter.event("step", step=1, loss=np.float32(0.5), ok=True, where=tmp_path, none=None)
        meter.event("step", step=2, loss=float("nan"), nested={"a": (1, 2)})
        # Each line is there as soon as it is written, for a reader beside the run.
        assert [event["step"] for event in read_events(path)] == [1, 2]
    first, second = read_events(path)
    assert first.pop("time") <= second.pop("time")
    assert first.pop("monotonic_s") < second.pop("monotonic_s")
    assert first == {
        "kind": "step",
        "rank": "0",
        "step": 1,
        "loss": 0.5,
        "ok": True,
        "where": str(tmp_path),
        "none": None,
    }
    assert second["loss"] == "nan"
    assert second["nested"] == {"a": [1, 2]}


def test_counters_and_gauges(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Meter([jsonl(path)], {"rank": "1"}) as meter:
        meter.add("wire_bytes", 10, link="node", axis="dp")
        meter.add("wire_bytes", 5, axis="dp", link="node")
        meter.add("tokens", 7)
        meter.gauge("memory_bytes", 3)
        meter.gauge("memory_bytes", 2)
        assert meter.totals() == {"wire_bytes{axis=dp,link=node}": 15.0, "tokens": 7.0}
    (totals,) = read_events(path)
    assert totals["kind"] == "totals"
    assert totals["counters"] == meter.totals()
    assert totals["gauges"] == {"memory_bytes": 2.0}


def test_counts_from_many_threads_add_up() -> None:
    meter = Meter()
    threads = [
        threading.Thread(target=lambda: [meter.add("n", 1) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.totals() == {"n": 2000.0}


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_counter_only_grows(amount: float) -> None:
    with pytest.raises(ValueError, match="cannot grow"):
        Meter().add("n", amount)


def test_misuse_is_an_error(tmp_path: Path) -> None:
    meter = Meter([jsonl(tmp_path / "e.jsonl")], {"rank": "0"})
    with pytest.raises(ValueError, match="'rank' is the meter's own"):
        meter.event("step", rank=1)
    with pytest.raises(TypeError, match="object is not a plain value"):
        meter.event("step", it=object())
    meter.close()
    meter.close()
    with pytest.raises(ValueError, match="closed"):
        meter.event("step")


def test_a_sink_that_fails_closes_the_others(tmp_path: Path) -> None:
    closed: list[str] = []

    class Recorder:
        def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None: ...
        def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None: ...
        def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...
        def close(self) -> None:
            closed.append("closed")

    class Opens:
        def open(self) -> SinkWriter:
            return Recorder()

    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="events cannot be written"):
        Meter([Opens(), jsonl(tmp_path / "file" / "events.jsonl")])
    assert closed == ["closed"]


def test_full_disk_is_told() -> None:
    writer = jsonl(Path("/dev/full")).open()
    with pytest.raises(StoreError, match=r"No space left on device\); free some space"):
        writer.event({"kind": "step"}, {})
    with pytest.raises(StoreError):
        writer.close()


def test_a_line_that_a_full_disk_cuts_short_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = jsonl(path).open()
    writer.event({"kind": "step", "step": 0}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, hard))
    try:
        with pytest.raises(StoreError, match="events cannot be written"):
            writer.event({"kind": "step", "step": 1}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.event({"kind": "step", "step": 2}, {})
    writer.close()
    assert [event["step"] for event in read_events(path)] == [0, 2]


def test_a_tail_follows_a_file_whose_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert list(EventTail(path)) == []
    path.write_text('{"kind": "step", "step": 0}\n{"kind": "st')
    tail = EventTail(path)
    writer = jsonl(path).open()
    for step in (1, 2):
        writer.event({"kind": "step", "step": step}, {})
        assert [event["step"] for event in tail] == [step]
    writer.close()
    with path.open("a") as file:
        file.write("3\n")
    with pytest.raises(StoreError, match=r"after byte .*not an event"):
        list(tail)


def test_torn_last_line_is_left_out_and_cut_off_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Meter([jsonl(path)]) as meter:
        meter.event("step", step=1)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [event["step"] for event in read_events(path)] == [1]
    with Meter([jsonl(path)]) as meter:
        meter.event("step", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]
    path.write_text("torn" * 40_000)  # longer than the block that is searched at a time
    with Meter([jsonl(path)]) as meter:
        meter.event("step", step=3)
    assert [event["step"] for event in read_events(path)] == [3]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"no": "kind"}', "\xff"])
def test_a_whole_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(StoreError, match="line 2: not an event"):
        list(read_events(path))


def test_missing_events(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        list(read_events(tmp_path / "none.jsonl"))


def test_killed_process_loses_no_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = f"""
        import os
        from pathlib import Path
        from shoal.core.meter import SINKS, Meter
        meter = Meter([SINKS.build({{"name": "jsonl", "path": {str(path)!r}}})])
        for step in range(5):
            meter.event("step", step=step)
        os._exit(9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)])
    assert done.returncode == 9
    assert [event["step"] for event in read_events(path)] == [0, 1, 2, 3, 4]


def test_prometheus_serves_what_a_scraper_parses() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    sink = SINKS.build({"name": "prometheus", "port": 0})
    with Meter([sink], {"rank": "0"}) as meter:
        meter.event("step", step=3, loss=0.5, sample="free text")
        meter.add("wire_bytes", 10, link="node")
        meter.add("wire_bytes", 1)
        meter.gauge("memory.bytes", 5)
        port = meter._writers[0].port  # type: ignore[attr-defined]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
    result = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert result == {
        ("shoal_step_step", (("rank", "0"),)): 3.0,
        ("shoal_step_loss", (("rank", "0"),)): 0.5,
        ("shoal_wire_bytes_total", (("link", "node"), ("rank", "0"))): 10.0,
        ("shoal_wire_bytes_total", (("link", ""), ("rank", "0"))): 1.0,
        ("shoal_memory_bytes", (("rank", "0"),)): 5.0,
    }


def test_prometheus_textfile(tmp_path: Path) -> None:
    path = tmp_path / "shoal.prom"
    sink = SINKS.build({"name": "prometheus", "port": -1, "textfile": str(path)})
    with Meter([sink]) as meter:
        meter.gauge("x", 1)
        assert "shoal_x 1.0" in path.read_text()
        meter.gauge("x", 2)
    assert "shoal_x 2.0" in path.read_text()


def test_prometheus_port_that_is_taken() -> None:
    first = SINKS.build({"name": "prometheus", "port": 0}).open()
    try:
        with pytest.raises(ConfigError, match="choose another port"):
            SINKS.build({"name": "prometheus", "port": first.port}).open()
    finally:
        first.close()


@pytest.mark.parametrize("options", [{"port": -2}, {"port": 70000}, {"port": -1}, {"every_s": 0.0}])
def test_prometheus_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sink\.prometheus\."):
        SINKS.build({"name": "prometheus", **options})


def test_tensorboard_reads_the_curves_and_no_torch_is_loaded(tmp_path: Path) -> None:
    script = f"""
        import json, sys
        from shoal.core.meter import SINKS, Meter
        with Meter([SINKS.build({{"name": "tensorboard", "path": {str(tmp_path)!r}}})]) as meter:
            for step in range(3):
                meter.event("step", step=step, loss=1 / (step + 1), sample="text")
            meter.event("save", path="x")
            meter.gauge("memory_bytes", 7, tier="dram")
        assert "torch" not in sys.modules and "tensorflow" not in sys.modules
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = EventAccumulator({str(tmp_path)!r}).Reload()
        curves = {{
            tag: [(event.step, round(event.value, 4)) for event in found.Scalars(tag)]
            for tag in found.Tags()["scalars"]
        }}
        print(json.dumps(curves))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "step/loss": [[0, 1.0], [1, 0.5], [2, 0.3333]],
        "memory_bytes{tier=dram}": [[2, 7.0]],
    }


def test_tensorboard_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another directory"):
        SINKS.build({"name": "tensorboard", "path": str(tmp_path / "file")}).open()


@pytest.mark.parametrize(
    ("package", "choice"),
    [
        ("prometheus_client", {"name": "prometheus", "port": 0}),
        ("tensorboard", {"name": "tensorboard", "path": "x"}),
    ],
)
def test_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, choice: dict[str, Any]
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shoal-ml\[run\]'"):
        SINKS.build(choice).open()
