"""Plans that were saved: for this model, for this machine, or refused with what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.cost.shapes import find
from shoal.ir import Machine, ServeJob, ServePlan, TrainJob, TrainPlan
from shoal.machine.described import load
from shoal.plan.saved import check_machine, check_model, machine_marks, mark, read_plan


def plan(machine: str = "laptop", **job: object) -> TrainPlan:
    made = TrainJob.model_validate({"model": "shoal-4m", "steps": 3, **job})
    return TrainPlan(job=made, machine=load(machine), shape=find("shoal-4m"))


def probed(cpu: str, **more: object) -> Machine:
    facts = {"cpu": cpu, "isa": "avx2", "cores": "8", "kernel": "6.1", "probed_at": "now"}
    return load("laptop").model_copy(update={"fingerprint": facts, **more})


def test_a_saved_plan_reads_back(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.yaml")
    result = read_plan(tmp_path / "plan.yaml")
    assert isinstance(result, TrainPlan)
    check_model(result, "plan.yaml")
    check_machine(result, load("laptop"), "plan.yaml")
    served = ServePlan(job=ServeJob(model="shoal-4m"), machine=load("H100"), shape=find("shoal-4m"))
    served.save(tmp_path / "serve.yaml")
    assert isinstance(read_plan(tmp_path / "serve.yaml"), ServePlan)


@pytest.mark.parametrize("text", ["a: 1\n", "- 1\n", "job: {}\n", "job: 3\nmachine: 4\n", ""])
def test_what_is_no_plan_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml: not a plan: .*shoal plan train --out"):
        read_plan(tmp_path / "plan.yaml")


def test_another_model_is_explained() -> None:
    made = plan().model_copy(update={"shape": find("shoal-8m")})
    with pytest.raises(PlanError) as caught:
        check_model(made, "plan.yaml")
    said = str(caught.value)
    assert "made for another model" in said
    assert "hidden is " in said
    assert said.count("(hash ") == 2
    assert "shoal plan train shoal-4m --out plan.yaml" in said
    assert "\n" not in said


def test_another_name_of_the_same_shape_is_the_same_model() -> None:
    made = plan()
    shape = made.shape.model_copy(update={"name": "mine", "source": "a page"})
    check_model(made.model_copy(update={"shape": shape}), "plan.yaml")


def test_another_machine_is_explained() -> None:
    with pytest.raises(PlanError) as caught:
        check_machine(plan("8xH100"), load("laptop"), "plan.yaml")
    said = str(caught.value)
    assert "device.kind is 'gpu' in the plan and 'cpu'" in said
    assert "devices_per_node is 8 in the plan and 1" in said
    assert "--launch" in said
    assert "--machine" in said
    assert "\n" not in said


def test_a_probe_is_held_against_a_probe_by_what_decides_speed() -> None:
    made = plan().model_copy(update={"machine": probed("one")})
    with pytest.raises(PlanError, match=r"fingerprint\.cpu is 'one' in the plan and 'two'"):
        check_machine(made, probed("two"), "plan.yaml")
    # Probed again, with other rates and at another time, it is the same machine.
    again = probed("one", usd_per_device_hour=3.0)
    again = again.model_copy(update={"fingerprint": {**again.fingerprint, "probed_at": "later"}})
    check_machine(made, again, "plan.yaml")
    assert mark(machine_marks(again)) == mark(machine_marks(probed("one")))
    # A description has no fingerprint; what both say decides.
    check_machine(made, load("laptop"), "plan.yaml")


def test_more_ranks_than_devices_are_refused() -> None:
    made = plan("8xH100", parallel={"dp": 16})
    with pytest.raises(PlanError, match="16 ranks on the 8 devices"):
        check_machine(made, load("8xH100"), "plan.yaml")
