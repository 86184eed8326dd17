"""The handle that a method leaves in a model: what is trained, what is stored, the way back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.core.errors import CheckpointError, ModelError, ShoalError, require
from shoal.train.peft.run.sites import AdaptedLinear, Site, SitePart, SiteRows, dense

if TYPE_CHECKING:
    from shoal.train.loop import RankTrainer, StepMethod


class ModelPeftHandle:
    """A method applied to a model: its trained and stored tensors, and its removal.

    Args:
        method: the part, whose fields are its options.
        targets: what was matched, if other than the option.

    Attributes:
        looks: batches that the method evaluates before the first step.
    """

    def __init__(
        self, model: nn.Module, name: str, method: Any, targets: str = "", *, mergeable: bool
    ) -> None:
        self.model, self.name, self.mergeable = model, name, mergeable
        self.method = method
        self.options: dict[str, Any] = {
            field.name: getattr(method, field.name) for field in dataclasses.fields(method)
        }
        if targets:
            self.options["targets"] = targets
        self.sites: dict[str, tuple[Site, SitePart]] = {}
        self.modules: dict[str, nn.Module] = {}
        self.shared: dict[str, Tensor] = {}
        self.looks = 0
        self.begin: dict[str, tuple[Tensor, Tensor]] = {}
        self.is_merged = False
        self._stays = False
        self._undo: list[Callable[[], None]] = []
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._swapped: list[tuple[AdaptedLinear, nn.Module]] = []
        self._added: list[nn.Linear] = []
        self._learned = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._learned:
            parameter.requires_grad_(False)

    # ------------------------------------------------------------------ building

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """What fails half way leaves the model as it was."""
        try:
            yield
        except (ShoalError, RuntimeError, ValueError):
            self.remove()
            raise

    def put(self, site: Site, part: SitePart) -> None:
        """Let a part change a site."""
        adapted = self.adapted(site.owner)
        device = next(self.model.parameters()).device
        adapted.put(site, part.to(device).train(self.model.training))
        self.sites[site.name] = site, part

    def rows(self, site: Site) -> SiteRows:
        """The base of a site."""
        module = self.model.get_submodule(site.owner)
        return SiteRows(
            module.base if isinstance(module, AdaptedLinear) else module, site.start, site.stop
        )

    def adapted(self, owner: str) -> AdaptedLinear:
        """The stand-in of a linear layer, made if there is none."""
        module = self.model.get_submodule(owner)
        if isinstance(module, AdaptedLinear):
            return module
        adapted = AdaptedLinear(module)
        self.replace(owner, adapted)
        return adapted

    def replace(self, path: str, module: nn.Module) -> None:
        """Put a module in the place of another, until the method is removed."""
        parent, _, leaf = path.rpartition(".")
        owner = self.model.get_submodule(parent) if parent else self.model
        before = getattr(owner, leaf)
        setattr(owner, leaf, module)
        self._undo.append(lambda: setattr(owner, leaf, before))

    def attach(self, path: str, name: str, module: nn.Module, file: str) -> None:
        """Add a module beside others, until the method is removed.

        Args:
            path: of the module that gets it; empty for the model itself.
            name: of its attribute.
            module: what is added.
            file: what stored names begin with.
        """
        owner = self.model.get_submodule(path) if path else self.model
        device = next(self.model.parameters()).device
        owner.add_module(name, module.to(device).train(self.model.training))
        self.modules[file] = module
        self._undo.append(lambda: delattr(owner, name))

    def later(self, undo: Callable[[], None]) -> None:
        """Do this when the method is removed."""
        self._undo.append(undo)

    # ------------------------------------------------------------------ what is trained and stored

    def trainable(self) -> dict[str, nn.Parameter]:
        """What is trained, by the name that it has in files."""
        return {
            name: value
            for name, value in self._files().items()
            if isinstance(value, nn.Parameter) and value.requires_grad
        }

    def _files(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.shared)
        for name, (_, part) in self.sites.items():
            tensors |= {f"{name}.{leaf}": value for leaf, value in part.files().items()}
        for name, module in self.modules.items():
            files = getattr(module, "files", None)
            inner = dict(module.named_parameters()) if files is None else files()
            tensors |= {f"{name}.{leaf}".strip("."): value for leaf, value in inner.items()}
        return tensors

    def state(self) -> dict[str, Tensor]:
        """What must be stored to have the method again on the same base."""
        return {name: value.detach() for name, value in self._files().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a stored state.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape.
        """
        own = self._files()
        odd = sorted(own.keys() ^ state.keys())
        if odd:
            what = "is missing" if odd[0] in own else "belongs to nothing here"
            raise CheckpointError(
                f"finetune.{self.name}: the stored {odd[0]} {what}; the file is of another model, "
                "other targets or another method"
            )
        for name, value in own.items():
            require(
                state[name].shape == value.shape,
                f"finetune.{self.name}: the stored {name}",
                tuple(state[name].shape),
                expected=f"the shape {tuple(value.shape)}",
                error=CheckpointError,
            )
            value.copy_(state[name])
        self.loaded()

    def buffers(self) -> dict[str, Tensor]:
        """What a run that goes on needs beside parameters; :meth:`restore` writes it in place."""
        buffers: dict[str, Tensor] = {}
        for name, (_, part) in self.sites.items():
            buffers |= {f"{name}.{leaf}": value for leaf, value in part.named_buffers()}
        for name, module in self.modules.items():
            buffers |= {f"{name}.{leaf}": value for leaf, value in module.named_buffers()}
        return buffers

    def restore(self, get: Callable[[str], Tensor]) -> None:
        """Take over the buffers of a run that goes on."""
        for name, value in self.buffers().items():
            value.copy_(get(name))
        self.loaded()

    def look(self, backward: Callable[[int], None], together: Callable[[Tensor], None]) -> None:
        """Let parts see the gradients of some batches, and choose by them what they train.

        Args:
            backward: number of a batch -> forward and backward passes of it.
            together: sums a tensor over all ranks, in place.
        """
        parts = [part for part in self._parts() if hasattr(part, "look")]
        for part in parts:
            part.look()  # type: ignore[operator]
        for number in range(self.looks):
            backward(number)
        for part in parts:
            seen = part.looked()  # type: ignore[operator]
            together(seen)
            part.choose(seen)  # type: ignore[operator]
        self.looks = 0

    def loaded(self) -> None:
        """Called when stored values are there."""
        for module in self._parts():
            hook = getattr(module, "loaded", None)
            if hook is not None:
                hook()

    def _parts(self) -> Iterator[nn.Module]:
        yield from (part for _, part in self.sites.values())
        for module in self.modules.values():
            yield from module.modules()

    # ------------------------------------------------------------------ merging

    @torch.no_grad()
    def merge(self, *, dequantise: bool = False) -> None:
        """Put what was learned into the base's weights.

        Raises:
            ModelError: the method cannot be merged, or the base is in few bits.
        """
        if self.is_merged:
            return
        if not self.mergeable:
            raise ModelError(
                f"finetune.{self.name}: cannot be merged: what it learns is no change of the "
                "weights; keep the adapter beside the model"
            )
        owners = dict.fromkeys(site.owner for site, _ in self.sites.values())
        modules = [self.model.get_submodule(owner) for owner in owners]
        for module in modules:
            assert isinstance(module, AdaptedLinear)
            if not isinstance(module.base, nn.Linear) and not dequantise:
                raise ModelError(
                    f"finetune.{self.name}: the base's weights are in few bits, which what was "
                    "learned does not fit in; merge with dequantise to get plain weights"
                )
        for module in modules:
            assert isinstance(module, AdaptedLinear)
            self._merge_one(module)
        self.is_merged = True

    def _merge_one(self, adapted: AdaptedLinear) -> None:
        base = adapted.base
        if not isinstance(base, nn.Linear):
            target = _plain(base)
            self._swapped.append((adapted, base))
        else:
            target = base
            self._saved.append((base.weight, base.weight.detach().clone()))
            if base.bias is not None:
                self._saved.append((base.bias, base.bias.detach().clone()))
        biases: list[tuple[int, int, Tensor]] = []
        for leaf, part in adapted.parts.items():
            rows = adapted.rows(leaf)
            weight, bias = part.merged(rows)  # type: ignore[operator]
            target.weight[rows.start : rows.stop] = weight.to(target.weight.dtype)
            if bias is not None:
                biases.append((rows.start, rows.stop, bias))
        if biases and getattr(target, "bias", None) is None:
            zeros = target.weight.new_zeros(adapted.out_features)
            target.register_parameter("bias", nn.Parameter(zeros, requires_grad=False))
            self._added.append(target)
        for start, stop, bias in biases:
            target.bias[start:stop] = bias.to(target.bias.dtype)
        adapted.base = target
        adapted.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Give the base its weights back, bit for bit."""
        for weight, saved in self._saved:
            weight.copy_(saved)
        for target in self._added:
            target.register_parameter("bias", None)
        for adapted, base in self._swapped:
            adapted.base = base
        self._saved, self._added, self._swapped = [], [], []
        for site, _ in self.sites.values():
            module = self.model.get_submodule(site.owner)
            assert isinstance(module, AdaptedLinear)
            module.merged = False
        self.is_merged = False

    def remove(self) -> None:
        """Leave the model as it was found.

        Raises:
            ModelError: the way back was let go.
        """
        if self.is_merged:
            self.unmerge()
        if self._stays:
            raise ModelError(
                f"finetune.{self.name}: cannot be removed: the way back was let go; read the base "
                "again"
            )
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        for parameter in self._learned:
            parameter.requires_grad_(True)

    def stay(self) -> None:
        """Let go of what only the way back needs."""
        self._stays = True
        self._undo, self._learned, self.begin = [], [], {}

    def keep_merged(self) -> nn.Module:
        """The model with merged weights and without the method, which is gone.

        Raises:
            ModelError: as of :meth:`merge`.
        """
        self.merge(dequantise=True)
        for name, module in list(self.model.named_modules()):
            if hasattr(module, "dense") and not name.endswith(".base"):
                parent, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, _plain(module))
        for owner in dict.fromkeys(site.owner for site, _ in self.sites.values()):
            adapted = self.model.get_submodule(owner)
            assert isinstance(adapted, AdaptedLinear)
            parent, _, leaf = owner.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, adapted.base)
        return self.model

    # ------------------------------------------------------------------ training

    def step_method(self, trainer: RankTrainer) -> StepMethod:
        """The trainer's own: by gradients."""
        return trainer.method

    def before_step(self, step: int, total: int) -> None:
        """Notify every part that requires it, before the passes of step ``step`` of ``total``."""
        self._tell("before_step", step, total)

    def before_update(self, step: int, total: int) -> None:
        """The same when gradients are whole, before the optimizer uses them."""
        self._tell("before_update", step, total)

    def after_update(self, step: int, total: int) -> None:
        """The same when the optimizer has made its step."""
        self._tell("after_update", step, total)

    def _tell(self, what: str, step: int, total: int) -> None:
        for part in self._parts():
            hook = getattr(part, what, None)
            if hook is not None:
                hook(step, total)

    def penalty(self) -> Tensor | None:
        """Sum of what parts add to the loss."""
        terms = [
            part.penalty()  # type: ignore[operator]
            for part in self._parts()
            if getattr(part, "penalty", None) is not None
        ]
        return torch.stack(terms).sum() if terms else None


@torch.no_grad()
def _plain(module: nn.Module) -> nn.Linear:
    """A linear layer with the weights of one in few bits."""
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    weight = dense(module)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device)
    made.weight.copy_(weight)
    if bias is not None:
        made.bias.copy_(bias)
    return made.requires_grad_(False)
