"""A traced model as plain values: parameters, inputs and operators with shapes.

Source: Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation, 2024 (the operators of torch.export).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Ref:
    """A value by the name of the node that makes it."""

    name: str


@dataclass(frozen=True)
class GraphNode:
    """One value of a trace.

    Args:
        name: of the value, unique.
        kind: a parameter, another constant of the model, an input, a call or the output.
        op: operator of a call, such as ``linear``, without namespace and overload.
        args: of a call, with :class:`Ref` where a value is used.
        kwargs: of a call.
        shape: of a tensor; None for anything else.
        target: name of the parameter in the model.
        module: path of the module that made the call.
        integer: the tensor holds integers or booleans.
        item_bytes: of an element.
    """

    name: str
    kind: Literal["param", "constant", "input", "call", "output"]
    op: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    shape: tuple[int, ...] | None = None
    target: str = ""
    module: str = ""
    integer: bool = False
    item_bytes: int = 4

    @property
    def uses(self) -> list[str]:
        """Names of the values that it needs, in order."""
        results = [ref.name for arg in self.args for ref in refs(arg)]
        return results + [ref.name for _, value in self.kwargs for ref in refs(value)]

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        if place < len(self.args):
            return self.args[place]
        return dict(self.kwargs).get(name, default)


def refs(value: Any) -> Iterator[Ref]:
    """References inside an argument."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs(item)


class Graph:
    """Nodes in an order in which they can be computed."""

    def __init__(self, nodes: list[GraphNode], model: str) -> None:
        self.nodes = nodes
        self.model = model
        self.by_name = {node.name: node for node in nodes}
        self.users: dict[str, list[GraphNode]] = {node.name: [] for node in nodes}
        for node in nodes:
            for name in dict.fromkeys(node.uses):
                self.users[name].append(node)

    def __getitem__(self, name: str) -> GraphNode:
        return self.by_name[name]

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of a referenced tensor; that of a number if it is none."""
        return self.by_name[value.name].shape or () if isinstance(value, Ref) else ()

    def param(self, value: Any) -> GraphNode | None:
        """The parameter that is referenced, or None."""
        if isinstance(value, Ref):
            node = self.by_name[value.name]
            return node if node.kind == "param" else None
        return None
