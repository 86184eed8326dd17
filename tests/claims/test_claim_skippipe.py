"""The experiment of claim [93]: its training on routes, its options and its networks."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.claims import CLAIMS
from shoal.claims.experiments.skippipe import model_config, networks, task, train_routes
from shoal.core.errors import ConfigError
from shoal.plan.routes.network import WanNetwork
from shoal.plan.routes.plan import RouteTask, plan


@pytest.mark.slow
def test_training_on_routes_learns_and_repeats() -> None:
    planned = plan(WanNetwork.wan(6), RouteTask(stages=6, keep=4, microbatches=5, effort=0))
    text = np.tile(np.arange(20, dtype=np.uint8), 100)

    def trained(steps: int) -> dict[str, float]:
        return train_routes(planned, text, text[:400], width=32, steps=steps, lr=1e-2, seed=0)

    before, after = trained(1), trained(12)
    assert after["whole"] < before["whole"] - 0.1
    assert after == trained(12)
    assert after.keys() == {"whole", "left"}


@pytest.mark.slow
def test_networks_and_task_are_those_of_the_claim() -> None:
    assert [len(network.nodes) for network in networks()] == [20, 20]
    assert len({network.name for network in networks()}) == 2
    assert (task(4).kept, task(6).kept, task(4).stages) == (4, 6, 6)
    assert model_config(96).num_heads == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [({"width": 40}, "multiple of 32"), ({"steps": 1}, "at least 20"), ({"lr": 2.0}, "lr")],
)
def test_options_that_cannot_be_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CLAIMS.build({"name": "skippipe", **options})
