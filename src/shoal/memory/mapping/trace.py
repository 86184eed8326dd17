"""A real model as a program of memory: every operator of its forward pass, by ``make_fx``.

Source: Reed et al., torch.fx: Practical Program Capture and Transformation for Deep Learning in
Python, 2022.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from shoal.core.errors import PlanError
from shoal.kernel.operators import tensors_in
from shoal.plan.mapping.program import Buffer, BufferAccess, MappingProgram, ProgramInstruction


@dataclass(frozen=True)
class Speed:
    """How fast the processor computes when memory is no matter.

    Args:
        matmul_flops: FLOP/s of products and convolutions.
        vector_flops: elements/s of everything else.
    """

    matmul_flops: float = 1e12
    vector_flops: float = 1e11


@dataclass(frozen=True)
class TracedProgram:
    """A traced model: what it is for memory, and what runs.

    Args:
        program: its buffers carry the names of nodes.
        graph: the operators; its own inputs are parameters first, then those of the model.
        arguments: a value of each of its inputs.
        outputs: nodes that are returned.
    """

    program: MappingProgram
    graph: GraphModule
    arguments: tuple[Tensor, ...]
    outputs: tuple[str, ...]


def trace(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    name: str = "",
    speed: Speed | None = None,
    times: Literal["model", "measured"] = "model",
    call: Callable[..., Any] | None = None,
) -> TracedProgram:
    """The forward pass of a model.

    Args:
        model: any module whose forward pass does not depend on values; with weights, or on the
            meta device where nothing is run.
        inputs: of the forward pass.
        name: of the program.
        speed: of the processor, for modelled times.
        times: seconds that operators compute: by their FLOPs, or measured here one by one.
        call: what of the model is called, by default its forward pass.

    Raises:
        PlanError: it cannot be traced, or returns no tensor.
    """
    named: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    named |= dict(model.named_buffers(remove_duplicate=False))
    # Tied weights are one buffer.
    unique: dict[int, str] = {}
    for key, tensor in named.items():
        unique.setdefault(id(tensor), key)
    keys = list(unique.values())
    held = {key: named[key].detach() for key in keys}

    def forward(*values: Tensor) -> list[Tensor]:
        state = dict(zip(keys, values, strict=False))
        full = {key: state[unique[id(tensor)]] for key, tensor in named.items()}
        result = functional_call(_Called(model, call), _prefixed(full), tuple(values[len(keys) :]))
        return list(tensors_in(result))

    arguments = (*held.values(), *inputs)
    was = model.training
    model.eval()
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            # Nothing is computed: only shapes flow, of weights on the meta device too.
            fakes = [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
                if one.device.type == "meta"
                else mode.from_tensor(one)
                for one in arguments
            ]
            # The first pass takes composite operators apart; the second takes out writes in place.
            graph = make_fx(functionalize(make_fx(forward)(*fakes)))(*fakes)
    except (RuntimeError, TypeError, ValueError) as cause:
        reason = str(cause).partition("\n")[0]
        raise PlanError(
            f"{name or type(model).__name__}: its forward pass cannot be traced ({reason}); it "
            "must not depend on values of tensors"
        ) from cause
    finally:
        model.train(was)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    program, outputs = _program(graph, name or type(model).__name__, speed or Speed())
    traced = TracedProgram(program, graph, tuple(arguments), outputs)
    return measured(traced) if times == "measured" else traced


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs) if self._call is None else self._call(self.model, *inputs)


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{key}": value for key, value in state.items()}


def _bytes(value: Any) -> int:
    return max(1, value.numel() * value.element_size()) if isinstance(value, Tensor) else 0


def is_view(node: Node) -> bool:
    """The operator returns memory of its first operand."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    result = schema.returns[0].alias_info
    return result is not None and not result.is_write


