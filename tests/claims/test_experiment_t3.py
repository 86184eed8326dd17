"""The ranks of claim T3 compute the same in every form; what cannot run is skipped by reason."""

from __future__ import annotations

import pytest
import torch

from shoal.claims.experiments import t3
from shoal.claims.experiments.t3 import T3
from shoal.claims.experiments.t3_ranks import pairs, product_s
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError


def test_every_form_gives_the_same_result():
    torch.set_num_threads(1)
    ranks = run_ranks(2, lambda comm: pairs(comm, 64, 16, 8, 2, True))
    for rank in ranks:
        assert rank["difference"] < 1e-6
        assert {name: len(times) for name, times in rank.items() if name != "difference"} == {
            "scatter_after": 2,
            "scatter": 2,
            "gather_after": 2,
            "gather": 2,
            "library": 2,
        }
    assert len(run_ranks(2, lambda comm: product_s(comm, 64, 16, 8, 3))[0]) == 3


def test_without_emulated_links_the_timings_are_skipped_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(t3, "unavailable", lambda: "no root")
    monkeypatch.setattr(t3, "MODELS", {"T-NLG": t3.MODELS["T-NLG"]})
    samples = T3().run(ExperimentContext(work_dir=tmp_path), quick=False)
    assert samples.skipped == {"scatter_speedup": "no root", "gather_speedup": "no root"}
    assert len(samples.details["sublayers"]) == 8


@pytest.mark.parametrize("options", [{"tokens": 65}, {"width": 2}, {"repeats": 1}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"claim\.t3\."):
        T3(**options)
