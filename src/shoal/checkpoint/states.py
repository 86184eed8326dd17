"""What can be saved and loaded: modules, optimizers, flat buffers, data loaders.

A :class:`StateSource` says which boxes of which tensors a rank holds, and which it wants when it
loads. :func:`source_of` knows the usual ones; anything else is one if it has the four methods.
Nothing is gathered or copied to save it: a sharded tensor is its local part and where that lies.

Source: Wan et al., ByteCheckpoint, 2024, section 3.1 (one representation for every framework).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from shoal.checkpoint.loader import LoaderState, merge, split
from shoal.checkpoint.pieces import Piece
from shoal.core.errors import CheckpointError, require

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.checkpoint.loading import Wanted
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.saved_checkpoint import SavedCheckpoint

# Files whose length changes at every save would be planned anew every time.
_PADDING = 4096


class PrefixedTensors:
    """The tensors of a checkpoint with a given prefix, named without it."""

    def __init__(self, saved: SavedCheckpoint, prefix: str) -> None:
        self._saved = saved
        self._prefix = prefix

    def names(self) -> list[str]:
        """All of them."""
        size = len(self._prefix)
        return [name[size:] for name in self._saved.names() if name.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self._saved.shape(self._prefix + name)

    def blank(self, name: str) -> Tensor:
        """A new tensor of its shape and dtype, with anything in it."""
        return self._saved.blank(self._prefix + name)


@runtime_checkable
class StateSource(Protocol):
    """Something that is saved and loaded, as one rank holds it.

    Saving calls ``shards`` and ``plain``. Loading calls ``wanted``, fills what it returns, and
    calls ``loaded``. All ranks make the same calls.
    """

    def shards(self) -> Given:
        """Name -> the boxes that this rank holds, copies of what others hold included."""

    def plain(self) -> Any:
        """Plain data to keep beside the tensors; that of rank 0 is kept."""

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        """Name -> the boxes that this rank wants, and the tensors to fill.

        Args:
            stored: what there is.
        """

    def loaded(self, plain: Any) -> None:
        """Everything wanted was filled.

        Args:
            plain: what :meth:`plain` returned; None where nothing was kept.
        """


def source_of(key: str, value: Any, names: Mapping[int, str], peers: Peers) -> StateSource:
    """The source of a value.

    Args:
        key: what messages call it.
        value: a source; a module, an optimizer, a data loader with ``state`` and ``load_state``,
            something with ``state_dict`` and ``load_state_dict``, or a tree of tensors and plain
            data.
        names: id of a parameter -> its name, for optimizers.
        peers: the ranks.

    Raises:
        CheckpointError: none of these.
    """
    import torch

    from shoal.checkpoint.trees import ObjectState, TreeState

    if isinstance(value, torch.nn.Module):
        return ModuleState(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerState(value, names)
    if isinstance(value, StateSource):
        return value
    if hasattr(value, "load_state") and hasattr(value, "state"):
        return LoaderSource(value, peers)
    if isinstance(value, MutableMapping):
        return TreeState(value)
    if hasattr(value, "load_state_dict") and hasattr(value, "state_dict"):
        return ObjectState(value)
    raise CheckpointError(
        f"{key}: {type(value).__name__} cannot be saved; give a module, an optimizer, something "
        "with state_dict(), a dict of tensors and plain data, or a StateSource"
    )


def pieces_of(tensor: Tensor) -> list[Piece]:
    """What this rank holds of a tensor: of a DTensor its local part, of others all.

    Raises:
        CheckpointError: sums of it are still to be made, so no rank has its values.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return [Piece.whole(tensor.detach())]
    require(
        not any(placement.is_partial() for placement in tensor.placements),
        "placements",
        tensor.placements,
        expected="Shard or Replicate",
        hint="redistribute it first",
        error=CheckpointError,
    )
    if tensor.device_mesh.get_coordinate() is None:
        return []  # this rank is not in its mesh
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    if not local.numel():
        return []
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [Piece(local, tuple(tensor.shape), tuple(chunk.offsets))]


