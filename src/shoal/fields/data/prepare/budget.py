"""The privacy budget of a data set: what was released, and how much is left."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.files import expanded, locked, write_json
from shoal.fields.data.prepare.errors import BudgetError, PrepareError


@dataclass(frozen=True)
class PrivacyBudget:
    """A JSON file with all releases of one data set; their epsilons and deltas add up.

    Args:
        path: of the file.
        epsilon: that all releases together may have.
        delta: that all releases together may have.

    Source: Dwork et al., Our Data, Ourselves, 2006 (basic composition).
    """

    path: Path
    epsilon: float
    delta: float

    def releases(self) -> list[dict[str, Any]]:
        """What was released so far, each with its ``epsilon`` and ``delta``.

        Raises:
            PrepareError: the file is damaged.
        """
        path = expanded(self.path)
        if not path.exists():
            return []
        try:
            rows = json.loads(path.read_bytes())["releases"]
            return [
                {**row, "epsilon": float(row["epsilon"]), "delta": float(row["delta"])}
                for row in rows
            ]
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise PrepareError(
                f"{path}: no list of releases ({cause}); repair it: what was released is not "
                "known otherwise"
            ) from cause

    def spent(self) -> tuple[float, float]:
        """Sums of epsilon and of delta."""
        rows = self.releases()
        return sum(row["epsilon"] for row in rows), sum(row["delta"] for row in rows)

    def spend(self, what: str, epsilon: float, delta: float = 0.0) -> None:
        """Enter a release, before it is made.

        Raises:
            BudgetError: the budget does not allow it; nothing is entered.
        """
        path = expanded(self.path)
        with locked(path.with_name(path.name + ".lock"), lambda: None, error=PrepareError):
            rows, (used, used_delta) = self.releases(), self.spent()
            # A sum of tenths is not quite what it should be.
            if (
                used + epsilon > self.epsilon * (1 + 1e-9)
                or used_delta + delta > self.delta + 1e-15
            ):
                raise BudgetError(
                    f"{self.path}: {what}: epsilon {epsilon:g} and delta {delta:g} are asked for, "
                    f"{max(self.epsilon - used, 0):g} and {max(self.delta - used_delta, 0):g} of "
                    f"{self.epsilon:g} and {self.delta:g} are left; release less, or nothing"
                )
            rows.append({"what": what, "epsilon": epsilon, "delta": delta, "time": time.time()})
            write_json(path, {"releases": rows})