def is_item(node: Node) -> bool:
    """It takes one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def _program(graph: GraphModule, name: str, speed: Speed) -> tuple[MappingProgram, tuple[str, ...]]:
    buffers: dict[str, Buffer] = {}
    steps: list[ProgramInstruction] = []
    outputs: list[str] = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            if _bytes(value):
                buffers[node.name] = Buffer(name=node.name, nbytes=_bytes(value))
        elif node.op == "output":
            outputs = [one.name for one in node.all_input_nodes]
        elif is_view(node) or is_item(node):
            _alias(buffers, node)
        else:
            made = list(tensors_in(value))
            writes = []
            for i, tensor in enumerate(made):
                # One of several results; a node getitem is an alias of it.
                key = f"{node.name}.{i}" if isinstance(value, (list, tuple)) else node.name
                if tensor.numel():
                    buffers[key] = Buffer(name=key, nbytes=_bytes(tensor))
                    writes.append(BufferAccess(buffer=key))
            reads = {
                one.name: _bytes(one.meta.get("val"))
                for one in node.all_input_nodes
                if one.name in buffers
            }
            root = {key: _root(buffers, key).nbytes for key in reads}
            steps.append(
                ProgramInstruction(
                    name=node.name,
                    compute_s=_seconds(node, speed),
                    reads=tuple(
                        BufferAccess(buffer=key, nbytes=min(count, root[key]))
                        for key, count in reads.items()
                    ),
                    writes=tuple(writes),
                )
            )
    for key in outputs:
        if key in buffers:
            last = _root(buffers, key)
            buffers[last.name] = last.model_copy(update={"output": True})
    if not steps or not outputs:
        raise PlanError(f"{name}: its forward pass computes no tensor; nothing can be mapped")
    return MappingProgram(
        name=name, buffers=tuple(buffers.values()), instructions=tuple(steps)
    ), tuple(outputs)


def _alias(buffers: dict[str, Buffer], node: Node) -> None:
    value, source = node.meta.get("val"), node.args[0]
    assert isinstance(source, Node)
    key = (
        f"{source.name}.{node.args[1]}"
        if is_item(node) and source.name not in buffers
        else (source.name)
    )
    if key in buffers and isinstance(value, Tensor) and value.numel():
        buffers[node.name] = Buffer(name=node.name, nbytes=_bytes(value), alias_of=key)
    elif key in buffers:
        # Several views of one buffer; getitem takes one of them.
        buffers[node.name] = buffers[key].model_copy(update={"name": node.name, "alias_of": key})


def _root(buffers: dict[str, Buffer], key: str) -> Buffer:
    while buffers[key].alias_of:
        key = buffers[key].alias_of
    return buffers[key]


def _seconds(node: Node, speed: Speed) -> float:
    """Seconds of the arithmetic of an operator."""
    packet = getattr(node.target, "overloadpacket", None)
    value = node.meta.get("val")

    def shown(one: Any) -> Any:
        return one.meta.get("val") if isinstance(one, Node) else one

    if packet in flop_registry:
        arguments = torch.fx.map_arg(node.args, shown)
        words = torch.fx.map_arg(node.kwargs, shown)
        flops = flop_registry[packet](*arguments, **words, out_val=value)
        return float(flops) / speed.matmul_flops
    read = sum(
        one.numel() for arg in node.all_input_nodes for one in tensors_in(arg.meta.get("val"))
    )
    return max(read, sum(one.numel() for one in tensors_in(value))) / speed.vector_flops


def measured(traced: TracedProgram, *, repeats: int = 5) -> TracedProgram:
    """The same program with the median seconds that every operator takes here.

    Raises:
        PlanError: the weights are on the meta device.
    """
    if any(value.device.type == "meta" for value in traced.arguments):
        raise PlanError(f"{traced.program.name}: operators without weights cannot be measured")
    taken: dict[str, list[float]] = {}

    class Timed(Interpreter):
        def run_node(self, n: Node) -> Any:
            begin = time.perf_counter()
            result = super().run_node(n)
            taken.setdefault(n.name, []).append(time.perf_counter() - begin)
            return result

    with torch.no_grad():
        for _ in range(repeats):
            Timed(traced.graph).run(*traced.arguments)
    steps = tuple(
        step.model_copy(update={"compute_s": statistics.median(taken[step.name])})
        for step in traced.program.instructions
    )
    return replace(traced, program=traced.program.model_copy(update={"instructions": steps}))
