"""A model as a graph: torch.export, and what a planner without torch needs of it.

Tensors on the meta device do, so a model of any size is traced in seconds.

Source: Ansel et al., PyTorch 2, 2024 (torch.export); Tan et al., Redco, 2023.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from shoal.core.errors import PlanError
from shoal.plan.autotp.graph import Graph, GraphNode, Ref

# Tracing changes how every module of the process is called.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class TracedModel:
    """A traced model.

    Args:
        graph: for the planner.
        code: for the runtime.
        owner: holds the graphs that calls refer to.
        params: value -> name of the parameter.
        constants: value -> tensor of the model that is not learned.
        inputs: values that the caller gives, in order.
        shapes: of the tensors among them.
        result: puts what comes back into the form that the model returns.
        alias: value of a tied parameter -> the value that stands for it.
    """

    graph: Graph
    code: fx.Graph
    owner: nn.Module
    params: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    result: pytree.TreeSpec
    alias: dict[str, str]


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
) -> TracedModel:
    """Trace a model with an example of its inputs.

    Args:
        model: with parameters on any device, meta included.
        args: example, as the model is called.
        kwargs: the same by name.
        name: for messages; the model's class, if not given.

    Raises:
        PlanError: its control flow depends on values; says where tracing stopped.
    """
    called = name or type(model).__name__
    try:
        with _LOCK:
            program = torch.export.export(model, args, dict(kwargs or {}), strict=False)
    except Exception as cause:  # torch.export raises errors of many classes
        first = str(cause).strip().splitlines()
        raise PlanError(
            f"{called} cannot be traced as a whole: {type(cause).__name__}: "
            f"{first[0] if first else ''}; its control flow may depend on values. Parts that can "
            "be traced are planned one by one with fallback='modules'"
        ) from cause
    signature = program.graph_signature
    params: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    inputs: list[str] = []
    state = {**program.state_dict, **program.constants}
    for spec in signature.input_specs:
        value = spec.arg.name
        if spec.kind is InputKind.PARAMETER:
            assert spec.target is not None
            params[value] = spec.target
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(value)
        else:
            assert spec.target is not None
            constants[value] = state[spec.target]
    # One value for a parameter that has several names.
    first_of: dict[int, str] = {}
    own = dict(model.named_parameters(remove_duplicate=False))
    alias = {}
    for value, target in params.items():
        alias[value] = first_of.setdefault(id(own[target]), value)
    nodes: list[GraphNode] = []
    for node in program.graph.nodes:
        made = _node(node, params, constants, alias)
        if made is not None:
            nodes.append(made)
    flat = [node for node in program.graph.nodes if node.op == "placeholder"]
    shapes = {node.name: _shape(node.meta.get("val")) for node in flat}
    params = {value: target for value, target in params.items() if alias[value] == value}
    return TracedModel(
        graph=Graph(nodes, called),
        code=program.graph,
        owner=program.graph_module,
        params=params,
        constants=constants,
        inputs=tuple(inputs),
        shapes=tuple(shapes[value] for value in inputs),
        result=program.call_spec.out_spec,
        alias={value: first for value, first in alias.items() if value != first},
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(int(n) for n in value.shape) if isinstance(value, Tensor) else None


def _node(
    node: fx.Node, params: dict[str, str], constants: dict[str, Tensor], alias: dict[str, str]
) -> GraphNode | None:
    value = node.meta.get("val")
    common: dict[str, Any] = {"name": node.name, "shape": _shape(value)}
    if isinstance(value, Tensor):
        common["integer"] = not value.dtype.is_floating_point
        common["item_bytes"] = value.dtype.itemsize
    if node.op == "placeholder":
        if node.name in params:
            if alias[node.name] != node.name:
                return None
            return GraphNode(kind="param", target=params[node.name], **common)
        return GraphNode(kind="constant" if node.name in constants else "input", **common)
    if node.op == "get_attr":
        return GraphNode(kind="constant", **common)
    args = _referred(node.args, alias)
    kwargs = _referred(node.kwargs, alias)
    if node.op == "output":
        return GraphNode(kind="output", args=tuple(args), **common)
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    return GraphNode(
        kind="call",
        op=operator_name(node.target),
        args=tuple(args),
        kwargs=tuple(kwargs.items()),
        module=module,
        **common,
    )


def _referred(value: Any, alias: dict[str, str]) -> Any:
    """Arguments with references in the place of nodes."""
    if isinstance(value, fx.Node):
        return Ref(alias.get(value.name, value.name))
    if isinstance(value, (list, tuple)):
        return tuple(_referred(item, alias) for item in value)
    if isinstance(value, dict):
        return {key: _referred(item, alias) for key, item in value.items()}
    return value


def operator_name(target: Any) -> str:
    """Name of an operator without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).split(".")[1]
    return str(getattr(target, "__name__", target))
