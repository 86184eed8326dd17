"""The meter and its sinks: what is written can be read back by the tools it is for."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import types
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


def _tell(choice: dict[str, Any]) -> None:
    """What a short run reports."""
    with Meter([SINKS.build(choice)], {"rank": "0"}) as meter:
        meter.event("start", ranks=1)
        for step in range(2):
            meter.gauge("memory_bytes", 7 + step, tier="dram")
            meter.event("step", step=step, loss=1 / (step + 1), sample="text", bad=float("nan"))
        meter.add("wire_bytes", 5, axis="dp,tp")


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """As much of wandb as the sink calls, which notes it."""

    class RefusalError(Exception):
        """What wandb raises."""

    told = types.SimpleNamespace(init={}, rows=[], axes=[], ended=0, refuses=False)

    class Run:
        def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
            told.axes.append((name, step_metric))

        def log(self, row: dict[str, Any]) -> None:
            told.rows.append(dict(row))

        def finish(self) -> None:
            told.ended += 1

    def init(**options: Any) -> Run:
        if told.refuses:
            raise RefusalError("api_key not configured (no-tty)")
        told.init = options
        return Run()

    module = types.ModuleType("wandb")
    vars(module).update(
        init=init,
        Settings=lambda **options: options,
        errors=types.SimpleNamespace(Error=RefusalError),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_wandb_gets_the_curves(fake_wandb: types.SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "new"
    _tell({"name": "wandb", "path": str(path), "project": "p", "id": "one", "mode": "offline"})
    wanted = {"project": "p", "dir": str(path), "mode": "offline", "id": "one", "resume": "allow"}
    assert wanted.items() <= fake_wandb.init.items() and path.is_dir()
    assert fake_wandb.axes == [("step", None), ("*", "step")] and fake_wandb.ended == 1
    assert fake_wandb.rows == [
        {"memory_bytes/rank.0/tier.dram": 7.0, "step/loss": 1.0, "step": 0},
        {"memory_bytes/rank.0/tier.dram": 8.0, "step/loss": 0.5, "step": 1},
        {"wire_bytes/axis.dp_tp/rank.0": 5.0, "step": 1},
    ]
    fake_wandb.refuses = True
    with pytest.raises(ConfigError, match=r"api_key not configured.*wandb login.*mode: offline"):
        SINKS.build({"name": "wandb", "path": str(path)}).open()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"sink\.wandb"):
        SINKS.build({"name": "wandb", "path": str(tmp_path / "file")}).open()
    with pytest.raises(ConfigError, match="mode"):
        SINKS.build({"name": "wandb", "mode": "sometimes"})


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """As much of MLflow as the sink calls, which notes it."""

    class RefusalError(Exception):
        """What MLflow raises."""

    told = types.SimpleNamespace(calls=[], metrics=[], experiments={}, refuses="")

    class Client:
        def __init__(self, tracking_uri: str | None = None) -> None:
            self._called("client", tracking_uri)

        def _called(self, name: str, *values: object) -> None:
            if told.refuses == name:
                raise RefusalError("no such server")
            told.calls.append((name, *values))

        def get_experiment_by_name(self, name: str) -> object:
            known = told.experiments.get(name)
            return None if known is None else types.SimpleNamespace(experiment_id=known)

        def create_experiment(self, name: str) -> str:
            told.experiments[name] = "7"
            return "7"

        def create_run(self, experiment: str, run_name: str | None = None) -> object:
            self._called("create_run", experiment, run_name)
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def update_run(self, run: str, status: str) -> None:
            self._called("update_run", run, status)

        def log_batch(self, run: str, metrics: list[Any]) -> None:
            self._called("log_batch", run, len(metrics))
            told.metrics += metrics

        def set_terminated(self, run: str) -> None:
            self._called("set_terminated", run)

    class Metric(tuple[Any, ...]):
        def __new__(cls, *values: object) -> Metric:
            return super().__new__(cls, values)

    parts = {
        "mlflow": {"MlflowClient": Client, "__path__": []},
        "mlflow.entities": {"Metric": Metric},
        "mlflow.exceptions": {"MlflowException": RefusalError},
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_mlflow_gets_the_curves(fake_mlflow: types.SimpleNamespace) -> None:
    choice = {"name": "mlflow", "uri": "http://m", "experiment": "e", "run": "first"}
    _tell(choice)
    # One request for all of it: it took less than every_s.
    assert fake_mlflow.calls == [
        ("client", "http://m"),
        ("create_run", "7", "first"),
        ("log_batch", "r1", 5),
        ("set_terminated", "r1"),
    ]
    assert [(key, value, step) for key, value, _, step in fake_mlflow.metrics] == [
        ("memory_bytes/rank.0/tier.dram", 7.0, 0),
        ("step/loss", 1.0, 0),
        ("memory_bytes/rank.0/tier.dram", 8.0, 1),
        ("step/loss", 0.5, 1),
        ("wire_bytes/axis.dp_tp/rank.0", 5.0, 1),
    ]
    fake_mlflow.calls.clear()
    _tell({**choice, "id": "r1", "every_s": 1e-9})
    assert fake_mlflow.calls[1] == ("update_run", "r1", "RUNNING")
    sizes = [call[2] for call in fake_mlflow.calls if call[0] == "log_batch"]
    assert sizes == [2, 2, 1]
    fake_mlflow.refuses = "create_run"
    with pytest.raises(ConfigError, match=r"no run can begin at http://m \(no such server"):
        SINKS.build(choice).open()
    fake_mlflow.refuses = "log_batch"
    with pytest.raises(StoreError, match=r"cannot be logged \(no such server"):
        _tell(choice)


# Files alone; MLflow's own are meant for tests by now.
_MODES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}


def _outside(script: str, path: Path) -> Any:
    """What a process prints last that has the packages of this one."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=path,
        env={**os.environ, **_MODES},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_REPORTS = """
    import json
    from shoal.core.meter import SINKS, Meter
    def tell(choice):
        with Meter([SINKS.build(choice)]) as meter:
            for step in (0, 1, 2, 1):  # a resumed run goes back
                meter.gauge("memory_bytes", 7 + step, tier="dram")
                meter.event("step", step=step, loss=1 / (step + 1))
"""


