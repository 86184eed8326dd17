"""A run that is killed goes on; on the virtual clock it ends as if it had not been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from shoal.core.meter import read_events
from shoal.fields.federate import checkpoint
from shoal.fields.federate.coordinator import Coordinator
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.protocols import FederationError
from shoal.fields.running import run_here
from shoal.machine import load

BASE = {
    "data": "wine", "learner": "logistic", "clients": "4", "speeds": "exponential", "rounds": 6,
    "steps": 4, "clock": "virtual", "server": {"name": "adam", "lr": 0.02},
}  # fmt: skip


class KilledError(BaseException):
    """As sudden as SIGKILL."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def run(job, directory, **options):
    plan = FederateKind().plan(job, load("laptop"))[0]
    return run_here(plan, directory, FederateKind().work(plan), **options)


@pytest.mark.parametrize("name", ["fedavg", "tiered", "fedasync", "fedbuff", "fedcompass"])
def test_killed_at_an_event_it_ends_with_the_same_model(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_EVERY_S", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", float("inf"))
    job = FederateJob(**BASE, algorithm=name)
    run(job, tmp_path / "whole")
    wanted = (tmp_path / "whole" / "model.safetensors").read_bytes()
    total = len(list(read_events(tmp_path / "whole" / "events.jsonl")))
    note = Coordinator._do

    for at in range(2, min(total, 40), 9):
        counter = [0]

        def dying(self, actions, now, counter=counter, at=at):
            counter[0] += 1
            if counter[0] == at:
                raise KilledError
            return note(self, actions, now)

        directory = tmp_path / f"killed-{at}"
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "_do", dying)
            with pytest.raises(KilledError):
                run(job, directory)
        report = run(job, directory, resume=True)
        assert (directory / "model.safetensors").read_bytes() == wanted
        assert report.details["curve"] == json.loads((tmp_path / "whole/curve.json").read_text())
        assert not (directory / "state.safetensors").exists()


def test_a_damaged_state_is_named(tmp_path, monkeypatch):
    job = FederateJob(**BASE, algorithm="fedavg")
    plan = FederateKind().plan(job, load("laptop"))[0]
    directory = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_EVERY_S", 0.0)
        patch.setattr(Coordinator, "_aggregate", lambda *_: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            run_here(plan, directory, FederateKind().work(plan))
    assert (directory / "state.safetensors").exists()
    (directory / "state.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(FederationError, match=r"state.safetensors: cannot be read .* remove it"):
        run_here(plan, directory, FederateKind().work(plan), resume=True)


@pytest.mark.slow
@pytest.mark.multi
def test_a_server_that_is_killed_goes_on_with_new_clients(tmp_path):
    """On the wall clock: SIGKILL in the middle; the models before it are not lost."""
    words = [
        sys.executable, "-m", "shoal", "run", "federate", "digits", "--clients", "2", "--learner",
        "logistic", "--rounds", "800", "--algorithm", "fedcompass", "-m", "laptop",
        "--dir", str(tmp_path / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = tmp_path / "run" / "state.safetensors"
    version = 0
    while not version:
        time.sleep(0.2)
        assert process.poll() is None
        before = checkpoint.Checkpoint(state).read()
        version = before.facts["coordinator"]["version"] if before is not None else 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = checkpoint.Checkpoint(state).read()
    assert before is not None
    version = before.facts["coordinator"]["version"]
    done = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    at = next(place for place, one in enumerate(events) if one["kind"] == "resume")
    assert events[at]["version"] == version
    versions = [one["version"] for one in events[at:] if one["kind"] == "aggregate"]
    assert versions == list(range(version + 1, versions[-1] + 1))
    used = [
        number for one in events[at:] if one["kind"] == "aggregate" for number in one["numbers"]
    ]
    assert len(used) == len(set(used))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["measured"]["versions"] == versions[-1]
