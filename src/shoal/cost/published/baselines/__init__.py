"""Three analytic models of others, in short: what the same rows cost by their equations."""

from __future__ import annotations

from collections.abc import Callable

from shoal.cost.gpu.device import Accelerator
from shoal.cost.published.baselines import calculon, llm_analysis, simumax
from shoal.cost.published.runs import PublishedRun

__all__ = ["BASELINES"]

BASELINES: dict[str, Callable[[PublishedRun, Accelerator], float]] = {
    "llm-analysis": llm_analysis.seconds,
    "Calculon": calculon.seconds,
    "SimuMax": simumax.seconds,
}
