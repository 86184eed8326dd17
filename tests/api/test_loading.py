"""What lies in a directory or a file is opened by what it is."""

from __future__ import annotations

import json

import pytest

from own_home import own_home
from shoal.api.loading import SavedModel, SavedRun, load, model_directory
from shoal.core.errors import ConfigError, ModelError, ShoalError, StoreError
from shoal.ir import Device, Link, Machine, MemoryTier, ServePlan, ServeReport
from shoal.machine.described import load as machine_of


@pytest.fixture(scope="module")
def machine() -> Machine:
    return machine_of("H100")


@pytest.fixture(scope="module")
def cores() -> Machine:
    """What a run on this host can be planned for without a probe."""
    tier = MemoryTier(name="dram", capacity_bytes=16 * 2**30, read_bandwidth=2e10)
    device = Device(
        name="two cores",
        kind="cpu",
        num_cores=2,
        peak_flops={"bf16": 1e12, "fp32": 2e11},
        matmul_flops={"bf16": 6e11, "fp32": 1.5e11},
        memory=(tier,),
    )
    link = Link(scope="loopback", bandwidth=1.5e9, latency_s=1e-4)
    return Machine(name="described", device=device, links=(link,))


@pytest.fixture
def plan(machine):
    from shoal.cost.shapes import find

    job = {"job": "serve", "model": "shoal-1m", "max_position": 256}
    return ServePlan.model_validate({"job": job, "machine": machine, "shape": find("shoal-1m")})


@pytest.fixture
def run(plan, tmp_path):
    """The directory of a run that has not finished."""
    plan.save(tmp_path / "plan.yaml")
    lines = [{"kind": "start", "time": 1.0}, {"kind": "step", "time": 2.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "events.jsonl").write_text(text + '{"kind": "st')
    return tmp_path


def test_a_plan(plan, tmp_path):
    plan.save(tmp_path / "some.yaml")
    assert load(tmp_path / "some.yaml") == plan
    assert load(str(tmp_path / "some.yaml")) == plan


def test_a_run(run, plan):
    opened = load(run)
    assert isinstance(opened, SavedRun)
    assert opened.plan == plan
    assert [event["kind"] for event in opened.events] == ["start", "step"]
    with pytest.raises(StoreError, match="when it ends"):
        opened.report  # noqa: B018
    with pytest.raises(ModelError, match="a run without a model"):
        opened.model  # noqa: B018
    report = ServeReport(plan=plan, measured={"tokens_per_s": 5.0}, errors={"tokens_per_s": 0.1})
    (run / "report.json").write_text(json.dumps(report.model_dump(mode="json")))
    assert opened.report == report
    assert repr(report) == "<report of serve serve on H100: 1 quantities measured>"
    assert "output tokens per second" in report._repr_html_()
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    assert opened.model == run / "export" == model_directory(str(run))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"measured": {}}'])
def test_a_damaged_report_is_named(run, text):
    (run / "report.json").write_text(text)
    with pytest.raises(StoreError, match=r"report\.json: not a report of this version"):
        load(run).report  # noqa: B018


def test_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    opened = load(tmp_path)
    assert opened == SavedModel(tmp_path)
    with pytest.raises(ModelError, match="unknown"):
        opened.config  # noqa: B018


def test_only_models_are_served(run):
    pytest.importorskip("fastapi")
    from shoal.api import serve

    with pytest.raises(ModelError, match="a run without a model"):
        serve(run)


@pytest.mark.parametrize("given", [5, None, b"runs"])
def test_what_is_no_path(given):
    with pytest.raises(ConfigError, match="expected a path"):
        load(given)


def test_nothing_to_open(tmp_path):
    with pytest.raises(ConfigError, match="nothing there: expected the directory of a run"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"without config\.json and plan\.yaml: expected"):
        load(tmp_path)
    for name, data in (("raw", b"\xff\xfe"), ("text", b"just words"), ("job.yaml", b"model: a")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ShoalError, match=name):
            load(tmp_path / name)


@pytest.mark.slow
@pytest.mark.multi
def test_a_training_run_from_its_start_to_its_answers(cores, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    import sysconfig
    from pathlib import Path

    from shoal.api import serve, train
    from shoal.api.sampling import SamplingOptions

    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]:
        (texts / path.name).write_bytes(path.read_bytes()[:20_000])
    run = tmp_path / "run"
    report = train("shoal-1m", machine=cores, steps=2, data=str(texts), directory=run)
    opened = load(run)
    assert isinstance(opened, SavedRun)
    assert opened.report == report
    assert sum(event["kind"] == "step" for event in opened.events) == 2
    (start,) = (event for event in opened.events if event["kind"] == "start")
    model = load(opened.model)
    assert isinstance(model, SavedModel)
    assert sum(one.numel() for one in model.module().parameters()) == start["parameters"]
    assert model.config.vocab_size == model.module().embed.weight.shape[0]
    with opened.llm(kv_tokens=1024) as llm:
        (result,) = llm.generate("import ", SamplingOptions(temperature=0, max_tokens=4))
    assert len(result.outputs[0].token_ids) == 4
    with serve(run, threads=1, kv_tokens=1024) as server:
        assert server.url.startswith("http://127.0.0.1:")
