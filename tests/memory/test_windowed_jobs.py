"""A training job whose blocks come and go: the same losses, norms and parameters, to the bit."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError, TierFullError

torch = pytest.importorskip("torch")

from offload_runs import config, job, run, same  # noqa: E402

from shoal.parallel.legal import check_split  # noqa: E402

WINDOW = {"name": "superpipeline", "k": 2, "k_prime": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        {"parallel": {"dp": 2}},
        pytest.param({"parallel": {"tp": 2}}, marks=pytest.mark.slow),
        pytest.param({"parallel": {"pp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_a_job_is_the_same(changes, tmp_path):
    model = config(num_layers=6)
    whole = run(job(**changes), model, tmp_path)
    budget = "8MiB"
    result = run(job(offload={**WINDOW, "device_budget": budget}, **changes), model, tmp_path)
    same(whole, result)
    assert 0 < result.peaks["device"] <= 8 * 2**20


def test_what_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r"superpipeline.k = 9: expected 1 to 2"):
        run(job(offload={**WINDOW, "k": 9}), config(), tmp_path)
    with pytest.raises(ConfigError, match=r"offload: superpipeline .* compile"):
        check_split(job(offload=WINDOW, compile=True), config().shape())
    with pytest.raises(TierFullError, match=r"device: .* needs"):
        wide = config(hidden=256, num_heads=16, ffn_hidden=1024)
        run(job(offload={**WINDOW, "device_budget": "1MiB"}), wide, tmp_path)
