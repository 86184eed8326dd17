"""One process of a check: ``python -m shoal.claims.check.worker DIRECTORY ROLE``.

The role is ``one`` or a rank's number. The one-process side runs first and leaves its
tensors after every step; the ranks compare themselves with these, step by step, and stop
together after the first step that differs. Then each rank runs the unsplit model over its
own part of the batch, which is what the diagnosis needs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.claims.check.compare import (
    BROKEN,
    Distance,
    combine_losses,
    distance,
    floor_of,
    groups_by,
    rounding_only,
)
from shoal.claims.check.program import CheckedProgram, blame
from shoal.claims.check.protocols import DATA_AXES, CheckSettings
from shoal.claims.check.store import (
    CheckDirectory,
    read_facts,
    read_tensors,
    write_facts,
    write_tensors,
)
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.files import write_atomic, write_json
from shoal.core.janitor import leave

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.claims.check.compare import Array
    from shoal.claims.check.side import CheckedStep, Side

# Axes whose ranks hold different parts of the batch, beyond those that share its rows.
_PART_AXES = DATA_AXES | {"cp", "context"}

_CONNECTION_LOST = 3


class _Told:
    """Leaves a line about what this process is doing, and the how manieth thing it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = "starting"
        self.number = 0

    def __call__(self, text: str) -> None:
        self.now = text
        self.number += 1
        write_atomic(self.path, f"{self.number} {text}")