@pytest.mark.slow
def test_the_real_wandb_keeps_the_curves(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install 'shoal-ml[wandb]'")
    script = f"""{_REPORTS}
    tell({{"name": "wandb", "path": {str(tmp_path)!r}, "project": "test"}})
    import struct
    from pathlib import Path
    from wandb.proto.wandb_internal_pb2 import Record
    (path,) = Path({str(tmp_path)!r}).glob("wandb/offline-run-*/run-*.wandb")
    data, at, rows = path.read_bytes(), 7, []  # a head, then records of LevelDB's log
    assert len(data) < 32768  # one block
    while at < len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record = Record()
        record.ParseFromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.WhichOneof("record_type") == "history":
            rows.append({{
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }})
    print(json.dumps(rows))
    """
    rows = _outside(script, tmp_path)
    curve = [(row["step"], row["step/loss"]) for row in rows]
    assert curve == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3)), (1, 0.5)]
    assert [row["memory_bytes/tier.dram"] for row in rows] == [7, 8, 9, 8]


@pytest.mark.slow
def test_the_real_mlflow_keeps_the_curves(tmp_path: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install 'shoal-ml[mlflow]'")
    script = f"""{_REPORTS}
    uri = {(tmp_path / "store").as_uri()!r}
    tell({{"name": "mlflow", "uri": uri, "experiment": "test", "run": "one"}})
    import mlflow
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    rows = {{
        key: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }}
    print(json.dumps([run.info.status, run.info.run_name, rows]))
    """
    status, name, rows = _outside(script, tmp_path)
    assert (status, name) == ("FINISHED", "one")
    assert sorted(rows["step/loss"]) == [[0, 1.0], [1, 0.5], [1, 0.5], [2, 1 / 3]]
    assert sorted(rows["memory_bytes/tier.dram"]) == [[0, 7.0], [1, 8.0], [1, 8.0], [2, 9.0]]


@pytest.mark.parametrize(
    ("package", "extra", "choice"),
    [
        ("prometheus_client", "run", {"name": "prometheus", "port": 0}),
        ("tensorboard", "run", {"name": "tensorboard", "path": "x"}),
        ("wandb", "wandb", {"name": "wandb"}),
        ("mlflow", "mlflow", {"name": "mlflow"}),
    ],
)
def test_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, choice: dict[str, Any]
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'shoal-ml\[{extra}\]'"):
        SINKS.build(choice).open()
