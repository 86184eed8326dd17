"""How often workers should agree: priced, and drawn."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError, PlanError
from shoal.ir import Parallel, TrainJob
from shoal.machine.described import load
from shoal.plan.rounds import SyncOption, SyncOptions, _timeline, rounds_picture, ways


def priced(gbit, **changes):
    machine = load("16xA100")
    links = tuple(
        link.model_copy(update={"bandwidth": gbit * 1.25e8}) if link.scope == "node" else link
        for link in machine.links
    )
    job = TrainJob(
        model="gpt2-xl", seq_len=2048, global_batch=128, microbatch=1, parallel=Parallel(dp=16)
    )
    return ways(job, machine.model_copy(update={"links": links}), **changes)


def test_rounds_pay_where_the_network_is_slow():
    slow = priced(1.0)
    of = {way.name: way for way in slow.options}
    assert of["co2"].tau == -(-slow.average_s // slow.alone_s) > 5
    assert of["co2"].waits_s == pytest.approx(0.0, abs=1e-9)
    assert of["local_sgd"].waits_s == pytest.approx(slow.average_s / of["local_sgd"].tau, rel=0.01)
    assert of["every_step"].step_s > 2 * of["local_sgd"].step_s
    assert [way.waits_s for way in slow.options] == sorted(way.waits_s for way in slow.options)
    assert of["co2"].sent_bytes * of["co2"].tau == pytest.approx(of["every_step"].sent_bytes)
    short = {way.name: way for way in priced(1.0, tau=2).options}
    assert short["co2"].tau == short["diloco"].tau == 2
    assert 0 < short["co2"].waits_s < short["local_sgd"].waits_s


def test_one_worker_has_nobody_to_agree_with():
    job = TrainJob(model="gpt2-xl", seq_len=2048, global_batch=8, microbatch=1)
    with pytest.raises(PlanError, match=r"parallel.dp = 1: expected 2 or more workers"):
        ways(job, load("16xA100"))


def test_what_is_drawn_is_what_happens():
    """A round of 4 s whose average travels 3 s, or 6 s."""
    for travel, wanted in ((3.0, 0.0), (6.0, 2.0)):
        late = SyncOption("co2", 4, True, 1.0, 0.0, 0.0)
        boxes = list(_timeline(late, SyncOptions(1.0, travel, (late,)), 30.0))
        waits = [box.end - box.begin for box in boxes if box.number < 0]
        assert waits[1:] == [wanted] * (len(waits) - 1)
        assert bool(waits) == bool(wanted)
        sent = [box for box in boxes if box.lane == 1]
        assert all(b.begin >= a.end for a, b in itertools.pairwise(sent))
    waited = SyncOption("local_sgd", 4, False, 1.75, 0.75, 0.0)
    boxes = list(_timeline(waited, SyncOptions(1.0, 3.0, (waited,)), 28.0))
    assert sum(box.lane == 0 and box.number >= 0 for box in boxes) == 16  # four rounds of 7 s
    picture = rounds_picture(
        SyncOptions(1.0, 3.0, (waited, SyncOption("every_step", 1, False, 4.0, 3.0, 0.0)))
    )
    ET.fromstring(picture)
    assert ">4 steps<" in picture
    assert ">10 steps<" in picture


def test_the_command_prices_every_way():
    """A slower link makes averages travel longer; the machine's own is the default."""
    words = ["sync", "gpt2-xl", "-o", "json"]
    own, slow = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)
        for more in ((), ("--gbit-per-s", "1"))
    )
    assert {way["name"] for way in own["ways"]} == {"every_step", "local_sgd", "diloco", "co2"}
    assert slow["average_s"] > own["average_s"]
    refused = CliRunner().invoke(app, [*words, "--workers", "1"])
    assert isinstance(refused.exception, ConfigError)
    assert "sync.workers = 1" in str(refused.exception)
