"""What runs functions promises, and what a call of one costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from annotated_types import Ge, Le
from pydantic import ValidationError, model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError, ShoalError

_NODES = 1024

LIMIT_S = 900.0
"""Most seconds that a call may take, as on AWS Lambda."""


class FunctionError(ShoalError):
    """A function that failed, took too long, or whose container has ended."""


class FunctionCall(Value):
    """What one call of a function took.

    Args:
        name: of the function.
        container: its number.
        cold: the container was started for this call.
        cold_s: seconds of its start.
        seconds: in the function, calls of others included.
        read_bytes: of the index that it read from files.
        retained: it read nothing, for it still had what it needs.
    """

    name: str
    container: int
    cold: bool
    cold_s: float
    seconds: float
    read_bytes: int
    retained: bool


class FunctionReply(NamedTuple):
    """What a call gave.

    Args:
        result: of the function, as JSON.
        calls: this call, and those that were made in it.
    """

    result: Mapping[str, Any]
    calls: tuple[FunctionCall, ...]


class Invoker(Protocol):
    """A way to call functions, from outside or from inside a function."""

    def start(self, name: str, payload: Mapping[str, Any]) -> Future[FunctionReply]:
        """Begin a call; the caller is held for as long as its dispatch takes.

        Args:
            name: ``allocator``, or ``processor-P`` of part P.
            payload: JSON.
        """

    def invoke(self, name: str, payload: Mapping[str, Any]) -> FunctionReply:
        """Call and wait.

        Raises:
            FunctionError: the function failed, or there is no room for its container.
        """


class FunctionRuntime(Invoker, Protocol):
    """Containers of functions over one index; a context manager that ends them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FunctionContainer(Protocol):
    """One instance of a function; it has one call at a time."""

    def call(self, name: str, payload: str) -> str:
        """Payload and answer are texts of JSON.

        Raises:
            FunctionError: the function failed, or the container has ended.
        """

    def close(self) -> None:
        """End it."""


class ContainerSetup(NamedTuple):
    """What a container gets at its start.

    Args:
        directory: of the index.
        address: where it calls other functions, ``host:port``.
        token: that proves that it may.
        latency_s: that each call is held back.
    """

    directory: str
    address: str
    token: str
    latency_s: float


class ContainerHost(Protocol):
    """What a back-end opens: it starts containers."""

    def start(self, setup: ContainerSetup, invoker: Invoker) -> FunctionContainer:
        """Start one.

        Args:
            setup: of it.
            invoker: for functions of this process; others call the address of the setup.

        Raises:
            ShoalError: it does not start.
        """

    @property
    def address(self) -> str:
        """Address of this machine, on which containers reach it."""

    def close(self) -> None:
        """End everything."""


@runtime_checkable
class FunctionBackend(Protocol):
    """Where containers run: a part of kind ``function_backend``.

    Attributes:
        call_s: seconds that a call takes beside its function, of a core.
        cold_s: seconds that a container takes to start, of a core.
        memory_bytes: of a container, beside the index.
    """

    call_s: ClassVar[float]
    cold_s: ClassVar[float]
    memory_bytes: ClassVar[float]

    def open(self) -> ContainerHost:
        """Get ready.

        Raises:
            MissingExtraError: an optional package is not installed.
        """

    def cores(self, available: int) -> int:
        """Cores that calls of functions share, of those of a machine."""


class TreeShape(Value):
    """A tree of allocators: the coordinator starts ``fanout``, each of them as many, and so on.

    Nodes are numbered depth first, so that a node knows its children's numbers: the first is its
    own plus one, and each further one is a jump of a subtree away.

    Args:
        fanout: children of a node.
        depth: levels; at most 1,024 nodes are in all of them.
    """

    fanout: Annotated[int, Ge(1), Le(_NODES)]
    depth: Annotated[int, Ge(1), Le(_NODES)]

    @model_validator(mode="after")
    def _not_too_large(self) -> TreeShape:
        # The second level of a wide tree is too large already, and a deep one is a chain.
        levels = self.depth if self.fanout == 1 else min(self.depth, 11)
        if sum(self.fanout**level for level in range(1, levels + 1)) > _NODES:
            raise ValueError(f"a tree of more than {_NODES} nodes")
        return self

    @property
    def nodes(self) -> int:
        """All of them."""
        return self.fanout * self.subtree(1)

    def subtree(self, level: int) -> int:
        """Nodes of a subtree whose root is at a level, counted from 1."""
        return sum(self.fanout**below for below in range(self.depth - level + 1))

    def children(self, node: int, level: int) -> range:
        """Numbers of a node's children; of the coordinator, -1, at level 0."""
        if level >= self.depth:
            return range(0)
        jump = self.subtree(level + 1)
        return range(node + 1, node + 1 + self.fanout * jump, jump)


_TREE = re.compile(r"([1-9]\d{0,3})x([1-9]\d?)")


def parse_tree(text: str) -> TreeShape:
    """A tree from ``FANOUTxDEPTH``, such as ``4x3`` for 84 nodes.

    Raises:
        ConfigError: it is none, or has more than 1,024 nodes.
    """
    match = _TREE.fullmatch(text)
    if not match:
        raise ConfigError(f"tree = {text!r}: expected FANOUTxDEPTH, such as 4x3")
    fanout, depth = map(int, match.groups())
    try:
        return TreeShape(fanout=fanout, depth=depth)
    except ValidationError as cause:
        raise ConfigError(
            f"tree = {text!r}: more than {_NODES} nodes; give a smaller one"
        ) from cause
