"""Ways beyond the device's memory in the search of plans."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shoal.app.commands.plan import app
from shoal.core.errors import ConfigError, PlanError, ShoalError
from shoal.core.parts import Choice, table
from shoal.cost.shapes import find
from shoal.cost.training.step import estimate
from shoal.ir import Device, Machine, MemoryTier, TrainJob, TrainPlan, Work
from shoal.parallel.legal import check_split
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.beyond import all_ways, every_way
from shoal.plan.strategy.space import candidates

GB = 10**9


def machine(device: int = 3, host: int | None = 64, disk: int | None = 500) -> Machine:
    """One GPU with so many GB in each place."""
    behind = []
    if host is not None:
        behind.append(MemoryTier(name="dram", capacity_bytes=host * GB, read_bandwidth=2e11))
    if disk is not None:
        behind.append(
            MemoryTier(
                name="disk", capacity_bytes=disk * GB, read_bandwidth=6e9, write_bandwidth=4e9
            )
        )
    return Machine(
        name="one",
        device=Device(
            name="G",
            kind="gpu",
            matmul_flops={"bf16": 6e13, "fp32": 2e13},
            memory=(
                MemoryTier(name="hbm", capacity_bytes=device * GB, read_bandwidth=1e12),
                *behind,
            ),
        ),
    )


def job(**changes) -> TrainJob:
    return TrainJob.model_validate(
        {
            "model": "SmolLM2-135M",
            "seq_len": 512,
            "global_batch": 8,
            "steps": 2,
            "precision": "fp32",
            "grad_clip": 0,
            **changes,
        }
    )


def best(wanted: TrainJob, where: Machine, *names: str) -> TrainPlan:
    return PLANNERS.build({"name": "search", "offload": list(names)}).plan(wanted, where)[0]


def brute_force(wanted: TrainJob, where: Machine, names: tuple[str, ...]) -> dict[str, float]:
    """Way -> least seconds of a step that fits, of every part in every place and every split."""
    shape = find(wanted.model)
    values: dict[str, float] = {}
    for name in names:
        places: list[dict] = [{}]
        if name == "zero_infinity":
            places += [{"param": "host", "optim": "host"}, {"act": "host"}]
        if name == "superpipeline":
            places += [{"k": 2}]
        for place in places:
            update = {} if name == "none" else {"offload": Choice(name=name, options=place)}
            for candidate in candidates(wanted.model_copy(update=update), where, shape=shape):
                try:
                    if name != "none":
                        table("offload").build(candidate.offload).check(candidate)
                except ShoalError:
                    continue
                cost = estimate(Work(shape=shape, job=candidate), where)
                tiers = dict(cost.memory_bytes)
                host, disk = tiers.pop("host", 0.0), tiers.pop("disk", 0.0)
                main, *behind = where.device.memory
                room = {t.name: 0.85 * t.capacity_bytes for t in behind}
                if (
                    sum(tiers.values()) <= 0.92 * main.capacity_bytes
                    and host <= room.get("dram", host)
                    and disk <= room.get("disk", disk)
                ):
                    values[name] = min(values.get(name, 1e9), cost.step_s.value)
    return values


@pytest.mark.parametrize("names", [("zero_infinity", "superpipeline"), ("none", "zero_infinity")])
@pytest.mark.parametrize("size", [3, 40])
def test_the_search_takes_the_cheapest_that_fits(names: tuple[str, ...], size: int) -> None:
    where = machine(size)
    least = brute_force(job(), where, names)
    result = best(job(), where, *names)
    assert result.fits
    assert result.estimate is not None
    assert result.estimate.step_s.value <= 1.01 * min(least.values())
    chosen = "none" if result.job.offload is None else result.job.offload.name
    assert least[chosen] <= 1.01 * min(least.values())
    if "none" in names:
        assert (chosen == "none") == (size == 40)
    else:
        assert len(least) == 2  # both fit, and one is taken


def test_a_plan_states_its_offload_and_can_run() -> None:
    result = best(job(), machine(), "auto")
    assert result.job.offload is not None
    again = TrainPlan.model_validate(result.model_dump(mode="json"))
    assert again == result
    check_split(again.job, again.shape)
    budget = table("offload").build(again.job.offload).device_budget
    assert budget == pytest.approx(0.92 * 3 * GB - 1.5 * GB, abs=2**20)
    assert "of the host" in result.why


def test_every_tier_is_checked() -> None:
    roomy = best(job(), machine(), "zero_infinity").job.offload
    assert roomy.options["param"] == "host"
    short = best(job(), machine(host=1), "zero_infinity").job.offload
    assert short.options.get("param", "disk") == "disk"
    with pytest.raises(PlanError, match=r"zero_infinity: too little (host|disk), .* of the disk"):
        best(job(), machine(host=1, disk=1), "zero_infinity")
    unknown = best(job(), machine(host=None, disk=None), "zero_infinity")
    assert "whose size is not stated for one" in unknown.why


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="nothing fits with offload zero_infinity, fuyou") as result:
        best(job(grad_clip=1.0, seq_len=1024), machine(2, 1, 1), "zero_infinity", "fuyou")
    assert "fuyou: offload: fuyou uses every gradient" in str(result.value)
    assert "give more devices" in str(result.value)
    with pytest.raises(PlanError, match="the job states offload: fuyou; leave one"):
        best(job(offload="fuyou"), machine(), "auto")
    with pytest.raises(ConfigError, match=r"planner\.search\.offload = 'nowhere': expected auto"):
        best(job(), machine(), "nowhere")


def test_every_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(every_way()) == {"none", "ssdtrain", *table("offload")}
    ways = all_ways(job(), find("SmolLM2-135M"), machine())
    assert {way.name for way in ways} == set(every_way())
    fitting = [way.best[1].step_s.value for way in ways if way.fits and way.best]
    assert len(fitting) > 1
    assert fitting == sorted(fitting)
    assert [way.fits for way in ways] == sorted((way.fits for way in ways), reverse=True)
    monkeypatch.setattr("shoal.api.jobs.load", lambda _: machine())
    words = ["train", "SmolLM2-135M", "--seq-len", "512", "--global-batch", "8", "--fit"]
    result = CliRunner().invoke(app, [*words, "--precision", "fp32", "--set", "grad_clip=0"])
    assert result.exit_code == 1, result.output
    for way in ways:
        if way.fits and way.best is not None:
            assert f"this would: {way.spelled} ({way.best[1].step_s.value:.3g} s a step)" in (
                result.output
            )
