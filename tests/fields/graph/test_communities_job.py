"""The job ``communities``: plans, runs that measure, and what they leave."""

from __future__ import annotations

import json

import pytest

from served_job import ServedJob
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice, table
from shoal.fields.graph.communities import SignatureGraph
from shoal.fields.graph.communities.job import CommunitiesJob
from shoal.fields.graph.communities.kind import CommunitiesKind
from shoal.machine import load


def test_plan_then_run(files, tmp_path):
    data, labels = files
    job = CommunitiesJob(data=data, labels=labels, queries=12, judged=4, size=20, hashes=256)
    plans = CommunitiesKind().plan(job, load("laptop"))
    assert {plan.job.method.name for plan in plans} == set(table("community_expander"))
    times = [plan.predicted["query_s"].value for plan in plans]
    assert times == sorted(times) and plans[0].num_vertices == 360
    report = CommunitiesKind().run(plans[0], tmp_path / "run")
    measured = report.measured
    assert measured["label_share"] > 0.95 and measured["overlap"] > 0.5
    assert measured["query_s"] >= measured["median_s"] > 0 and measured["build_s"] > 0
    assert measured["index_bytes"] == pytest.approx(plans[0].predicted["index_bytes"].value)
    assert plans[0].candidates / 3 < report.details["candidates"] < 1.5 * plans[0].candidates
    assert {"query_s", "build_s", "index_bytes"} <= set(report.errors)
    written = json.loads((tmp_path / "run" / "community.json").read_text())
    assert len(written["seeds"]) == 5 and len(written["added"]) == 15
    assert len(written["groups"]) == 20
    assert (tmp_path / "run" / "community.svg").read_text().count("<circle") == 20
    signed = SignatureGraph.open(tmp_path / "run" / "signatures")
    answer = signed.expand(written["seeds"], 20, plans[0].job.method)
    assert answer.added.tolist() == written["added"]
    shown = CommunitiesKind().results(report, tmp_path / "run")
    assert len(shown[0].rows) == 20 and "360 vertices" in shown[1]


def test_seeds_are_one_query(files, tmp_path):
    data, _ = files
    method = Choice(name="agglomerative")
    job = CommunitiesJob(data=data, seeds="1003, 1004", method=method, hashes=256, size=10)
    [plan] = CommunitiesKind().plan(job, load("laptop"))
    report = CommunitiesKind().run(plan, tmp_path / "run")
    assert report.details["seeds"] == [1003, 1004] and report.details["queries"] == 1
    assert "label_share" not in report.measured and len(report.details["added"]) == 8


def test_packages_by_who_depends_on_them(tmp_path, monkeypatch):
    from shoal.fields.graph import loading

    rows = [f"Package: p{at:02}\nSection: s\nDepends: lib{at % 2}, base\n" for at in range(8)]
    rows += [f"Package: {one}\nSection: libs\n" for one in ("lib0", "lib1", "base")]
    place = tmp_path / "var" / "lib" / "dpkg" / "status"
    place.parent.mkdir(parents=True)
    place.write_text("\n".join(rows))
    read = loading.debian_packages
    monkeypatch.setattr(loading, "debian_packages", lambda _: read(tmp_path))
    job = CommunitiesJob(data="packages", seeds="base", size=4, method="mean_similarity")
    [plan] = CommunitiesKind().plan(job, load("laptop"))
    assert plan.num_vertices == 3 and plan.entries == 16
    report = CommunitiesKind().run(plan, tmp_path / "run")
    assert sorted(report.details["added"]) == ["lib0", "lib1"]
    assert report.details["scores"] == pytest.approx([0.5, 0.5], abs=0.07)
    with pytest.raises(ConfigError, match="vertex 'p00' has 0 neighbours"):
        CommunitiesKind().run(
            plan.model_copy(update={"job": plan.job.model_copy(update={"seeds": "p00"})}),
            tmp_path / "other",
        )
    assert not (tmp_path / "other" / "signatures").exists()


def test_what_cannot_be_done(files, tmp_path):
    data, labels = files
    kind, machine = CommunitiesKind(), load("laptop")

    def plan(**options):
        return kind.plan(CommunitiesJob(data=data, hashes=256, **options), machine)

    with pytest.raises(DataError, match="no such file"):
        kind.plan(CommunitiesJob(data=str(tmp_path / "none")), machine)
    with pytest.raises(ConfigError, match="= 'pagerang': expected one of"):
        plan(method="pagerang")
    with pytest.raises(ConfigError, match="least_degree = 1000"):
        plan(least_degree=1000)
    with pytest.raises(ConfigError, match="seeds_each = 100: expected fewer"):
        plan(labels=labels, seeds_each=100)
    with pytest.raises(ConfigError, match="slots are needed, and there are 256"):
        plan(threshold=0.001)
    [one] = plan(seeds="1000,5", method="mean_similarity")
    with pytest.raises(ConfigError, match="vertex '5': there is none of this name; the nearest"):
        kind.run(one, tmp_path / "run")
    assert not (tmp_path / "run" / "community.json").exists()


def test_more_work_is_predicted_to_take_longer():
    from shoal.fields.graph.communities.costs import rates_of
    from shoal.fields.graph.communities.protocols import CommunityWork

    machine = load("laptop")
    work = CommunityWork(
        num_vertices=10_000, hashes=1000, bands=100, seeds=5, size=50, candidates=400,
        rates=rates_of(machine),
    )  # fmt: skip
    for name in table("community_expander"):
        part = table("community_expander").build(name)
        once = part.estimate(work, machine)
        assert sum(once.terms_s.values()) == pytest.approx(once.step_s.value)
        more = work.model_copy(update={"candidates": 4000, "size": 200})
        assert part.estimate(more, machine).step_s.value > 2 * once.step_s.value
        assert part.estimate(more, machine).memory_total > once.memory_total


@pytest.mark.slow
def test_the_explorer_is_served_until_ctrl_c_and_then_the_report_is_written(tmp_path) -> None:
    from urllib.request import urlopen

    run = tmp_path / "run"
    small = ("--set", "threshold=0.02", "--set", "queries=5", "--set", "judged=2")
    served = ServedJob("communities", "planted:400", run, *small, "--serve-port", "0")
    with urlopen(f"{served.url}/?seeds=3,4&size=9", timeout=30) as response:
        assert "<svg" in response.read().decode()
    out = served.stop()
    assert served.process.returncode == 0 and "Traceback" not in out, out
    assert json.loads((run / "report.json").read_text())["measured"]["query_s"] > 0
