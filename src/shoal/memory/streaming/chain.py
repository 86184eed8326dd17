"""The blocks of a model that run one after the other, whatever model it is.

Language models, vision transformers and the like keep their blocks in one ``ModuleList`` or
``Sequential``, which holds nearly all of their weights: the largest one is the chain. Where no
container holds half of the weights, or one of its members holds half of it, as in networks of
several stages, the model is traced (``torch.fx``) and the members of all containers, in the order
in which they run, are the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError, require

if TYPE_CHECKING:
    from torch import nn

_MOST = 0.5


@dataclass(frozen=True)
class BlockChain:
    """Blocks in the order in which they run.

    Args:
        names: their names in the model.
        blocks: themselves.
        streamed: of each, the parameters that no other has.
        shared: names of parameters of blocks that something else has too; they cannot come and
            go with one block.
        how: container or trace.
    """

    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    streamed: tuple[tuple[nn.Parameter, ...], ...]
    shared: tuple[str, ...]
    how: str

    def __len__(self) -> int:
        return len(self.blocks)


def find_chain(model: nn.Module, containers: str = "") -> BlockChain:
    """The chain of a model.

    Args:
        model: any module.
        containers: names of the containers of the blocks in the order in which they run, with
            commas between; found, if not given.

    Raises:
        ModelError: the model has no chain, or no such containers.
    """
    if containers:
        lists = [_named(model, name.strip()) for name in containers.split(",")]
        return _chain(model, [pair for each in lists for pair in each], "container")
    how, blocks = find_blocks(model)
    return _chain(model, blocks, how)


def find_blocks(model: nn.Module) -> tuple[str, list[tuple[str, nn.Module]]]:
    """How the blocks of a model were found, and they by name in the order in which they run.

    Raises:
        ModelError: it has none.
    """
    total = sum(p.numel() for p in model.parameters())
    untraced = ""
    largest = max(_containers(model), key=lambda pair: pair[0], default=(0, []))
    size, blocks = largest
    widest = max((_size([block]) for _, block in blocks), default=0)
    if size < _MOST * total or widest > _MOST * size:
        traced, untraced = _traced(model)
        if _size([block for _, block in traced]) > size or len(traced) > len(blocks):
            return "trace", traced
    require(
        bool(blocks),
        "chain",
        type(model).__name__,
        expected="a model with a ModuleList or Sequential of at least two blocks with weights",
        hint="name the containers of its blocks" + (f" ({untraced})" if untraced else ""),
        error=ModelError,
    )
    return "container", blocks


def _size(blocks: list[nn.Module]) -> int:
    """Numbers in parameters; one that several blocks have counts once."""
    return sum({id(p): p.numel() for block in blocks for p in block.parameters()}.values())


def _containers(model: nn.Module) -> Iterator[tuple[int, list[tuple[str, nn.Module]]]]:
    """Every container of at least two blocks with weights, and how many weights."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            blocks = _members(name, module)
            if len(blocks) > 1:
                yield _size([block for _, block in blocks]), blocks


def _members(name: str, container: nn.Module) -> list[tuple[str, nn.Module]]:
    # Not named_children: that lists a member that comes twice only once.
    prefix = f"{name}." if name else ""
    return [
        (prefix + key, child)
        for key, child in container._modules.items()
        if child is not None and any(True for _ in child.parameters())
    ]


def _named(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    from torch import nn

    try:
        container = model.get_submodule(name)
    except AttributeError:
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise ModelError(
            f"chain = {name!r}: {type(model).__name__} has no such module; its lists of modules "
            f"are {', '.join(lists) or 'none'}"
        ) from None
    return _members(name, container)


def _traced(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], str]:
    """Members of containers in the order in which they run; or none, and why there is no trace."""
    from torch import fx, nn

    held: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            held |= {id(child) for child in module.children()}

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            inner = isinstance(m, nn.Sequential)
            return (id(m) in held and not inner) or super().is_leaf_module(m, module_qualified_name)

    try:
        graph = Tracer().trace(model)
    except Exception as cause:  # whatever a forward method does with a value that is not there
        return [], f"it cannot be traced: {type(cause).__name__}: {str(cause)[:200]}"
    order = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "call_module")
    results = [(name, model.get_submodule(name)) for name in order]
    kept = [
        (name, module)
        for name, module in results
        if id(module) in held and any(True for _ in module.parameters())
    ]
    return kept, ""


def _chain(model: nn.Module, blocks: list[tuple[str, nn.Module]], how: str) -> BlockChain:
    names = {id(p): name for name, p in model.named_parameters()}
    users: dict[int, set[str]] = {}
    spans = [name for name, _ in blocks]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = next((i for i, span in enumerate(spans) if name.startswith(span + ".")), None)
        users.setdefault(id(parameter), set()).add("" if place is None else str(place))
    results: list[tuple[str, nn.Module, tuple[nn.Parameter, ...]]] = []
    shared: dict[str, None] = {}
    for name, block in blocks:
        mine = dict.fromkeys(block.parameters())
        alone = tuple(p for p in mine if len(users[id(p)]) == 1)
        shared |= {names[id(p)]: None for p in mine if len(users[id(p)]) > 1}
        if alone:
            results.append((name, block, alone))
    require(
        len(results) > 1,
        "chain",
        f"{len(results)} of {len(blocks)} blocks with weights of their own",
        expected="at least two; weights that several blocks share cannot come and go",
        error=ModelError,
    )
    chosen, modules, streamed = zip(*results, strict=True)
    return BlockChain(chosen, modules, streamed, tuple(shared), how)
