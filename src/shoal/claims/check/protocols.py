"""What a file under check may define, and what the check finds.

A file defines functions; the two with a star are needed, the others have defaults. Trailing
arguments may be left out of a definition: ``def loss(model, batch)`` is called without a
mesh. In one process every axis of the mesh has one rank.

===================================== ============================================================
``model()`` *                         the whole model, as one process trains it
``batch(step)`` *                     the whole batch of a step: tensors, also in tuples,
                                      lists and dictionaries
``loss(model, batch, mesh)``          the loss of a part of the batch
``optimizer(model)``                  an optimizer; without it AdamW(lr=1e-3)
``parallelize(model, mesh)``          changes the model in place, or returns the split one
                                      (or a :class:`TrainerLike`); without it nothing is split
``local_batch(batch, mesh)``          this rank's part; without it the rows are distributed along
                                      the data axes
``train_step(model, optimizer,        instead of ``loss``: a whole step, ``optimizer.step()``
batch, mesh)``                        included; returns the loss, or None on ranks without one
``parallel_step(model, optimizer,     the same, on the ranks only
batch, mesh)``
``whole(name, tensor, mesh)``         a rank's part of a parameter or gradient made whole, where
                                      Shoal cannot infer it; returns None to let it try
``rename(name)``                      the one-process name of a parameter of the split model
``mesh``                              a dictionary of axes, such as ``{"dp": 2, "tp": 2}``
``loss_over_ranks``                   how the ranks' losses make the whole one: ``"mean"``
                                      (default), ``"sum"`` or ``"same"``
===================================== ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

Axes = dict[str, int]
Dtype = Literal["float64", "float32"]
LossOverRanks = Literal["mean", "sum", "same"]

# In the order in which a step makes them: what differs first is nearest to the cause.
Kind = Literal["start", "gradient", "parameter", "buffer"]

# Axes along which the rows of a batch are distributed.
DATA_AXES = frozenset(
    {"dp", "ddp", "data", "batch", "fsdp", "hsdp", "replicate", "shard"}
    | {"dp_replicate", "dp_shard"}
)

# Relative error of a sum of a few thousand terms, with room for a change of their order.
TOLERANCE: dict[str, float] = {"float64": 1e-9, "float32": 2e-5}

_MAX_RANKS = 64


@runtime_checkable
class TrainerLike(Protocol):
    """What ``parallelize`` may return instead of a module: anything that trains.

    The values of ``gradients`` and ``parameters`` are whole tensors, DTensors, or parts:
    objects with ``tensor``, ``offset`` and ``shape``. A rank may leave out what it does not
    hold.
    """

    def step(self, batch: Any) -> Tensor | float | None:
        """Train one step on this rank's part of the batch; returns its loss, or None."""
        ...

    def gradients(self) -> Mapping[str, Any]:
        """Gradients that the last step used, by one-process name."""
        ...

    def parameters(self) -> Mapping[str, Any]:
        """Parameters as they are now, by one-process name."""
        ...


def parse_mesh(text: str) -> Axes:
    """Axes of ``dp=2,tp=2``, slowest first.

    Raises:
        ConfigError: not such a list.
    """
    axes: Axes = {}
    for part in text.split(","):
        name, sign, size = part.strip().partition("=")
        good = bool(name.isidentifier() and sign and size.isdecimal() and int(size) > 0)
        require(good, "--mesh", text, expected="axes and sizes, such as dp=2,tp=2")
        require(name not in axes, "--mesh", text, expected="every axis once")
        axes[name] = int(size)
    return axes


class CheckSettings(Value):
    """What to check and how closely.

    Args:
        file: a Python file, or the dotted name of a module.
        ranks: processes; without it the product of the mesh's axes, or 2.
        mesh: axes and sizes, slowest first; without it the file's, or dp alone.
        steps: training steps to compare; the check stops after the first that differs.
        dtype: what all floating-point numbers are converted to.
        tolerance: largest relative error of a tensor; by default 1e-9 in float64, 2e-5 in
            float32.
        atol: a tensor's error is relative to its largest entry, or to this if that is larger;
            without it, to a hundredth of the largest entry of all tensors of its kind.
        seed: seed of the model and the batches.
        ragged: deal rows out unevenly, which shows a divisor that counts ranks.
        loss_over_ranks: overrides the file's.
        timeout_s: silence after which a rank counts as hanging.
    """

    file: str
    ranks: PositiveInt | None = None
    mesh: Axes | None = None
    steps: PositiveInt = 3
    dtype: Dtype = "float64"
    tolerance: PositiveFloat | None = None
    atol: float | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0)
    ragged: bool = False
    loss_over_ranks: LossOverRanks | None = None
    timeout_s: PositiveFloat = 120.0

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.mesh is not None:
            self.resolve_mesh(self.mesh)
        return self

    @property
    def limit(self) -> float:
        """Largest relative error that counts as equal."""
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance

    @property
    def path(self) -> Path | None:
        """The file, unless a module is named."""
        named = Path(self.file)
        return named if named.suffix == ".py" or "/" in self.file else None

    def resolve_mesh(self, own: Axes | None) -> Axes:
        """The mesh to use, given the one that the file defines.

        Raises:
            ConfigError: it does not fit the number of ranks.
        """
        mesh = self.mesh or own or {"dp": self.ranks or 2}
        world = 1
        for size in mesh.values():
            world *= size
        shown = ",".join(f"{name}={size}" for name, size in mesh.items())
        require(
            self.ranks in (None, world),
            "--ranks",
            self.ranks,
            expected=f"{world}, the product of the mesh {shown}",
            hint="give one of the two",
        )
        require(
            2 <= world <= _MAX_RANKS,
            "--mesh",
            shown,
            expected=f"2 to {_MAX_RANKS} ranks",
        )
        return dict(mesh)


class CheckRow(Value):
    """One tensor of one step, or what is wrong with it.

    Args:
        step: from 0.
        kind: start is a parameter before the first step.
        name: the parameter's or buffer's one-process name.
        error: largest difference of all ranks, relative to the tensor's scale.
        absolute: the same, not divided.
        rank: where it is largest.
        note: why it cannot be compared, or empty.
    """

    step: int
    kind: Kind
    name: str
    error: float
    absolute: float = 0.0
    rank: int = 0
    note: str = ""


class Finding(Value):
    """What the differences have in common.

    Args:
        kind: a short name for programs.
        names: the parameters it is about.
        text: what it is and where to look.
    """

    kind: str
    names: tuple[str, ...] = ()
    text: str


class CheckVerdict(Value):
    """The outcome of a check.

    Args:
        equal: nothing differs by more than the tolerance.
        file: what was checked.
        mesh: axes and sizes.
        dtype: what was computed in.
        tolerance: largest relative error allowed.
        steps: steps that were run; fewer than asked for when one differs.
        losses: one-process and split loss of each step; None where the ranks have none.
        loss_equal: whether those agree.
        compared: tensors compared.
        worst: largest relative error of each kind.
        first: first differing parameter, in the order in which the model uses them.
        culprits: parameters that the first finding names, or the first differing one.
        rows: all that differ, worst first; without a difference the ten largest errors.
        findings: the surest first.
        notes: what else was seen.
        seconds: duration of the check.
    """

    equal: bool
    file: str
    mesh: Axes
    dtype: Dtype
    tolerance: float
    steps: int
    losses: tuple[tuple[float, float | None], ...]
    loss_equal: bool
    compared: int
    worst: dict[str, float]
    first: str | None = None
    culprits: tuple[str, ...] = ()
    rows: tuple[CheckRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
