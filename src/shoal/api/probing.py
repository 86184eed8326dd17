"""``shoal.probe`` and its sweeps: what this machine can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.config import resolve
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.files import shoal_home
from shoal.core.hub import fetched
from shoal.core.tables import ShownAsTables, Table, table_of
from shoal.ir import Machine, ServeJob
from shoal.ir.explanation import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shoal.cost.gemm.predictor import GemmPredictor
    from shoal.cost.kernels.own import SweepResult
    from shoal.machine.probes.gemm_table import GemmTable
    from shoal.plan.trees.drafting import RowCosts


def silent(*_: object) -> None:
    """Nothing is shown."""


def probe(
    *,
    fast: bool = True,
    strict: bool = False,
    save: str | PathLike[str] | bool = True,
    progress: Progress = silent,
) -> Machine:
    """Measure this machine; half a minute if fast.

    Args:
        fast: fewer sizes and repeats.
        strict: refuse a noisy machine.
        save: where the description is written; True for the machine called ``local``.
        progress: called with (done, total, what is done).

    Raises:
        MachineError: it cannot be measured, or is too noisy.
    """
    from shoal.machine.probing import probe as measure

    machine = measure(fast=fast, strict=strict, progress=progress)
    if save is not False:
        path = shoal_home() / "machine.yaml" if save is True else Path(save)
        machine.save(path, header="Measured by shoal probe.")
    return machine


@dataclass(frozen=True, kw_only=True)
class GemmSweep(ShownAsTables):
    """Matrix products that were measured, and what was learnt from them.

    Args:
        points: every product that was ever measured here.
        predictor: fitted to them.
        table: file of the points.
        file: of the predictor.
        skipped: what could not be measured, and why.
    """

    points: GemmTable
    predictor: GemmPredictor
    table: Path
    file: Path
    skipped: Mapping[str, str]

    def rates(self) -> dict[str, tuple[float, int]]:
        """Kernel and type -> (best FLOP/s, products measured)."""
        result: dict[str, tuple[float, int]] = {}
        for point in self.points.points:
            name = f"own, tile {point.tile}" if point.tile else f"torch {point.dtype}"
            best, number = result.get(name, (0.0, 0))
            result[name] = (max(best, point.flops / point.seconds), number + 1)
        return dict(sorted(result.items()))

    def importance(self) -> dict[str, float]:
        """Feature -> rise of the error in log seconds without it, the largest first."""
        from shoal.cost.gemm.validate import importance

        return importance(self.points)

    def as_json(self) -> dict[str, Any]:
        """What was found, for other programs."""
        return {
            "points": self.predictor.points,
            "errors": self.predictor.errors,
            "rates": self.rates(),
            "skipped": dict(self.skipped),
        }

    def tables(self) -> Iterable[Table | str]:
        """Best rates, what was skipped, and how well the predictor does."""
        rows = [
            (name, f"{best / 1e12:.3g} TFLOP/s", number)
            for name, (best, number) in self.rates().items()
        ]
        yield table_of("products", ("kernel", "best", "measured"), rows, " rr")
        yield from _left_out(self.skipped)
        errors = self.predictor.errors
        yield (
            f"held-out shapes: median error {100 * errors['median_error']:.1f} %; "
            f"{100 * errors['coverage']:.0f} % inside the 90 % interval"
        )


def probe_gemm(
    *,
    budget_s: float = 180.0,
    out: str | PathLike[str] | None = None,
    watts: float = 0.0,
    progress: Progress = silent,
) -> GemmSweep:
    """Sweep matrix products and learn to predict them; goes on where it stopped.

    Args:
        budget_s: seconds of the sweep.
        out: file of the table; the machine's own if None. The predictor lies beside it.
        watts: draw of this host under load where it has no counters; 0 if unknown.
        progress: called with (done, total, what is done).

    Raises:
        MachineError: too few products were measured to learn from.

    Examples:
        >>> sweep = shoal.probe_gemm(budget_s=60)
        >>> sweep.predictor.errors["median_error"]
    """
    from shoal.cost.gemm.predictor import fit, predictor_path
    from shoal.machine.probes.gemm import Gemm
    from shoal.machine.probes.gemm_table import table_path
    from shoal.machine.protocols import ProbeContext

    path = table_path() if out is None else Path(out)
    with ProbeContext() as context:
        points = Gemm(budget_s=budget_s, path=str(path), watts=watts).sweep(
            context, progress=progress
        )
        skipped = dict(context.skipped)
    try:
        predictor = fit(points)
    except ShoalError as cause:
        raise type(cause)(f"{cause}; what was measured is saved in {path}") from cause
    place = predictor_path() if out is None else path.with_suffix(".safetensors")
    predictor.save(place)
    return GemmSweep(points=points, predictor=predictor, table=path, file=place, skipped=skipped)


@dataclass(frozen=True, kw_only=True)
class KernelSweep(ShownAsTables):
    """Serving kernels that were measured on a card.

    Args:
        result: what the table now has.
        skipped: what could not be measured, and why.
    """

    result: SweepResult
    skipped: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """What was found, for other programs."""
        facts = self.result._asdict()
        return {**facts, "path": str(self.result.path), "skipped": dict(self.skipped)}

    def tables(self) -> Iterable[Table | str]:
        """Kernels by how many sizes were measured, and what is left."""
        result = self.result
        title = ", ".join(f"{key} {value or 'unknown'}" for key, value in result.facts.items())
        rows = [(name, *counts) for name, counts in result.grids.items()]
        yield table_of(title, ("kernel", "measured", "not possible here"), rows, " rr")
        yield from _left_out(self.skipped)
        left = result.total - result.done
        yield (
            f"{left} of {result.total} sizes are left; shoal probe gpu continues"
            if left
            else "complete: every size is measured"
        )


def probe_gpu(
    *,
    budget_s: float = 180.0,
    out: str | PathLike[str] | None = None,
    progress: Progress = silent,
) -> KernelSweep:
    """Time serving's kernels on this machine's GPU; goes on where it stopped.

    Args:
        budget_s: seconds of the sweep.
        out: file of the table; that of the card, where plans find it, if None.
        progress: called with (done, total, what is done).

    Raises:
        MachineError: torch sees no GPU, or the table is of another card, driver or torch.

    Examples:
        >>> sweep = shoal.probe_gpu(budget_s=300)
        >>> sweep.result.done, sweep.result.total
    """
    from shoal.cost.kernels.own import sweep_kernels
    from shoal.machine.protocols import ProbeContext

    path = None if out is None else Path(out)
    with ProbeContext() as context:
        result = sweep_kernels(context, budget_s=budget_s, path=path, progress=progress)
        return KernelSweep(result=result, skipped=dict(context.skipped))


def probe_decode(
    job: str | PathLike[str] | ServeJob, *, out: str | PathLike[str] | None = None
) -> RowCosts:
    """Time steps by their rows, and guesses, of a serving job with speculative decoding.

    Args:
        job: in YAML, or a value, with ``speculative``.
        out: file of the table; None writes none.

    Raises:
        ConfigError: a job that does not guess.

    Examples:
        >>> costs = shoal.probe_decode("serve.yaml", out="costs.json")
        >>> dict(zip(costs.rows, costs.seconds_of))
    """
    asked = job if isinstance(job, ServeJob) else resolve(ServeJob, file=Path(job)).value
    if asked.speculative is None:
        where = "probe decode" if isinstance(job, ServeJob) else str(job)
        raise ConfigError(f"{where}: speculative is not set; set it to the drafter to measure")
    from shoal.plan.trees.drafting import ProfitableDrafting, RowCosts
    from shoal.serve.bench.replay import weights_of
    from shoal.serve.engine.build import engine_of

    asked = fetched(asked)
    engine = engine_of(asked, weights_of(asked)[0])[0]
    paying = engine.scheduler.drafting  # type: ignore[attr-defined]
    assert isinstance(paying, ProfitableDrafting)
    assert isinstance(paying.cost, RowCosts)
    if out is not None:
        paying.cost.write(Path(out))
    return paying.cost


def _left_out(skipped: Mapping[str, str]) -> Iterable[str]:
    return [f"skipped {where}: {reason}" for where, reason in skipped.items()]


def build_kernels(progress: Progress = silent) -> int:
    """Compile probes, checksums and kernels for this processor; no later start compiles them.

    What has been compiled is not compiled again. As many are at a time as there are cores. Kernels
    share the threads of torch, and are left out where it is not installed; those that are
    generated, as from an expression, are compiled when they are first used.

    Args:
        progress: called with (done, total, what has been built).

    Returns:
        Number of libraries.

    Raises:
        BuildError: there is no compiler, or it refuses a source.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed
    from functools import partial
    from importlib.util import find_spec

    from shoal.checkpoint.checksum import library as checksums
    from shoal.checkpoint.inmemory.field import library as coding
    from shoal.core.measure import num_cores
    from shoal.machine import native as probes

    work: dict[str, Callable[[], object]] = {}
    if find_spec("torch") is not None:
        from shoal.kernel import native as kernels

        work = {f"kernel {name}": partial(kernels.library, name) for name in kernels.libraries()}
    work |= {f"probe {name}": partial(probes.library, name) for name in probes.libraries()}
    work |= {"checksums": checksums, "coding": coding}
    with ThreadPoolExecutor(num_cores()) as pool:
        building = {pool.submit(build): name for name, build in work.items()}
        try:
            for done, built in enumerate(as_completed(building), 1):
                built.result()
                progress(done, len(work), building[built])
        finally:
            pool.shutdown(cancel_futures=True)
    return len(work)
