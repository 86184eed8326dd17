"""A traced model on ranks that share its parameters by a plan.

Every call of the trace is made as it was recorded, on this rank's parts: sizes of split
dimensions are divided, products that end a pair are summed over ranks, lookups in a split table
too, and what enters a split region is marked, so that its gradient is summed on the way back.

Source: Shoeybi et al., Megatron-LM, 2019 (f and g); Tan et al., Redco, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from shoal.core.errors import PlanError, require
from shoal.parallel.autotp.trace import TracedModel, operator_name
from shoal.parallel.tensor.operators import TAG, copy_to, reduce_from
from shoal.plan.autotp.flow import SplitDimension
from shoal.plan.autotp.plan import Flow, TensorPlan

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

# Calls that name the sizes of their result.
_SIZED = frozenset({"view", "reshape", "_unsafe_view", "expand"})


def part_of(x: Tensor, dim: int, segments: tuple[int, ...], rank: int, world: int) -> Tensor:
    """A rank's part of a whole tensor: of every segment of a dimension, its share in order."""
    pieces = [
        piece.narrow(dim, rank * (size // world), size // world)
        for piece, size in zip(torch.split(x, list(segments), dim), segments, strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def whole_of(parts: list[Tensor], dim: int, segments: tuple[int, ...]) -> Tensor:
    """The whole tensor of all ranks' parts."""
    world = len(parts)
    sizes = [size // world for size in segments]
    by_rank = [torch.split(part, sizes, dim) for part in parts]
    return torch.cat([by_rank[r][s] for s in range(len(segments)) for r in range(world)], dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: SplitDimension, comm: Comm) -> Tensor:
        ctx.split, ctx.comm = split, comm
        out = x.new_empty(comm.world * x.shape[0], *x.shape[1:])
        comm.all_gather(out, x.contiguous(), tag=TAG).wait()
        return whole_of(list(out.chunk(comm.world)), split.dim, split.segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        split, comm = ctx.split, ctx.comm
        part = part_of(grad, split.dim, split.segments, comm.rank, comm.world)
        return part.contiguous(), None, None


class SplitModel(nn.Module):
    """The same function as the traced model, with parameters shared by ranks.

    It takes what the model took, in the traced shapes, and returns what it returned, equal on
    every rank. Losses and gradients are those of one process: those of split parameters are
    parts of it, and those of whole ones are equal on all ranks.

    Args:
        flow: where splits are.
        model: holds the whole parameters; it is not changed.
        share: takes its parameters from there, traced with inputs of other shapes.

    Raises:
        PlanError: the plan is for another number of ranks, or dropout is traced in a split
            region, where ranks would draw the same masks for different features.
    """

    def __init__(
        self,
        traced: TracedModel,
        plan: TensorPlan,
        flow: Flow,
        model: nn.Module,
        comm: Comm,
        share: SplitModel | None = None,
    ) -> None:
        super().__init__()
        require(
            comm.world == plan.tp,
            "ranks",
            comm.world,
            expected=f"{plan.tp}, as planned",
            error=PlanError,
        )
        require(
            share is None or share.plan.weights == plan.weights,
            "plan",
            "another one for these shapes",
            expected="the split that the parameters have already",
            hint="give batches of one shape",
            error=PlanError,
        )
        self.traced: TracedModel = traced
        self.plan: TensorPlan = plan
        self.flow: Flow = flow
        self.comm: Comm = comm
        own = dict(model.named_parameters(remove_duplicate=False))
        self.names: dict[str, str] = {}
        for value, target in traced.params.items():
            attribute = target.replace(".", "__")
            self.names[value] = attribute
            if share is not None:
                self.register_parameter(attribute, share.parameter_of(target))
                continue
            x = own[target].detach()
            if value in flow.params:
                dim, segments = flow.params[value]
                x = part_of(x, dim, segments, comm.rank, comm.world)
            parameter = nn.Parameter(x.clone(), requires_grad=own[target].requires_grad)
            self.register_parameter(attribute, parameter)
        for value, tensor in traced.constants.items():
            self.register_buffer(f"constant__{value}", tensor.clone(), persistent=False)
        self._last = _last_uses(traced.code)
        for node in traced.code.nodes:
            if node.name in flow.states and operator_name(node.target) == "dropout":
                p, training = float(node.args[1]), bool(node.args[2])
                require(
                    p == 0.0 or not training,
                    f"dropout of {_place(node)}",
                    p,
                    expected="0 where values are split",
                    hint="ranks would drop the same places of different features; set it to 0",
                    error=PlanError,
                )

    def parameter_of(self, target: str) -> nn.Parameter:
        """This rank's part of a parameter, by its name in the model."""
        value = next(v for v, name in self.traced.params.items() if name == target)
        parameter: nn.Parameter = getattr(self, self.names[value])
        return parameter

    @property
    def names_of(self) -> list[str]:
        """Names of the parameters in the model; a tied one has one."""
        return list(self.traced.params.values())

    def gathered(self, parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Whole tensors from all ranks' parts.

        Args:
            parts: parameter by its name in the model -> what each rank has for it.
        """
        by_target = {name: value for value, name in self.traced.params.items()}
        out = {}
        for target, own in parts.items():
            split = self.flow.params.get(by_target[target])
            out[target] = own[0] if split is None else whole_of(own, *split)
        return out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, equal on every rank.

        Raises:
            PlanError: inputs of other shapes than the traced ones.
        """
        given = pytree.tree_flatten((args, kwargs))[0]
        tensors = [x for x in given if isinstance(x, Tensor)]
        wanted = [shape for shape in self.traced.shapes if shape is not None]
        shapes = [tuple(x.shape) for x in tensors]
        require(
            shapes == wanted,
            "inputs",
            shapes,
            expected=f"the traced shapes {wanted}",
            hint="trace the model again with inputs of these shapes",
            error=PlanError,
        )
        env: dict[str, Any] = {
            value: getattr(self, attribute) for value, attribute in self.names.items()
        }
        env |= {value: getattr(self, f"constant__{value}") for value in self.traced.constants}
        env |= dict(zip(self.traced.inputs, given, strict=True))
        for node in self.traced.code.nodes:
            if node.op == "placeholder":
                if node.name not in env:  # another name of a tied parameter
                    env[node.name] = env[self.traced.alias[node.name]]
            elif node.op == "get_attr":
                env[node.name] = getattr(self.traced.owner, str(node.target))
            elif node.op == "output":
                return self._result(node, env)
            else:
                env[node.name] = self._call(node, env)
            for name in self._last.get(node.name, ()):
                env.pop(name, None)
        raise AssertionError("a graph ends in its output")

    def _result(self, node: fx.Node, env: dict[str, Any]) -> Any:
        results = []
        for item in node.args[0]:  # type: ignore[union-attr]
            x = env[item.name] if isinstance(item, fx.Node) else item
            split = self.flow.gathered.get(item.name) if isinstance(item, fx.Node) else None
            if split is not None:
                x = _Gather.apply(x, split, self.comm)  # type: ignore[no-untyped-call]
            results.append(x)
        return pytree.tree_unflatten(results, self.traced.result)

    def _call(self, node: fx.Node, env: dict[str, Any]) -> Any:
        op, flow = operator_name(node.target), self.flow
        if op == "_assert_tensor_metadata":
            return None
        args = fx.map_arg(node.args, lambda n: self._seen(n, node, env))
        kwargs = fx.map_arg(node.kwargs, lambda n: self._seen(n, node, env))
        if node.name in flow.rows:
            return self._row(op, args, kwargs)
        if node.name in flow.tables:
            return self._lookup(node, args, kwargs)
        if op in _SIZED and node.name in flow.states:
            args = (args[0], self._sizes(node), *args[2:])
        if op in ("split", "split_with_sizes", "slice") and node.name in flow.states:
            args = self._divided(node, op, args)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _seen(self, used: fx.Node, by: fx.Node, env: dict[str, Any]) -> Any:
        """A value as a call takes it: its part, or marked where it enters a split region."""
        x, flow = env[used.name], self.flow
        cut = flow.cut.get((by.name, used.name))
        if cut is not None:
            return part_of(x, cut.dim, cut.segments, self.comm.rank, self.comm.world)
        split = used.name in flow.states or self._canonical(used.name) in flow.params
        inside = by.name in flow.states and by.name not in flow.tables
        if split or not inside or not isinstance(x, Tensor) or not x.requires_grad:
            return x
        marked = f"{used.name} on its way in"
        if marked not in env:
            env[marked] = copy_to(x, self.comm)
        return env[marked]

    def _canonical(self, value: str) -> str:
        return self.traced.alias.get(value, value)

    def _row(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if op == "linear":
            x, weight, bias = (*args, kwargs.get("bias"))[:3]
            out = reduce_from(F.linear(x, weight), self.comm)
        else:
            bias, x, weight = args[:3]
            out = reduce_from(x @ weight, self.comm)
        return out if bias is None else out + bias

    def _lookup(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        weight, index = args[:2]
        begin = self.comm.rank * len(weight)
        here = (index >= begin) & (index < begin + len(weight))
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        own = padding - begin if begin <= padding < begin + len(weight) else None
        result = F.embedding(torch.where(here, index - begin, 0), weight, own)
        return reduce_from(result * here.unsqueeze(-1).to(result.dtype), self.comm)

    def _sizes(self, node: fx.Node) -> list[int]:
        split = self.flow.states[node.name]
        assert isinstance(split, SplitDimension)
        sizes = list(node.meta["val"].shape)
        sizes[split.dim] //= self.comm.world
        return [int(n) for n in sizes]

    def _divided(self, node: fx.Node, op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sizes and places along the split dimension, as this rank has them."""
        before: Any = node.args[0]
        source = self.flow.states[before.name]
        assert isinstance(source, SplitDimension)
        shape = before.meta["val"].shape
        rank = len(shape)
        world = self.comm.world
        if op == "slice":
            dim = args[1] if len(args) > 1 else 0
            if (dim + rank if dim < 0 else dim) != source.dim:
                return args
            full = shape[source.dim]
            ends = [min(n + full if n < 0 else n, full) for n in args[2:4] if n is not None]
            return (args[0], dim, *(n // world for n in ends), *args[4:])
        dim = args[2] if len(args) > 2 else 0
        if (dim + rank if dim < 0 else dim) != source.dim:
            return args
        sizes = args[1]
        less = [n // world for n in sizes] if isinstance(sizes, (list, tuple)) else sizes // world
        return (args[0], less, *args[2:])


def _place(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else node.name


def _last_uses(code: fx.Graph) -> dict[str, list[str]]:
    """Node -> values that are not needed after it."""
    last: dict[str, str] = {}
    for node in code.nodes:
        for used in node.all_input_nodes:
            last[used.name] = node.name
    out: dict[str, list[str]] = {}
    for value, by in last.items():
        out.setdefault(by, []).append(value)
    return out
