"""Trees of tensors and plain data, and whatever gives its state as one, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.states import pieces_of
from shoal.core.errors import CheckpointError, require

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.loading import Wanted
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.states import PrefixedTensors


class TreeState:
    """A dict, nested or not, of tensors and plain data.

    Loading fills the tensors that are in it, and puts in what is missing.

    Raises:
        CheckpointError: two leaves have one name; a key that is no text.
    """

    def __init__(self, tree: MutableMapping[str, Any]) -> None:
        self._tree = tree
        self._new: dict[str, Tensor] = {}

    def _leaves(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Name -> where it lies in the tree, and the value."""
        leaves: dict[str, tuple[tuple[str, ...], Any]] = {}
        for path, value in _leaves(self._tree, ()):
            name = ".".join(path)
            require(
                name not in leaves, "name", name, expected="one value for it", error=CheckpointError
            )
            leaves[name] = path, value
        return leaves

    def shards(self) -> Given:
        shards: dict[str, list[Piece]] = {}
        for name, (_, value) in self._leaves().items():
            if isinstance(value, Piece):
                shards[name] = [value]
            elif hasattr(value, "untyped_storage"):
                shards[name] = pieces_of(value)
            elif _pieces_only(value):
                shards[name] = list(value)
        return shards

    def plain(self) -> Any:
        """See :class:`~shoal.checkpoint.states.StateSource`.

        Beside the values it says where leaves lie whose keys have dots in them.
        """
        leaves, tensors = self._leaves(), self.shards()
        values = {name: value for name, (_, value) in leaves.items() if name not in tensors}
        paths = {n: list(p) for n, (p, _) in leaves.items() if any("." in key for key in p)}
        return {"values": values, "paths": paths}

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        result: dict[str, Sequence[Piece]] = {**self.shards()}  # type: ignore[dict-item]
        for name in stored.names():
            if name not in result:
                self._new[name] = stored.blank(name)
                result[name] = [Piece.whole(self._new[name])]
        return result

    def loaded(self, plain: Any) -> None:
        own = isinstance(plain, Mapping) and plain.keys() == {"values", "paths"}
        # What an optimizer has kept goes in as it is.
        kept = plain if own else {"values": plain or {}, "paths": {}}
        known = {name: path for name, (path, _) in self._leaves().items()}
        for name, value in [*kept["values"].items(), *self._new.items()]:
            _put(self._tree, known.get(name) or kept["paths"].get(name) or name.split("."), value)
        self._new = {}


class ObjectState:
    """Something with ``state_dict`` and ``load_state_dict``, such as a scheduler of rates.

    Args:
        value: it; every rank holds the same.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._tree: TreeState | None = None
        self._found: dict[str, Any] = {}

    def shards(self) -> Given:
        return TreeState(_copied(self._value.state_dict())).shards()

    def plain(self) -> Any:
        return TreeState(_copied(self._value.state_dict())).plain()

    def wanted(self, stored: PrefixedTensors) -> Wanted:
        self._found = _copied(self._value.state_dict())
        self._tree = TreeState(self._found)
        return self._tree.wanted(stored)

    def loaded(self, plain: Any) -> None:
        assert self._tree is not None
        self._tree.loaded(plain)
        self._value.load_state_dict(self._found)


def _pieces_only(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, Piece) for one in value)
    )


def _leaves(
    tree: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        require(isinstance(key, str), "key", key, expected="text", error=CheckpointError)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _put(tree: MutableMapping[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(value) if isinstance(value, Mapping) else value for k, value in tree.items()}
