"""A sparse coding from a plan to a report."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.sparse_coding.engine import (
    CodingState,
    LearningSettings,
    begin,
    learn,
    spread,
)
from shoal.fields.data.sparse_coding.inputs import points_of
from shoal.fields.data.sparse_coding.job import SparseCodeJob
from shoal.fields.data.sparse_coding.pictures import component_grid, energy_chart
from shoal.fields.data.sparse_coding.protocols import CodingParams, Superposition
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.fields.data.sparse_coding.states import StateSpace
from shoal.fields.running import RunOutcome, RunProgress


def execute(job: SparseCodeJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Learn; writes ``components.npy``, ``prior.json`` and two pictures.

    Raises:
        ShoalError: the data cannot be read, or not be explained by such a model.
    """
    progress.say(0.0, "reading")
    begun = time.perf_counter()
    data, _ = points_of(job)
    read_s = time.perf_counter() - begun
    model: Superposition = table("superposition").build(choice, where="method")
    model.check(data)
    space = StateSpace(job.components, job.candidates, job.active, model.values)
    settings = LearningSettings(
        iterations=job.iterations,
        schedule=AnnealSchedule.usual(data.shape[1], job.schedule, hot=model.hot),
        seed=job.seed,
        deviation=float(data.std()),
        restarts=job.restarts,
    )
    if progress.state is not None:
        state = from_json(progress.state, points=len(data))
    else:

        def start(done: int) -> None:
            progress.say(0.0, f"start {done + 1} of {job.restarts}")

        state = begin(model, space, data, settings, start)
    first, learning = state.iteration, time.perf_counter()

    def tick(now: CodingState) -> None:
        passed = max(time.perf_counter() - learning, 1e-9)
        rate = (now.iteration - first) * len(data) / passed
        energy = now.free_energy[-1]
        progress.tick(
            now.iteration / job.iterations,
            f"iteration {now.iteration} of {job.iterations}, {rate:,.0f} vectors/s, "
            f"free energy {energy:.5g}",
            to_json(now),
            free_energy=energy,
        )

    with spread(model, space, data, pool=job.pool, workers=job.workers) as (sizes, expect):
        state = learn(model, space, state, settings, sizes, expect, tick)
    total_s = progress.seconds - read_s
    _write(state, progress)
    noise = state.params["sigma2"]
    spread_of = np.sqrt(np.diagonal(noise) if noise.ndim == 2 else noise)
    return RunOutcome(
        measured={
            "total_s": total_s,
            "read_s": read_s,
            "points_per_s": len(data) * job.iterations / max(total_s, 1e-9),
            "free_energy": state.free_energy[-1],
            "noise": float(np.sqrt(np.mean(spread_of**2))),
        },
        details={"active": float(model.rates(state.params).sum())},
    )


def to_json(state: CodingState) -> dict[str, Any]:
    """A state as plain values, from which learning goes on to the same end."""
    last = None if state.last is None else [_lists(state.last[0]), state.last[1]]
    keep = state.keep
    return {
        "params": _lists(state.params),
        "iteration": state.iteration,
        "free_energy": list(state.free_energy),
        "keep": None if keep is None else base64.b85encode(np.packbits(keep).tobytes()).decode(),
        "last": last,
    }


def from_json(raw: Mapping[str, Any], *, points: int) -> CodingState:
    """The state of :func:`to_json`.

    Args:
        raw: it.
        points: vectors of the data.

    Raises:
        ConfigError: it is no such state.
    """
    try:
        keep, last = raw["keep"], raw["last"]
        bits = None
        if keep is not None:
            packed = np.frombuffer(base64.b85decode(keep), np.uint8)
            bits = np.unpackbits(packed)[:points].astype(bool)
            if len(bits) != points:
                raise ValueError("of other data")
        return CodingState(
            params=_arrays(raw["params"]),
            iteration=int(raw["iteration"]),
            free_energy=tuple(map(float, raw["free_energy"])),
            keep=bits,
            last=None if last is None else (_arrays(last[0]), float(last[1])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise ConfigError(
            f"state.json: no state of a sparse coding of such data ({cause}); remove it, and the "
            "run begins again"
        ) from cause


def _lists(params: CodingParams) -> dict[str, Any]:
    return {name: value.tolist() for name, value in params.items()}


def _arrays(raw: Mapping[str, Any]) -> CodingParams:
    return {name: np.asarray(value, np.float64) for name, value in raw.items()}


def _write(state: CodingState, progress: RunProgress) -> None:
    """Each file whole or not at all."""
    place, W = progress.directory, state.params["W"]
    components = io.BytesIO()
    np.save(components, W, allow_pickle=False)
    write_atomic(place / "components.npy", components.getvalue())
    rest = {name: value for name, value in _lists(state.params).items() if name != "W"}
    write_json(place / "prior.json", {**rest, "free_energy": list(state.free_energy)})
    write_atomic(place / "components.svg", component_grid(W))
    write_atomic(place / "free_energy.svg", energy_chart(state.free_energy))
