"""A method on a problem with its compressors: as JSON, and built from it in every place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.protocols import UpdateCompressor
from shoal.fields.federate.vi.protocols import (
    Place,
    ViError,
    ViMethod,
    ViOperator,
    ViProblem,
    ViWork,
)


@dataclass(frozen=True, kw_only=True)
class ViSetting:
    """A method on a problem, as every place builds it.

    Args:
        operator: of the problem.
        method: how it is solved.
        up: compressor of the workers.
        down: of the server.
        step: gamma; None for the bound of the method.
        tolerance: error at which it ends.
        iterations: after which it ends in any case.
        seed: of everything that is drawn.
    """

    operator: ViOperator
    method: ViMethod
    up: UpdateCompressor
    down: UpdateCompressor
    step: float | None = None
    tolerance: float = 1e-6
    iterations: int = 10_000
    seed: int = 0

    def work(self) -> ViWork:
        """What a planner or a method reads of it."""
        one = self.operator
        return ViWork(
            size=one.size,
            workers=one.workers,
            constrained=one.constrained,
            constants=one.constants,
            up=self.up,
            down=self.down,
            step=self.step,
            log_error=float(-np.log(self.tolerance)),
        )

    def checked_step(self) -> float:
        """Gamma, after a check of the method; warns of one that is above the bound.

        Raises:
            ViError: the method does not fit, or there is no gamma.
        """
        work = self.work()
        if work.workers < 1:
            raise ViError("workers = 0: nobody evaluates the operator; give at least 1")
        self.method.check(work)
        bound = self.method.bound(work)
        if self.step is None:
            if bound is None:
                raise ViError("step: constants of this problem are not known; give a step")
            return bound
        if bound is not None and self.step > bound:
            warnings.warn(
                f"step = {self.step:g} is above {bound:.3g}, for which there is a guarantee; the "
                "run ends with an error if it diverges",
                stacklevel=3,
            )
        return self.step

    def place(self, worker: int, step: float) -> Place:
        """Where the method runs."""
        exact = table("update_compressor").build("identity")
        return Place(
            operator=self.operator, worker=worker, step=step, up=self.up, down=self.down,
            exact=exact, seed=self.seed,
        )  # fmt: skip


def described_as(
    problem: Choice | str | Mapping[str, Any],
    method: Choice | str | Mapping[str, Any],
    workers: int,
    compressor: Choice | str | Mapping[str, Any],
    server_compressor: Choice | str | Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """A setting as JSON, from which every place builds the same."""
    chosen = {
        "problem": problem, "method": method, "compressor": compressor,
        "server_compressor": server_compressor,
    }  # fmt: skip
    parts = {key: Choice.model_validate(one).model_dump() for key, one in chosen.items()}
    return {**parts, "workers": workers, "seed": seed}


def built(described: Mapping[str, Any], **limits: Any) -> ViSetting:
    """The setting that is described.

    Raises:
        ConfigError: a part or an option of it does not exist.
        ViError: the problem cannot be divided over so many workers.
    """
    problem: ViProblem = table("vi_problem").build(described["problem"], where="problem")
    if described["workers"] < 1:
        raise ViError("workers = 0: nobody evaluates the operator; give at least 1")
    up, down = (
        table("update_compressor").build(described[key], where=key)
        for key in ("compressor", "server_compressor")
    )
    return ViSetting(
        operator=problem.build(described["workers"], described["seed"]),
        method=table("vi_method").build(described["method"], where="method"),
        up=up, down=down, seed=described["seed"], **limits,
    )  # fmt: skip
