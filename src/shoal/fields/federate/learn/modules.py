"""The user's own module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.fields.federate.learn.protocols import Learning
from shoal.fields.federate.protocols import FederationError


@part
class Module:
    """A class of the user's: its forward takes examples [B, ...] and gives logits [B, classes].

    It is imported by every process that trains it, so it must be importable there; a file is found
    from the directory in which the run was started. Its initialization draws from torch's
    generator, which is seeded.

    Args:
        path: ``package.module:Class`` or ``file.py:Class``.
        arguments: of the class, by name.
    """

    path: str
    arguments: Mapping[str, float | int | str | bool] = field(default_factory=dict)

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Counted in one pass over two examples; needs torch, as the class does."""
        torch = import_extra("torch", extra="run", purpose="a module of the user's own")
        with torch.random.fork_rng(devices=[]):
            module = self._made()
        example = torch.zeros((2, *features))
        products = 0.0

        def count(layer: Any, _: Any, output: Any) -> None:
            nonlocal products
            products += layer.weight.numel() * output.numel() / len(layer.weight)

        layers = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
        for layer in module.modules():
            if isinstance(layer, layers):
                layer.register_forward_hook(count)
        with torch.no_grad():
            self._checked(module, example, classes)
        tensors = [one for one in module.parameters() if one.requires_grad]
        tensors += [one for one in module.buffers() if one.is_floating_point()]
        return sum(one.numel() for one in tensors), 6.0 * products / len(example)

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """An instance."""
        import_extra("torch", extra="run", purpose="a module of the user's own")
        from shoal.fields.federate.learn.torch_learning import TorchLearning

        return TorchLearning(self._made)

    def _made(self) -> Any:
        from torch import nn

        cls = self._class()
        try:
            made = cls(**self.arguments)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise FederationError(
                f"learner module: {self.path} with arguments {dict(self.arguments)}: {cause}"
            ) from cause
        if not isinstance(made, nn.Module):
            raise FederationError(
                f"learner module: {self.path} makes a {type(made).__name__}; give a sub-class of "
                "torch.nn.Module"
            )
        return made

    def _checked(self, module: Any, example: Any, classes: int) -> None:
        try:
            answer = module.eval()(example)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise FederationError(
                f"learner module: {self.path} fails on examples {list(example.shape)}: {cause}"
            ) from cause
        if tuple(getattr(answer, "shape", ())) != (len(example), classes):
            raise FederationError(
                f"learner module: {self.path} answers examples {list(example.shape)} with "
                f"{list(getattr(answer, 'shape', ()))}; logits {[len(example), classes]} are "
                "expected"
            )

    def _class(self) -> Any:
        place, colon, name = self.path.rpartition(":")
        if not colon or not place or not name:
            raise FederationError(
                f"learner module: path = {self.path!r}; expected package.module:Class or "
                "file.py:Class"
            )
        try:
            if place.endswith(".py"):
                spec = importlib.util.spec_from_file_location(Path(place).stem, place)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            else:
                module = _imported(place)
            return getattr(module, name)
        except (ImportError, OSError, AttributeError, SyntaxError) as cause:
            raise FederationError(
                f"learner module: path = {self.path!r} cannot be imported ({cause}); a file is "
                f"looked for from {Path.cwd()}, a package where Python finds it"
            ) from cause


def _imported(place: str) -> Any:
    """A module that is installed, or lies where the run was started."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return importlib.import_module(place)
    finally:
        sys.path.remove(here)
