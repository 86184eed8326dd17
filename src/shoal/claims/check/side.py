"""One side of the comparison: builds what the file describes and records its steps.

Both sides are this class: the one-process side over a mesh of one rank, the split side
over the real mesh and with ``parallelize``. Gradients are taken in the moment before the
optimizer's step, so whatever the file does before (accumulation, clipping, reductions of
its own) is part of what is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.claims.check.batches import map_tensors, split_rows, to_dtype
from shoal.claims.check.program import CheckedProgram
from shoal.claims.check.protocols import DATA_AXES, CheckSettings, TrainerLike
from shoal.core.errors import ConfigError

# What wrappers put into names.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def clean(name: str, *, ddp: bool = False) -> str:
    """A parameter's name without what wrappers put into it.

    Args:
        name: as the wrapped model spells it.
        ddp: the model is wrapped whole, and every name begins with ``module``.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if ddp and parts[0] == "module" else parts)


@dataclass
class CheckedStep:
    """What a step left behind, as this rank holds it.

    Args:
        loss: this rank's, or None.
        gradients: by one-process name; None where the parameter got none.
        outputs: what each module first returned in the step, by name, in order of completion.
    """

    loss: float | None = None
    gradients: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


class Side:
    """A model, its optimizer and their steps.

    Args:
        program: the user's file.
        settings: precision and seed.
        mesh: a DeviceMesh; of one rank on the one-process side.
        split: apply ``parallelize`` and take this rank's part of the batch.
        noise: seed of whatever draws random numbers in the steps.
        told: called with what is being done.
    """

    def __init__(
        self,
        program: CheckedProgram,
        settings: CheckSettings,
        mesh: Any,
        *,
        split: bool,
        noise: int,
        report: Callable[[str], None],
    ) -> None:
        self.program = program
        self.settings = settings
        self.mesh = mesh
        self.split = split
        self.report = report
        self._noise = noise
        self._dtype = _DTYPES[settings.dtype]
        self.order: list[str] = []
        self._record = CheckedStep()
        self._captured = False
        self.trainer: TrainerLike | None = None
        self.optimizer: Any = None
        self.model = self._build()
        if split and program.has("parallelize"):
            report("parallelize()")
            made = program.call("parallelize", self.model, mesh)
            if isinstance(made, nn.Module):
                self.model = made
            elif isinstance(made, TrainerLike):
                self.trainer = made
            elif made is not None:
                raise ConfigError(
                    f"{program.where}: parallelize() returned {type(made).__name__}; return the "
                    "split model, None if it was changed in place, or an object with step(batch), "
                    "gradients() and parameters()"
                )
        wrapped = torch.nn.parallel.DistributedDataParallel
        self._ddp = isinstance(self.model, wrapped)
        if self.trainer is None:
            self._hook()
            self._build_optimizer()

    def _build(self) -> nn.Module:
        self.report("model()")
        torch.manual_seed(self.settings.seed)
        with _default_dtype(self._dtype):
            model = self.program.call("model")
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{self.program.where}: model() returned {type(model).__name__}; return a "
                "torch.nn.Module"
            )
        model._apply(lambda tensor: to_dtype(tensor, self._dtype))  # type: ignore[no-untyped-call]
        return model

    def _build_optimizer(self) -> None:
        self.report("optimizer()")
        if self.program.has("optimizer"):
            self.optimizer = self.program.call("optimizer", self.model)
            if not hasattr(self.optimizer, "step"):
                raise ConfigError(
                    f"{self.program.where}: optimizer() returned "
                    f"{type(self.optimizer).__name__}; return an optimizer"
                )
        else:
            # foreach refuses a mixture of plain tensors and DTensors.
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        if hasattr(self.optimizer, "register_step_pre_hook"):
            self.optimizer.register_step_pre_hook(lambda *_: self._capture())
            return
        inner = self.optimizer.step

        def step(*arguments: Any, **named: Any) -> Any:
            self._capture()
            return inner(*arguments, **named)

        self.optimizer.step = step

    def _hook(self) -> None:
        for raw, module in self.model.named_modules():
            name = clean(raw, ddp=self._ddp)
            if name:
                module.register_forward_hook(self._keep_output(name))
            own = [self.name_of(f"{raw}.{p}" if raw else p) for p in module._parameters]
            module.register_forward_pre_hook(self._keep_order(own))

    def _keep_output(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(first, Tensor) and name not in self._record.outputs:
                self._record.outputs[name] = first.detach().clone()

        return hook

    def _keep_order(self, names: list[str]) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            for name in names:
                if name not in self.order:
                    self.order.append(name)

        return hook

    def _capture(self) -> None:
        if not self._captured:
            self._captured = True
            self._record.gradients = {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in self._parameters().items()
            }

    def _parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return {self.name_of(raw): p for raw, p in named.items()}

    def name_of(self, raw: str) -> str:
        """The one-process name of a parameter, buffer or module."""
        name = clean(raw, ddp=self._ddp)
        if self.split and self.program.has("rename"):
            return str(self.program.call("rename", name))
        return name

    def step_gradients(self) -> dict[str, Any]:
        """Gradients of the last step."""
        return self._record.gradients

    def parameters(self) -> dict[str, Any]:
        """Parameters as this rank holds them, by one-process name."""
        if self.trainer is not None:
            return dict(self.trainer.parameters())
        return {name: p.detach() for name, p in self._parameters().items()}

    def buffers(self) -> dict[str, Any]:
        """Buffers as this rank holds them, by one-process name."""
        if self.trainer is not None:
            return {}
        return {self.name_of(raw): b.detach() for raw, b in self.model.named_buffers()}

    def load(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Overwrite what the model holds; only for whole models."""
        with torch.no_grad():
            for held, new in ((self._parameters(), parameters), (self.buffers(), buffers)):
                for name, tensor in held.items():
                    if name in new and new[name].shape == tensor.shape:
                        tensor.copy_(new[name])

    def part(self, step: int, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
        """The batch of a step, whole or this rank's part of it."""
        self.report(f"batch({step})")
        # Every rank draws the same batch, whatever it drew before.
        torch.manual_seed(self.settings.seed + 1000 * (step + 1))
        whole = self.program.call("batch", step)
        whole = map_tensors(whole, lambda tensor: to_dtype(tensor, self._dtype))
        if not sizes:
            return whole
        self.report(f"local_batch() of step {step}")
        if self.program.has("local_batch"):
            return self.program.call("local_batch", whole, self.mesh)
        index, parts = 0, 1
        for axis, size in sizes.items():
            if axis in DATA_AXES:
                index, parts = index * size + coordinate[axis], parts * size
        return split_rows(whole, index, parts, ragged=self.settings.ragged) if parts > 1 else whole

    def step(self, step: int, batch: Any) -> CheckedStep:
        """Train one step on this batch."""
        self._record, self._captured = CheckedStep(), False
        torch.manual_seed(self._noise + step)
        if self.trainer is not None:
            self.report(f"step {step}: the trainer's step()")
            loss = self.trainer.step(batch)
            self._record.gradients = dict(self.trainer.gradients())
        elif self.program.has("train_step") or (self.split and self.program.has("parallel_step")):
            name = "parallel_step" if self.split and self.program.has("parallel_step") else ""
            self.report(f"step {step}: {name or 'train_step'}()")
            _clear(self.optimizer, self.model)
            loss = self.program.call(
                name or "train_step", self.model, self.optimizer, batch, self.mesh
            )
        else:
            _clear(self.optimizer, self.model)
            self.report(f"step {step}: loss()")
            loss = self.program.call("loss", self.model, batch, self.mesh)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(
                    f"{self.program.where}: loss() returned {type(loss).__name__}; return a "
                    "tensor of one element"
                )
            self.report(f"step {step}: the backward pass of loss()")
            loss.backward()  # type: ignore[no-untyped-call]
            self.report(f"step {step}: optimizer.step()")
            self.optimizer.step()
        if self.trainer is None and not self._captured:
            raise ConfigError(
                f"{self.program.where}: the step did not call optimizer.step(); gradients are "
                "compared right before it"
            )
        self._record.loss = _number(loss)
        return self._record


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those that are there."""
    return {name: value for name, value in values.items() if value is not None}


def _number(loss: Any) -> float | None:
    if loss is None:
        return None
    if isinstance(loss, Tensor):
        whole = getattr(loss, "full_tensor", None)
        loss = (whole() if whole is not None else loss).detach().item()
    return float(loss)


def _clear(optimizer: Any, model: nn.Module) -> None:
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    else:
        model.zero_grad()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
