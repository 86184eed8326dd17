"""What claim [103] Galvatron computes and does not run: optima, layers that differ.

Source: Miao et al., Galvatron, 2023; Liu et al., Galvatron, 2025.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from pydantic import JsonValue

from shoal.claims.lab.layer_exact import optimum
from shoal.core.random import generator
from shoal.cost.arithmetic import linears
from shoal.cost.shapes import resolve
from shoal.cost.training.layer_plan import simulated_s
from shoal.cost.training.layers import ModelLayer
from shoal.cost.training.layerwise import LayerPricer
from shoal.ir import Machine, ModelShape, TrainJob
from shoal.machine.described import load
from shoal.plan.strategy.galvatron import Galvatron, Option, group_words
from shoal.plan.strategy.layer_dp import cheapest_chain
from shoal.plan.strategy.layer_search import StageSearch

__all__ = ["gap", "misses", "mixed_plans"]

_LAYOUTS = 4


# The dynamic programme -------------------------------------------------------------------


def misses(cases: int, *, greedy: bool) -> int:
    """Random cases in which the least time is not that of an enumeration of every choice."""
    missed = 0
    for case in range(cases):
        source = generator(0, purpose="claim galvatron", index=case)
        layers, count = int(source.integers(1, 7)), int(source.integers(1, 6))
        seconds = source.uniform(0.1, 5.0, (layers, count))
        seconds[source.uniform(size=seconds.shape) < 0.1] = math.inf
        units = source.integers(0, 9, (layers, count))
        change = source.uniform(0.0, 2.0, (layers - 1, count, count))
        budget = int(source.integers(0, 5 * layers))
        wanted = _enumerated(seconds, units, change, budget)
        if greedy:
            result = _greedy(seconds, units, change, budget)
        else:
            result = cheapest_chain(seconds, units, change, budget).seconds
        missed += not (result == wanted or abs(result - wanted) <= 1e-9 * wanted)
    return missed


def _enumerated(seconds: Any, units: Any, change: Any, budget: int) -> float:
    """The least time over every choice of every layer."""
    layers, count = seconds.shape
    choice = np.indices((count,) * layers).reshape(layers, -1)
    time_ = seconds[np.arange(layers)[:, None], choice].sum(axis=0)
    filled = units[np.arange(layers)[:, None], choice].sum(axis=0)
    for layer in range(layers - 1):
        time_ = time_ + change[layer, choice[layer], choice[layer + 1]]
    return float(np.where(filled <= budget, time_, np.inf).min())


def _greedy(seconds: Any, units: Any, change: Any, budget: int) -> float:
    """One layer after the other takes what is cheapest and still fits."""
    total, left, last = 0.0, budget, None
    for layer, row in enumerate(seconds):
        cost = row + (change[layer - 1][last] if last is not None else 0.0)
        cost = np.where(units[layer] <= left, cost, np.inf)
        last = int(cost.argmin())
        total, left = total + float(cost[last]), left - int(units[layer][last])
    return total


# Layers that differ ----------------------------------------------------------------------


class MixedPlan(NamedTuple):
    """The layer-wise plan and the best uniform one."""

    option: Option
    uniform: Option
    layerwise_s: float
    uniform_s: float
    job: TrainJob
    machine: Machine
    shape: ModelShape
    layers: tuple[ModelLayer, ...]

    def as_record(self) -> dict[str, JsonValue]:
        """What is kept of it."""
        plans = {"layerwise": self.option, "uniform": self.uniform}
        values: dict[str, JsonValue] = {
            name: [f"pp{o.pp} of {o.sequences} sequences", *group_words(o.solution.plan)]
            for name, o in plans.items()
            if o.solution.plan is not None
        }
        return values | {
            "simulated_s": {"layerwise": self.layerwise_s, "uniform": self.uniform_s},
            "parameters": sum(
                linear.parameters for layer in self.layers for linear in linears(layer.shape)
            ),
        }


def mixed_model() -> tuple[ModelShape, tuple[ModelLayer, ...]]:
    """A wide vocabulary, and blocks of three kinds: long attention, local attention, experts."""
    base = resolve("Llama-3-8B").model_copy(
        update={"vocab_size": 262144, "max_position": 16384, "num_layers": 12, "name": "mixed"}
    )
    one = base.model_copy(update={"num_layers": 1, "vocab_size": 1})
    long = ModelLayer("long", one)
    local = ModelLayer("local", one.model_copy(update={"ffn_hidden": 28672}), span=1024)
    sparse = one.model_copy(update={"num_experts": 64, "top_k": 2, "expert_hidden": 14336})
    experts = ModelLayer("experts", sparse)
    return base, (long, local, experts) * 4


def mixed_plans() -> MixedPlan:
    """Both plans of that model on 64 devices."""
    shape, layers = mixed_model()
    machine = load("64xA100-40GB")
    job = TrainJob.model_validate(
        {
            "model": "Llama-3-8B",
            "steps": 1,
            "seq_len": 16384,
            "global_batch": 64,
            "precision": "bf16",
        }
    )
    planner = Galvatron(layouts=_LAYOUTS)
    result, _ = planner.search(job, machine, shape, layers)
    option = result[0]
    uniform = planner.best_uniform(job, machine, shape, layers, option)
    assert uniform is not None

    def simulated(one: Option) -> float:
        assert one.solution.plan is not None
        return simulated_s(one.solution.stages, one.solution.plan, job, machine, shape.hidden)

    return MixedPlan(
        option, uniform, simulated(option), simulated(uniform), job, machine, shape, layers
    )


def gap(mixed: MixedPlan) -> dict[str, JsonValue]:
    """How far the plan is above the exact optimum for its stages and micro-batch."""
    planner = Galvatron()
    option = mixed.option
    pricer = LayerPricer(mixed.job, mixed.machine, mixed.shape)
    spaces = planner._spaces(mixed.job, mixed.machine, mixed.shape, 64)
    strategies = next(
        s for pp, sequences, s in spaces if (pp, sequences) == (option.pp, option.sequences)
    )
    search = StageSearch(
        pricer,
        mixed.layers,
        strategies,
        option.pp,
        option.sequences,
        mixed.job.global_batch // option.sequences,
        planner._usable(mixed.job, mixed.machine, 64),
    )
    begin = time.perf_counter()
    best = optimum(search, timeout_s=90.0)
    return {
        "found_s": option.solution.seconds,
        "optimum_s": best.seconds,
        "bound_s": best.bound,
        "gap": option.solution.seconds / best.bound - 1,
        "solver_s": time.perf_counter() - begin,
        "strategies": len(strategies),
    }
