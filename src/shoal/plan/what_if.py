"""What another machine would change: each question is a search of its own.

A question changes one thing of the machine and plans the same job anew, so the answer is that of
the best plan there, not of today's plan on faster parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.core.errors import ShoalError
from shoal.core.tables import Table, table_of
from shoal.ir import Machine, TrainJob, TrainPlan
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.remedy import enlarged
from shoal.plan.table import spell


@dataclass(frozen=True)
class WhatIfResult:
    """What one change would do.

    Args:
        question: the change.
        step: seconds of a step there over those here; None where no plan fits.
        price: price of a step there over that here; None without prices.
        plan: the best plan there, in a few words; or why there is none.
    """

    question: str
    step: float | None
    price: float | None
    plan: str


def what_if(job: TrainJob, best: TrainPlan, *, planner: str = "search") -> list[WhatIfResult]:
    """Answers to the usual questions.

    Args:
        job: the requested job; its open choices are planned again.
        best: the plan for today's machine, with its estimate.
        planner: who plans.
    """
    results = []
    for question, machine in _questions(best.machine):
        try:
            there = PLANNERS.build(planner).plan(job, machine)[0]
        except ShoalError as cause:
            results.append(WhatIfResult(question, None, None, str(cause)))
            continue
        if not there.fits:
            results.append(WhatIfResult(question, None, None, "no plan fits"))
            continue
        step = _step(there) / _step(best)
        price = None
        if machine.usd_per_device_hour is not None and best.machine.usd_per_device_hour:
            ranks = there.job.parallel.world / best.job.parallel.world
            price = step * ranks * machine.usd_per_device_hour / best.machine.usd_per_device_hour
        results.append(WhatIfResult(question, step, price, _spell(there)))
    return results


def _spell(plan: TrainPlan) -> str:
    used, there = plan.job.parallel.world, plan.machine.num_devices
    beside = f", {used} of {there} devices" if plan.machine.device.kind == "gpu" else ""
    return spell(plan) + (beside if used < there else "")


def _step(plan: TrainPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_s.value


def _questions(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Changes that the machine's kind allows, the likeliest to be bought first."""
    many = machine.num_devices
    if machine.device.kind == "gpu":
        if machine.nodes > 1:
            yield "one more node", machine.model_copy(update={"nodes": machine.nodes + 1})
        yield "twice the devices", enlarged(machine, 2)
        if many > 1:
            yield "half the devices", _halved(machine)
    if machine.nodes > 1:
        yield "twice the bandwidth between nodes", _links(machine, "node", 2.0)
    if machine.link("device") is not None and machine.devices_per_node > 1:
        yield "twice the bandwidth inside a node", _links(machine, "device", 2.0)
    yield "twice the memory", _memory(machine, lambda size: 2 * size, 1.0)
    yield "twice the memory's bandwidth", _memory(machine, lambda size: size, 2.0)
    rates = machine.device.matmul_flops
    if "fp8" in rates and "bf16" in rates:
        faster = {**rates, "bf16": rates["fp8"]}
        peaks = {**machine.device.peak_flops}
        peaks["bf16"] = peaks.get("fp8", rates["fp8"])
        device = machine.device.model_copy(update={"matmul_flops": faster, "peak_flops": peaks})
        yield "matrix products in fp8", machine.model_copy(update={"device": device})


def _halved(machine: Machine) -> Machine:
    if machine.nodes > 1 and machine.nodes % 2 == 0:
        return machine.model_copy(update={"nodes": machine.nodes // 2})
    return machine.model_copy(update={"devices_per_node": max(1, machine.devices_per_node // 2)})


def _links(machine: Machine, scope: str, factor: float) -> Machine:
    links = tuple(
        link.model_copy(update={"bandwidth": factor * link.bandwidth})
        if link.scope == scope
        else link
        for link in machine.links
    )
    return machine.model_copy(update={"links": links})


def _memory(machine: Machine, size: Callable[[int], int], factor: float) -> Machine:
    main = machine.device.main_memory
    tiers = tuple(
        tier.model_copy(
            update={
                "capacity_bytes": size(tier.capacity_bytes),
                "read_bandwidth": tier.read_bandwidth and factor * tier.read_bandwidth,
                "write_bandwidth": tier.write_bandwidth and factor * tier.write_bandwidth,
            }
        )
        if tier is main
        else tier
        for tier in machine.device.memory
    )
    return machine.model_copy(
        update={"device": machine.device.model_copy(update={"memory": tiers})}
    )


def answer_tables(answers: Sequence[WhatIfResult]) -> Iterator[Table]:
    """What other machines would do, for people."""
    if not answers:
        return
    rows = [
        (
            place,
            answer.question,
            f"{answer.step:.2f}x" if answer.step else "",
            f"{answer.price:.2f}x" if answer.price else "",
        )
        for place, answer in enumerate(answers, 1)
    ]
    yield table_of("what if", ("#", "on a machine with", "step", "price"), rows, right="r rr")
    plans = [(place, answer.plan) for place, answer in enumerate(answers, 1)]
    yield table_of("", ("#", "best plan there"), plans, right="r ")