class ModuleState:
    """Parameters and buffers of a module; plain, under DDP, or sharded by FSDP2 or as DTensors.

    A parameter with two names is stored once, under the first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self._module.state_dict(keep_vars=True).items():
            if hasattr(value, "untyped_storage") and id(value) not in seen:
                seen.add(id(value))
                tensors[name] = value
        return tensors

    def shards(self) -> Given:
        from torch.nn import Parameter

        # Buffers such as running means change in the forward pass, which no mode waits for.
        return {
            name: [
                replace(piece, volatile=not isinstance(tensor, Parameter))
                for piece in pieces_of(tensor)
            ]
            for name, tensor in self._tensors().items()
        }

    def plain(self) -> None:
        """See :class:`StateSource`."""

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        return {name: pieces_of(tensor) for name, tensor in self._tensors().items()}

    def loaded(self, plain: Any) -> None:
        """See :class:`StateSource`; it was filled in place."""


class OptimizerState:
    """State of a torch optimizer, by names of parameters, and the options of its groups.

    Args:
        optimizer: it; one that has made no step yet can be loaded into.
        names: id of a parameter -> its name. Others are named by group and number.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._parameters: list[tuple[str, Tensor]] = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"group-{number}.{index}")
                self._parameters.append((name, parameter))
        self._state: dict[int, dict[str, Any]] = {}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if hasattr(value, "untyped_storage"):
                    yield f"{name}.{key}", value
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if hasattr(value, "untyped_storage"):  # a learning rate that is a tensor
                    yield f"groups.{number}.{key}", value

    def shards(self) -> Given:
        return {name: pieces_of(tensor) for name, tensor in self._tensors()}

    def plain(self) -> Any:
        groups = [
            {k: v for k, v in group.items() if k != "params" and not hasattr(v, "untyped_storage")}
            for group in self._optimizer.param_groups
        ]
        state = {
            f"{name}.{key}": value
            for name, parameter in self._parameters
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if not hasattr(value, "untyped_storage")
        }
        return {"groups": groups, "state": state}

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        import torch

        there: dict[str, list[str]] = {}
        for name in stored.names():
            owner, _, key = name.rpartition(".")
            there.setdefault(owner, []).append(key)
        result: dict[str, list[Piece]] = {}
        for number, (name, parameter) in enumerate(self._parameters):
            held = self._optimizer.state.get(parameter, {})
            own = self._state.setdefault(number, dict(held))
            for key in there.get(name, []):
                full = f"{name}.{key}"
                if key not in own:
                    blank = stored.blank(full)
                    own[key] = (
                        torch.zeros_like(parameter, dtype=blank.dtype, requires_grad=False)
                        if blank.shape == parameter.shape and blank.dim()
                        else blank
                    )
                result[full] = pieces_of(own[key])
            for key, value in held.items():
                if hasattr(value, "untyped_storage"):
                    result.setdefault(f"{name}.{key}", pieces_of(value))
        for name, value in self._tensors():
            if name.startswith("groups."):
                result[name] = pieces_of(value)
        return result

    def loaded(self, plain: Any) -> None:
        kept = plain or {"groups": [], "state": {}}
        for number, (name, _) in enumerate(self._parameters):
            for key, value in kept["state"].items():
                owner, _, leaf = key.rpartition(".")
                if owner == name:
                    self._state[number][leaf] = value
        groups = []
        at = 0
        for number, group in enumerate(self._optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            stored = kept["groups"][number] if number < len(kept["groups"]) else {}
            for key, value in stored.items():
                # JSON knows no tuples.
                options[key] = tuple(value) if isinstance(value, list) else value
            size = len(group["params"])
            groups.append({**options, "params": list(range(at, at + size))})
            at += size
        state = {number: own for number, own in self._state.items() if own}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._state = {}


class FlatPart(NamedTuple):
    """A tensor's part of a flat buffer.

    Args:
        first: number of its first element in the buffer, counted row by row in the tensor.
        at: where that lies in the buffer.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    at: int
    size: int


class FlatBuffer:
    """Tensors that a flat buffer holds one after the other, cut anywhere: ZeRO and the like.

    Args:
        buffer: of one dimension.
        parts: what lies where in it; gaps are padding.
    """

    def __init__(self, buffer: Tensor, parts: Sequence[FlatPart]) -> None:
        self._buffer = buffer.detach()
        self._parts = tuple(parts)

    def shards(self) -> Given:
        shards: dict[str, list[Piece]] = {}
        for part in self._parts:
            flat = self._buffer[part.at : part.at + part.size]
            shards.setdefault(part.name, []).extend(Piece.flat(flat, part.shape, part.first))
        return shards

    def plain(self) -> None:
        """See :class:`StateSource`."""

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        return self.shards()  # type: ignore[return-value]

    def loaded(self, plain: Any) -> None:
        """See :class:`StateSource`; it was filled in place."""


class LoaderSource:
    """A data loader of which every rank has its own state; any number of ranks loads it.

    Args:
        loader: has ``state() -> LoaderState`` and ``load_state(LoaderState)``.
        peers: the ranks that share the data.
    """

    def __init__(self, loader: Any, peers: Peers) -> None:
        self._loader = loader
        self._peers = peers
        self._blanks: list[Tensor] = []

    def shards(self) -> Given:
        import torch

        text = json.dumps(self._loader.state().as_plain()).encode()
        padded = text.ljust(-(-len(text) // _PADDING) * _PADDING)
        raw = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        return {f"rank-{self._peers.rank:05d}": [Piece.whole(raw)]}

    def plain(self) -> None:
        """See :class:`StateSource`."""

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        result = {name: stored.blank(name) for name in sorted(stored.names())}
        self._blanks = list(result.values())
        return {name: [Piece.whole(blank)] for name, blank in result.items()}

    def loaded(self, plain: Any) -> None:
        states = [
            LoaderState.from_plain(json.loads(blank.numpy().tobytes())) for blank in self._blanks
        ]
        if len(states) == self._peers.world:
            mine = states[self._peers.rank]
        else:
            mine = split(merge(states), self._peers.world)[self._peers.rank]
        self._loader.load_state(mine)
        self._blanks = []


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of what compiles it or sums its gradients."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # asking for its class would load the compiler
            module = module.get_submodule("_orig_mod")
        else:
            return module