def run_one(settings: CheckSettings, place: CheckDirectory, report: _Told) -> None:
    """The one-process side, twice, to see whether it equals itself.

    Raises:
        ConfigError: it does not.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shoal.claims.check.side import Side, tensors_of

    report(f"loading {settings.file}")
    program = CheckedProgram.load(settings)
    axes = settings.resolve_mesh(program.mesh)
    _join(place, "one", 0, 1, settings)
    mesh = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=tuple(axes))
    sides = [
        Side(program, settings, mesh, split=False, noise=noise, report=report) for noise in (10, 20)
    ]
    first, again = sides
    held = first.parameters()
    aliases = dict(first.model.named_parameters())
    shapes = {name: tuple(held[name].shape) for name in aliases}
    start = {f"start/{n}": held[n] for n in shapes}
    write_tensors(
        place.one_tensors(-1), start | {f"buffer/{n}": b for n, b in first.buffers().items()}
    )
    _same_start(start, again)
    losses = []
    for step in range(settings.steps):
        batch = first.part(step, {}, {})
        record = first.step(step, batch)
        other = again.step(step, again.part(step, {}, {}))
        if record.loss is None:
            raise ConfigError(f"{settings.file}: train_step() returned no loss in one process")
        _finite(record, step)
        _same_twice(first, record, again, other, step)
        losses.append(record.loss)
        gradients = {n: g for n, g in record.gradients.items() if n in shapes}
        parameters = first.parameters()
        write_tensors(
            place.one_tensors(step),
            {f"gradient/{n}": g for n, g in tensors_of(gradients).items()}
            | {f"parameter/{n}": parameters[n] for n in shapes}
            | {f"buffer/{n}": b for n, b in first.buffers().items()},
        )
    order = [name for name in first.order if name in shapes]
    order += [name for name in shapes if name not in order]
    unused = [n for n, g in first.step_gradients().items() if g is None and n in shapes]
    write_facts(
        place.one,
        {
            "mesh": axes,
            "losses": losses,
            "shapes": shapes,
            "order": order,
            "unused": unused,
            "buffers": {n: tuple(b.shape) for n, b in first.buffers().items()},
            "loss_over_ranks": settings.loss_over_ranks or program.loss_over_ranks,
        },
    )
    dist.destroy_process_group()
    torch.set_grad_enabled(True)


def _same_start(start: Mapping[str, Tensor], again: Side) -> None:
    import torch

    for name, tensor in again.parameters().items():
        key = f"start/{name}"
        if key in start and not torch.equal(start[key], tensor):
            raise ConfigError(
                f"model(): two calls with the same seed give a different {name}; draw initial "
                "values from torch's generator, or from one with a fixed seed"
            )


def _finite(record: CheckedStep, step: int) -> None:
    import torch

    wrong = [
        f"the gradient of {name}"
        for name, g in record.gradients.items()
        if g is not None and not torch.isfinite(g).all()
    ]
    if record.loss is not None and not np.isfinite(record.loss):
        wrong = [f"the loss ({record.loss})"]
    if wrong:
        raise ConfigError(
            f"step {step}: in one process {wrong[0]} is not finite; check the model, the batch or "
            "the learning rate"
        )


def _same_twice(
    first: Side, record: CheckedStep, again: Side, other: CheckedStep, step: int
) -> None:
    from torch import nn

    apart = []
    if abs((record.loss or 0) - (other.loss or 0)) > 1e-12 * abs(record.loss or 0):
        apart.append("loss")
    floor = floor_of(_array(g) for g in record.gradients.values() if g is not None)
    for name in first.order:
        mine, theirs = record.gradients.get(name), other.gradients.get(name)
        one = None if mine is None else _array(mine)
        two = None if theirs is None else _array(theirs)
        if distance(two, one, floor).error > first.settings.limit:
            apart.append(f"the gradient of {name}")
            break
    if not apart:
        return
    drops = [
        name
        for name, module in first.model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training
    ]
    hint = (
        f"dropout is on in {drops[0]}: set its p to 0 for the check"
        if drops
        else "disable random operations in the step, or use a generator with a fixed seed"
    )
    raise ConfigError(
        f"step {step}: one process is not reproducible: in two runs with different random states, "
        f"{' and '.join(apart)} differ{'s' if len(apart) == 1 else ''}; {hint}"
    )


def run_rank(settings: CheckSettings, place: CheckDirectory, report: _Told, rank: int) -> None:
    """One rank of the split side."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    facts = read_facts(place.one)
    axes: dict[str, int] = facts["mesh"]
    world = 1
    for size in axes.values():
        world *= size
    report(f"loading {settings.file}")
    program = CheckedProgram.load(settings)
    report("waiting for the other ranks")
    _join(place, "ranks", rank, world, settings)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    _Rank(settings, place, report, rank, world, facts, program, mesh).run()
    report("leaving")
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    """A rank while it compares."""

    def __init__(
        self,
        settings: CheckSettings,
        place: CheckDirectory,
        report: _Told,
        rank: int,
        world: int,
        facts: Mapping[str, Any],
        program: CheckedProgram,
        mesh: Any,
    ) -> None:
        from shoal.claims.check.side import Side

        self.settings, self.place, self.report = settings, place, report
        self.rank, self.world, self.facts = rank, world, facts
        self.program, self.mesh = program, mesh
        self.axes: dict[str, int] = facts["mesh"]
        place_of = mesh.get_coordinate()
        self.coordinate = dict(zip(self.axes, place_of, strict=True))
        self.coordinates: list[dict[str, int]] = [{} for _ in range(world)]
        _gather(self.coordinates, self.coordinate)
        self.shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        self.buffer_shapes = {name: tuple(shape) for name, shape in facts["buffers"].items()}
        self.side = Side(
            program, settings, mesh, split=True, noise=1000 * (rank + 1), report=report
        )
        self.rows: list[dict[str, Any]] = []
        self.losses: list[tuple[float, float | None]] = []
        self.loss_notes: list[str] = []
        self.evidence: dict[str, Tensor] = {}
        self.idle: set[str] = set()
        self._read: tuple[Path, dict[str, Array]] | None = None

    def run(self) -> None:
        """Compare step by step until one differs."""
        extra = sorted(set(self.side.parameters()) - set(self.shapes) - self._aliases())
        bad = self._compare(
            -1, "start", self.side.parameters(), self.shapes, self.place.one_tensors(-1)
        )
        different = bool(bad)
        done = 0
        while not different and done < self.settings.steps:
            different = self._step(done)
            done += 1
        facts = {
            "rows": self.rows,
            "losses": self.losses,
            "loss_notes": self.loss_notes,
            "steps": done,
            "different": different,
            "coordinate": self.coordinate,
            "extra": extra,
            "idle": sorted(self.idle),
            "forward": [],
        }
        self._leave(facts)
        if different and done:
            # Should this fail, the verdict has been left already.
            facts["forward"] = self._solo(done - 1)
            self._leave(facts)

    def _leave(self, facts: Mapping[str, Any]) -> None:
        if self.evidence:
            write_tensors(self.place.evidence(self.rank), self.evidence)
        write_facts(self.place.result(self.rank), facts)

    def _aliases(self) -> set[str]:
        """Second names of tied parameters."""
        if self.side.trainer is not None:
            return set()
        own = dict(self.side.model.named_parameters())
        all_names = self.side.model.named_parameters(remove_duplicate=False)
        return {self.side.name_of(raw) for raw, _ in all_names if raw not in own}

    def _step(self, step: int) -> bool:
        batch = self.side.part(step, self.coordinate, self.axes)
        record = self.side.step(step, batch)
        self.record, self.batch = record, batch
        self.report(f"step {step}: comparing")
        path = self.place.one_tensors(step)
        bad = self._compare(step, "gradient", record.gradients, self.shapes, path)
        bad += self._compare(step, "parameter", self.side.parameters(), self.shapes, path)
        buffers = self.side.buffers()
        bad += self._compare(step, "buffer", buffers, self.buffer_shapes, path)
        losses: list[float | None] = [None] * self.world
        _gather(losses, record.loss)
        axes = [axis for axis in self.axes if axis in _PART_AXES]
        result, note = combine_losses(
            losses, groups_by(self.coordinates, axes), self.facts["loss_over_ranks"]
        )
        expected = self.facts["losses"][step]
        self.losses.append((expected, result))
        if note:
            self.loss_notes.append(f"step {step}: {note}")
        if result is None or not abs(result - expected) <= self.settings.limit * abs(expected):
            bad.append("loss")
        return bool(bad)

    def _compare(
        self,
        step: int,
        kind: str,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        path: Path,
    ) -> list[str]:
        """Rows of one kind; the names that differ on any rank."""
        from shoal.claims.check.whole import whole_views

        if self.side.trainer is not None and kind == "buffer":
            return []
        held = {name: value for name, value in values.items() if name in shapes}
        views, notes = whole_views(held, shapes, self.mesh, self.program)
        saved = self._tensors(path)
        expected = {
            name.removeprefix(f"{kind}/"): x
            for name, x in saved.items()
            if name.startswith(f"{kind}/")
        }
        atol = self.settings.atol
        floor = floor_of(expected.values()) if atol is None else atol
        idle: set[str] = set()
        if kind == "parameter":
            gradients = {
                name.removeprefix("gradient/"): x
                for name, x in saved.items()
                if name.startswith("gradient/")
            }
            scale = floor_of(gradients.values()) if atol is None else atol
            idle = rounding_only(gradients, scale, self.settings.limit)
        mine = []
        for name in shapes:
            if name in notes:
                if kind == "buffer" and notes[name] == "no rank holds it":
                    continue
                result = Distance(BROKEN, 0.0, notes[name])
            elif name in views:
                view = views[name]
                array = None if view is None else _array(view)
                result = distance(array, expected.get(name), floor)
            else:
                continue
            if result.error > self.settings.limit:
                if name in idle and not result.note:
                    self.idle.add(name)
                    continue
                mine.append(name)
            self.rows.append(
                {
                    "step": step,
                    "kind": kind,
                    "name": name,
                    "error": result.error,
                    "absolute": result.absolute,
                    "rank": self.rank,
                    "note": result.note,
                }
            )
        everyone: list[list[str]] = [[] for _ in range(self.world)]
        _gather(everyone, mine)
        bad = [name for name in shapes if any(name in names for names in everyone)]
        for name in bad:
            view = views.get(name)
            if view is not None and kind == "gradient":
                self.evidence[f"found/{name}"] = view
        return bad

    def _tensors(self, path: Path) -> dict[str, Array]:
        """Tensors of the one-process side; kept until others are asked for."""
        if self._read is None or self._read[0] != path:
            self._read = (path, read_tensors(path))
        return self._read[1]

    def _solo(self, step: int) -> list[dict[str, Any]]:
        """The unsplit model over this rank's part: its gradients, and where outputs part ways."""
        import torch

        from shoal.claims.check.side import Side

        if not self._parts_are_rows():
            return []
        side = Side(
            self.program,
            self.settings,
            self.mesh,
            split=False,
            noise=1000 * (self.rank + 1),
            report=lambda _: None,
        )
        before = read_tensors(self.place.one_tensors(step - 1))
        prefix = "start/" if step == 0 else "parameter/"

        def kept(start: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(start): torch.from_numpy(x)
                for name, x in before.items()
                if name.startswith(start)
            }

        side.load(kept(prefix), kept("buffer/"))
        self.report(f"step {step}: the unsplit model on this rank's part, for the diagnosis")
        outputs = self.record.outputs
        problem = ""
        try:
            solo = side.step(step, self.batch)
        except Exception as error:  # a step that works only when split cannot be explained so
            problem = f"{type(error).__name__}: {error}"
        problems = [""] * self.world
        _gather(problems, problem)
        if any(problems):
            return []
        self.evidence |= {f"solo/{name}": g for name, g in solo.gradients.items() if g is not None}
        return self._forward(solo.outputs, outputs)

    def _parts_are_rows(self) -> bool:
        """Ranks that share their rows hold the same part, which a model can compute alone.

        Where a sequence is split too, attention reaches into other ranks' parts.
        """
        from shoal.claims.check.batches import leaves

        mine = [[list(x.shape), float(x.abs().double().sum())] for x in leaves(self.batch)]
        everyone: list[Any] = [None] * self.world
        _gather(everyone, mine)
        groups = groups_by(self.coordinates, [a for a in self.axes if a in DATA_AXES])
        return all(everyone[rank] == everyone[group[0]] for group in groups for rank in group)

    def _forward(
        self, solo: Mapping[str, Tensor], split: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Modules in order of completion, with how far their outputs are apart."""
        from shoal.claims.check.whole import guess_split

        names: list[list[str]] = [[] for _ in range(self.world)]
        _gather(names, [name for name in solo if name in split])
        common = [name for name in names[0] if all(name in other for other in names)]
        rows: list[dict[str, Any]] = []
        parted = False
        for name in common:
            expected, value = solo[name], split[name]
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            value = value.detach()
            if value.shape != expected.shape:
                result = guess_split(tuple(value.shape), tuple(expected.shape), self.axes)
                if result is not None:
                    dim, axis = result
                    expected = expected.chunk(self.axes[axis], dim)[self.coordinate[axis]]
            comparable = value.shape == expected.shape
            one, two = _array(expected), _array(value)
            error = distance(two, one, 0.0).error if comparable else 0.0
            total = self._total(value, differs=error > self.settings.limit)
            if total is not None:
                # What a row-parallel layer returns before its reduction is a part of the sum.
                error = min(error, distance(_array(total), one, 0.0).error)
            if not comparable:
                continue
            rows.append({"module": name, "error": error})
            if error > self.settings.limit and not parted:
                parted = True
                self.evidence[f"output/one/{name}"] = expected
                self.evidence[f"output/split/{name}"] = value
                if total is not None:
                    self.evidence[f"output/total/{name}"] = total
        return rows

    def _total(self, value: Tensor, *, differs: bool) -> Tensor | None:
        """The sum over the ranks that share their rows, if one of them differs."""
        import torch.distributed as dist

        fields: list[Any] = [None] * self.world
        _gather(fields, (list(value.shape), differs))
        inner = [a for a, size in self.axes.items() if size > 1 and a not in DATA_AXES]
        if len(inner) != 1 or not any(bad for _, bad in fields):
            return None
        if not self._alike(fields):
            return None
        total = value.clone().contiguous()
        dist.all_reduce(total, group=self.mesh.get_group(inner[0]))
        return total

    def _alike(self, report: Sequence[Any]) -> bool:
        """Whether ranks that share their rows have outputs of the same shape."""
        groups = groups_by(self.coordinates, [a for a in self.axes if a in DATA_AXES])
        return all(report[rank][0] == report[group[0]][0] for group in groups for rank in group)


def _array(tensor: Tensor) -> Array:
    import torch

    # A DTensor is compared as this rank holds it.
    local = getattr(tensor, "to_local", None)
    plain = tensor if local is None else local()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    array: Array = plain.detach().to(torch.float64).numpy()
    return array


def _gather(into: list[Any], value: Any) -> None:
    import torch.distributed as dist

    dist.all_gather_object(into, value)


def _join(place: CheckDirectory, name: str, rank: int, world: int, settings: CheckSettings) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(place.root / f"meet-{name}"), world
        ),
        rank=rank,
        world_size=world,
        # The one who started us finds a hang first, and says more about it.
        timeout=timedelta(seconds=10 * settings.timeout_s + 60),
    )


def main() -> int:
    """Run the role that the command line names; the status is the exit code."""
    place, who = CheckDirectory(Path(sys.argv[1])), sys.argv[2]
    stacks = os.open(place.stack(who), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.enable(stacks)
    settings = CheckSettings.model_validate(read_facts(place.settings))
    result = _Told(place.doing(who))
    try:
        import torch

        result("starting")
        torch.set_num_threads(1)
        if who == "one":
            run_one(settings, place, result)
        else:
            run_rank(settings, place, result, int(who))
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        # Whatever the user's program raises, SystemExit too, is reported in one line.
        own = isinstance(error, ShoalError)
        write_json(
            place.error(who),
            {
                "message": str(error) if own else blame(error, settings, result.now),
                "trace": traceback.format_exc(),
                "time": time.monotonic(),
                "own": own,
            },
        )
        return _CONNECTION_LOST if "onnection" in str(error) else 2
    return 0


if __name__ == "__main__":
    # Threads of a broken process group must not keep a rank alive.
    leave(main())
