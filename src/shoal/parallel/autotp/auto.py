"""A model split without a word from its author: traced whole, or part by part, and run on ranks.

A model whose control flow depends on values cannot be traced as a whole. Then one call is
watched, every module that can be traced alone is planned by itself with the inputs it saw, and
the rest stays whole on every rank; the plan says so.

Source: Tan et al., Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any
GPU/TPUs, 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shoal.core.errors import PlanError
from shoal.parallel.autotp.split import SplitModel
from shoal.parallel.autotp.trace import TracedModel, trace
from shoal.plan.autotp.plan import Flow, TensorPlan, WeightSplit, plan_tensors

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

Fallback = Literal["modules", "refuse"]


@dataclass(frozen=True)
class PlannedModule:
    """A module that was traced and planned.

    Args:
        path: of the module in the model; empty for the model itself.
        traced: its trace.
        flow: where splits are.
    """

    path: str
    traced: TracedModel
    plan: TensorPlan
    flow: Flow


@dataclass(frozen=True)
class ExecutablePlan:
    """A model's plan, with what is needed to run it.

    Args:
        plan: of the whole model.
        parts: the model itself, or the modules that could be traced.
    """

    plan: TensorPlan
    parts: tuple[PlannedModule, ...]


def discover(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int,
    name: str = "",
    fallback: Fallback = "modules",
) -> ExecutablePlan:
    """Trace a model with an example and plan it for ``tp`` ranks.

    Args:
        model: with parameters on any device, meta included.
        args: example inputs.
        kwargs: the same by name.
        tp: ranks.
        name: for messages.
        fallback: what to do with a model that cannot be traced as a whole: plan its
            ``modules``, or ``refuse``.

    Raises:
        PlanError: heads that ``tp`` does not divide, or a model that cannot be traced.
    """
    called = name or type(model).__name__
    try:
        traced = trace(model, args, kwargs, name=called)
    except PlanError as cause:
        if fallback == "refuse":
            raise
        return _by_modules(model, args, dict(kwargs or {}), tp, called, str(cause))
    plan, flow = plan_tensors(traced.graph, tp)
    return ExecutablePlan(plan, (PlannedModule("", traced, plan, flow),))


def _by_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tp: int, name: str, why: str
) -> ExecutablePlan:
    calls = _watched(model, args, kwargs)
    parts = list(_parts(model, "", calls, tp))
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    kept: list[PlannedModule] = []
    weights: dict[str, WeightSplit] = {}
    whole: dict[str, str] = {}
    notes = [why.partition(" Parts that can")[0]]
    for part in parts:
        module = model.get_submodule(part.path)
        own: dict[int, int] = {}
        for _, parameter in module.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        shared = [key for key, count in own.items() if owners[key] > count]
        if shared:
            notes.append(f"{part.path} stays whole: it shares weights with another module")
            continue
        kept.append(part)
        weights |= {
            f"{part.path}.{target}": split.model_copy(
                update={"module": f"{part.path}.{split.module}".rstrip(".")}
            )
            for target, split in part.plan.weights.items()
        }
        whole |= {f"{part.path}.{target}": text for target, text in part.plan.whole.items()}
    planned = [part.path for part in kept]
    notes.append(
        f"planned module by module: {', '.join(planned) if planned else 'none could be split'}; "
        "the rest is whole on every rank"
    )
    parameters = dict(model.named_parameters())
    plan = TensorPlan(
        model=name,
        tp=tp,
        weights=weights,
        whole=whole,
        parameter_bytes=sum(p.numel() * p.itemsize for p in parameters.values()),
        sharded_bytes=sum(part.plan.sharded_bytes for part in kept),
        all_reduces=sum(part.plan.all_reduces for part in kept),
        notes=tuple(notes),
    )
    return ExecutablePlan(plan, tuple(kept))


_Calls = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]


def _watched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Calls:
    """Inputs of every call of every module in one forward pass."""
    calls: _Calls = {}
    hooks = []
    for path, module in model.named_modules():

        def saw(_: nn.Module, a: tuple[Any, ...], k: dict[str, Any], path: str = path) -> None:
            calls.setdefault(path, []).append((a, k))

        hooks.append(module.register_forward_pre_hook(saw, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _parts(module: nn.Module, path: str, calls: _Calls, tp: int) -> Iterator[PlannedModule]:
    """The largest modules below that can be traced alone and have something to split."""
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        seen = calls.get(below, [])
        if len(seen) == 1 and any(True for _ in child.parameters()):
            try:
                traced = trace(child, *seen[0], name=below)
            except PlanError:
                yield from _parts(child, below, calls, tp)
                continue
            plan, flow = plan_tensors(traced.graph, tp)
            if plan.weights:
                yield PlannedModule(below, traced, plan, flow)
        else:
            yield from _parts(child, below, calls, tp)


def split_model(planned: ExecutablePlan, model: nn.Module, comm: Comm) -> nn.Module:
    """The model with its parameters shared by the ranks.

    Args:
        planned: what :func:`discover` found.
        model: holds the whole parameters; it is not changed.
        comm: the ranks, as many as were planned for.
    """
    if [part.path for part in planned.parts] == [""]:
        part = planned.parts[0]
        return SplitModel(part.traced, part.plan, part.flow, model, comm)
    out = copy.deepcopy(model)
    for part in planned.parts:
        own = model.get_submodule(part.path)
        above, _, name = part.path.rpartition(".")
        setattr(
            out.get_submodule(above),
            name,
            SplitModel(part.traced, part.plan, part.flow, own, comm),
        )
    return out
