"""A module as a graph of operations that can be placed.

The module is traced with torch.fx, shapes are found by running it on meta tensors, which
holds no memory, and each call becomes a row of the table of signatures. What the table lacks
is an error that names the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.core.errors import PlanError, require
from shoal.plan.sbp.search import Leaf, OpGraph, OpNode

_ELEMENTWISE: dict[str, str] = {
    "neg": "neg",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "exp": "exp",
    "silu": "silu",
    "square": "square",
    "sqrt": "sqrt",
    "log": "log",
    "rsqrt": "rsqrt",
    "reciprocal": "reciprocal",
}
_SAME = ("contiguous", "clone", "detach", "dropout")


class TracedGraph:
    """A graph and what its leaves are.

    Attributes:
        graph: the operations.
        inputs: names of the leaves that are inputs, in their order.
        weights: name of a leaf -> the parameter or buffer.
        result: name of what the module returns.
    """

    def __init__(
        self, graph: OpGraph, inputs: tuple[str, ...], weights: dict[str, Tensor], result: str
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.weights = weights
        self.result = result


def trace(module: nn.Module, examples: Sequence[Tensor]) -> TracedGraph:
    """Trace ``module`` in evaluation mode.

    Args:
        module: takes tensors and returns one.
        examples: one for each input; only shapes and types count, meta tensors will do.

    Raises:
        PlanError: control flow that depends on data, a call that the table has no row for, or
            examples that the module does not take.
    """
    module = module.eval()
    try:
        traced = fx.Tracer(autowrap_functions=()).trace(module)
    except Exception as cause:  # whatever the user's own forward raises
        raise PlanError(
            f"{type(module).__name__} cannot be traced: {str(cause).splitlines()[0]}; its "
            "forward must not depend on the values of tensors"
        ) from cause
    weights: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return _Reader(module, traced, weights, examples).read()


class _Reader:
    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        weights: dict[str, Tensor],
        examples: Sequence[Tensor],
    ) -> None:
        self.module, self.fx, self.weights = module, graph, weights
        self.examples = list(examples)
        self.leaves: dict[str, Leaf] = {}
        self.ops: list[OpNode] = []
        self.inputs: list[str] = []
        # Graph node -> name of a tensor, or a plain value.
        self.values: dict[fx.Node, Any] = {}
        self.meta: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}

    def read(self) -> TracedGraph:
        result = ""
        for node in self.fx.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(node)
            elif node.op == "get_attr":
                self.values[node] = self._weight(str(node.target))
            elif node.op == "output":
                result = self._value(node.args[0])
                require(
                    isinstance(result, str) and result in self.meta,
                    "module: result",
                    node.args[0],
                    expected="one tensor",
                    error=PlanError,
                )
            else:
                self.values[node] = self._call(node)
        require(
            not self.examples,
            "examples",
            len(self.examples) + len(self.inputs),
            expected=f"{len(self.inputs)}, one for each input of the module",
            error=PlanError,
        )
        graph = OpGraph(leaves=tuple(self.leaves.values()), ops=tuple(self.ops))
        return TracedGraph(graph, tuple(self.inputs), self.used, result)

    def _input(self, node: fx.Node) -> str:
        require(
            bool(self.examples),
            "examples",
            len(self.inputs),
            expected=f"one for each input; there is none for {node.name!r}",
            error=PlanError,
        )
        self.inputs.append(node.name)
        return self._leaf(node.name, self.examples.pop(0))

    def _weight(self, name: str) -> str:
        value: Any = self.module
        for piece in name.split("."):
            value = getattr(value, piece)
        if name not in self.leaves:
            self.used[name] = self.weights.get(name, value)
            self._leaf(name, value)
        return name

    def _leaf(self, name: str, value: Tensor) -> str:
        self.leaves[name] = Leaf(name=name, shape=tuple(value.shape), itemsize=value.element_size())
        self.meta[name] = value.detach().to("meta")
        return name

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._value(item) for item in argument]
        return argument

    def _tensor(self, value: Any) -> Any:
        return self.meta[value] if isinstance(value, str) and value in self.meta else value

    def _add(self, node: fx.Node, kind: str, inputs: Sequence[Any], **attributes: Any) -> str:
        names = [name for name in inputs if name is not None]
        if not all(isinstance(name, str) and name in self.meta for name in names):
            raise PlanError(f"{self._spelled(node)}: {kind} of {names}: expected tensors")
        name = node.name
        while name in self.meta:
            name += "_"
        self.ops.append(OpNode(name=name, kind=kind, inputs=tuple(names), attributes=attributes))
        return name

    def _spelled(self, node: fx.Node) -> str:
        return str(node.format_node() or node.name).split(": ")[0].lstrip("%")

    def _call(self, node: fx.Node) -> Any:
        args = [self._value(argument) for argument in node.args]
        kwargs = {key: self._value(value) for key, value in node.kwargs.items()}
        made: Any
        if node.op == "call_module":
            made = self._module(node, self.module.get_submodule(str(node.target)), args)
        else:
            name = node.target if isinstance(node.target, str) else node.target.__name__
            if args and isinstance(args[0], str) and args[0] in self.meta:
                made = self._function(node, name.strip("_"), args, kwargs)
            elif name == "cat":
                dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
                made = self._add(node, "cat", args[0], dim=dim)
            else:
                made = self._plain(node, args, kwargs)
        if isinstance(made, str) and made not in self.meta:
            self.meta[made] = self._shape_of(node, args, kwargs)
        return made

    def _plain(self, node: fx.Node, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Arithmetic of sizes."""
        if callable(node.target) and not any(isinstance(a, str) for a in args):
            return node.target(*args, **kwargs)
        raise self._unknown(node)

    def _shape_of(self, node: fx.Node, args: list[Any], kwargs: Mapping[str, Any]) -> Tensor:
        real = [
            [self._tensor(item) for item in a] if isinstance(a, list) else self._tensor(a)
            for a in args
        ]
        named = {key: self._tensor(value) for key, value in kwargs.items()}
        function: Callable[..., Any]
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            state = {
                key: value.detach().to("meta")
                for key, value in (*module.named_parameters(), *module.named_buffers())
            }
            return _one(torch.func.functional_call(module, state, tuple(real), named))
        if node.op == "call_method":
            return _one(getattr(real[0], str(node.target))(*real[1:], **named))
        function = node.target  # type: ignore[assignment]
        return _one(function(*real, **named))

    def _unknown(self, node: fx.Node) -> PlanError:
        return PlanError(
            f"{self._spelled(node)}: no placement is known for this call; write it with "
            "operations that have one: linear, matmul, attention "
            "(scaled_dot_product_attention), embedding, softmax, norms, element-wise functions, "
            "sum, mean, amax, transpose, permute, view, reshape, narrow, chunk, cat"
        )

    def _module(self, node: fx.Node, module: nn.Module, args: list[Any]) -> Any:
        prefix = str(node.target)

        def weight(name: str) -> str | None:
            present = getattr(module, name, None) is not None
            return self._weight(f"{prefix}.{name}") if present else None

        x = args[0]
        if isinstance(module, nn.Identity | nn.Dropout):
            return x
        if isinstance(module, nn.Linear):
            return self._add(node, "linear", [x, weight("weight"), weight("bias")])
        if isinstance(module, nn.Embedding):
            return self._add(node, "embedding", [x, weight("weight")])
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
            inputs = [x, weight("weight"), weight("bias")]
            return self._add(node, "layer_norm", inputs, eps=module.eps)
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1:
            return self._add(node, "rms_norm", [x, weight("weight")], eps=module.eps)
        if isinstance(module, nn.GELU):
            return self._add(node, "gelu", [x], approximate=module.approximate)
        if isinstance(module, nn.Softmax) and module.dim is not None:
            return self._add(node, "softmax", [x], dim=module.dim)
        for kind, result in (
            ("relu", nn.ReLU),
            ("silu", nn.SiLU),
            ("sigmoid", nn.Sigmoid),
            ("tanh", nn.Tanh),
        ):
            if isinstance(module, result):
                return self._add(node, kind, [x])
        raise self._unknown(node)

    def _function(
        self, node: fx.Node, name: str, args: list[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        x, rest = args[0], args[1:]
        here = self.meta[x]

        def option(place: int, key: str, default: Any = None) -> Any:
            return rest[place] if len(rest) > place else kwargs.get(key, default)

        if name in _SAME:
            return x
        if name in _ELEMENTWISE:
            return self._add(node, _ELEMENTWISE[name], [x])
        if name in ("add", "sub", "mul", "truediv", "div", "maximum"):
            return self._arithmetic(node, {"truediv": "div"}.get(name, name), x, rest[0])
        if name == "gelu":
            return self._add(node, "gelu", [x], approximate=kwargs.get("approximate", "none"))
        if name in ("matmul", "bmm"):
            return self._add(node, "matmul", [x, rest[0]])
        if name == "linear":
            return self._add(node, "linear", [x, rest[0], option(1, "bias")])
        if name in ("softmax", "sum", "mean", "amax"):
            dim = option(0, "dim")
            if isinstance(dim, list) and len(dim) == 1:
                dim = dim[0]
            if not isinstance(dim, int):
                raise PlanError(f"{self._spelled(node)}: give one dimension, dim=...")
            more = {} if name == "softmax" else {"keepdim": bool(option(1, "keepdim", False))}
            return self._add(node, name, [x], dim=dim, **more)
        if name in ("transpose", "permute", "view", "reshape", "flatten", "unflatten", "t"):
            return self._shaped(node, name, x, rest, kwargs)
        if name == "narrow":
            return self._add(node, name, [x], dim=rest[0], start=rest[1], length=rest[2])
        if name in ("chunk", "split"):
            return self._parts(node, name, x, option(0, "chunks"), option(1, "dim", 0))
        if name == "getattr":
            return getattr(here, rest[0])
        if name == "size":
            return here.shape[rest[0]] if rest else list(here.shape)
        if name == "dim":
            return here.dim()
        if name == "scaled_dot_product_attention":
            return self._attention(node, x, rest, kwargs)
        raise self._unknown(node)

    def _arithmetic(self, node: fx.Node, kind: str, x: str, other: Any) -> str:
        if isinstance(other, str):
            return self._add(node, kind, [x, other])
        if kind in ("mul", "div"):
            return self._add(node, "scale", [x], factor=other if kind == "mul" else 1 / other)
        if kind in ("add", "sub"):
            return self._add(node, "add_scalar", [x], value=other if kind == "add" else -other)
        raise self._unknown(node)

    def _shaped(
        self, node: fx.Node, name: str, x: str, rest: list[Any], kwargs: Mapping[str, Any]
    ) -> str:
        here = self.meta[x]
        if name in ("transpose", "t", "permute"):
            order = list(range(here.dim()))
            if name == "permute":
                given = kwargs.get("dims", rest)
                order = list(given[0] if given and isinstance(given[0], list) else given)
            else:
                a, b = (0, 1) if name == "t" else (rest[0], rest[1])
                order[a], order[b] = order[b], order[a]
            return self._add(node, "permute", [x], order=order)
        if name in ("view", "reshape"):
            shape = rest[0] if rest and isinstance(rest[0], list) else rest
            new = here.reshape([int(size) for size in shape]).shape
        elif name == "flatten":
            new = here.flatten(*rest, **kwargs).shape
        else:
            new = here.unflatten(*rest, **kwargs).shape  # type: ignore[no-untyped-call]
        return self._add(node, "reshape", [x], shape=[int(size) for size in new])

    def _parts(self, node: fx.Node, name: str, x: str, how: Any, dim: int) -> list[str]:
        here = self.meta[x]
        parts = here.chunk(how, dim) if name == "chunk" else torch.split(here, how, dim)
        names, start = [], 0
        for i, part in enumerate(parts):
            made = f"{node.name}_{i}"
            length = part.shape[dim]
            self.ops.append(
                OpNode(
                    name=made,
                    kind="narrow",
                    inputs=(x,),
                    attributes={"dim": dim, "start": start, "length": length},
                )
            )
            self.meta[made] = part
            names.append(made)
            start += length
        return names

    def _attention(self, node: fx.Node, q: str, rest: list[Any], kwargs: Mapping[str, Any]) -> str:
        mask = rest[2] if len(rest) > 2 else kwargs.get("attn_mask")
        if mask is not None:
            raise PlanError(f"{self._spelled(node)}: no placement is known for attn_mask")
        keys = {"is_causal": "causal", "scale": "scale"}
        options = {keys[key]: value for key, value in kwargs.items() if key in keys}
        k, v = [*rest, *(kwargs[key] for key in ("key", "value") if key in kwargs)][:2]
        return self._add(node, "attention", [q, k, v], **options)


def _one(value: Any) -> Tensor:
    require(
        isinstance(value, Tensor),
        "module: result of a call",
        type(value).__name__,
        expected="one tensor",
        error=PlanError,
    )
    tensor: Tensor = value
    return tensor
