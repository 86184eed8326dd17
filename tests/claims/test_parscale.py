"""ParScale's claim: what its arms share, and a run of it that is too small to show anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.claims.experiments.arch_training import ModuleText  # noqa: E402
from shoal.claims.experiments.parscale import (  # noqa: E402
    ParScaleClaim,
    Stages,
)
from shoal.claims.protocols import ExperimentContext  # noqa: E402
from shoal.core.errors import ConfigError  # noqa: E402


@pytest.mark.slow
def test_arms_go_on_from_one_first_stage_and_leave_it_as_it_was(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    data = ModuleText(*(source.integers(0, 256, 5000).astype(np.uint8) for _ in range(2)))
    stages = Stages(steps=3, late=0.4, prefix=4, faster=5.0, data=data)
    context = ExperimentContext(work_dir=tmp_path)
    one = stages.trained(context, 32, 1, 0)
    base: Any = context.remember("first 32 0", dict)
    before = {name: value.clone() for name, value in base.named_parameters()}
    two = stages.trained(context, 32, 2, 0)
    assert all(torch.equal(before[name], value) for name, value in base.named_parameters())
    assert np.isfinite([*one, *two]).all() and one.loss != two.loss
    assert stages.trained(context, 32, 1, 0) is one  # of which the A/A run is made


@pytest.mark.slow
def test_a_small_run_says_where_time_goes_and_what_can_be_reached(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.py").write_text("def f(x):\n    return x + 1\n" * 300)
    claim = ParScaleClaim(seeds=1, steps=4, hidden=32, wider=(64,), prefix=4, rounds=2)
    samples = claim.run(ExperimentContext(work_dir=tmp_path, data=folder), quick=False)
    assert set(samples.metrics) == {metric.name for metric in claim.metrics}
    short = {"loss_2", "loss_4", "loss_4_of_2", "latency"}
    assert short == set(samples.bounds)
    assert samples.profile.startswith("s a training step: 1 streams")


def test_bad_options() -> None:
    wrong: dict[str, Any]
    for wrong in ({"late": 1.0}, {"faster": 0.0}, {"wider": (160,)}):
        with pytest.raises(ConfigError, match=r"claim\.parscale"):
            ParScaleClaim(**wrong)


def test_the_dense_model_of_a_loss_is_looked_for_among_those_trained():
    from shoal.claims.experiments.parscale import _equal_size

    sizes = [1_000_000, 4_000_000]
    assert _equal_size(sizes, [2.0, 1.8], 1.9) == pytest.approx(2_000_000)
    assert _equal_size(sizes, [2.0, 1.8], 1.7) == 4_000_000
    assert _equal_size(sizes, [2.0, 2.01], 1.9) == 4_000_000
    assert _equal_size(sizes, [2.0, 1.8], 2.1) == 1_000_000
