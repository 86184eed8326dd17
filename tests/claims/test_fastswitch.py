"""Claim FastSwitch counts in virtual time what it serves for real, and compares like with like."""

from __future__ import annotations

import pytest

from shoal.claims.experiments.fastswitch import FastSwitch
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError


@pytest.mark.slow
def test_the_quick_run_is_the_same_every_time_and_counts_what_it_should(tmp_path):
    claim = FastSwitch(requests=40, rounds=2)
    context = ExperimentContext(work_dir=tmp_path)
    result = claim.run(context, quick=True)
    again = claim.run(ExperimentContext(work_dir=tmp_path), quick=True)
    assert result.metrics == again.metrics
    copies = result.metrics["copies_with_groups"]
    assert copies.baseline[0] > 2 * copies.method[0] > 0
    # Each switch of the first variant moves a block a copy, in every layer.
    for turn in range(2):
        first = context._memory[f"per-block synchronous swap {turn} True"]
        assert first.copies == 4 * first.blocks and first.tokens_per_s > 0


def test_the_baseline_in_every_place_is_compared_with_another_round(tmp_path):
    context = ExperimentContext(work_dir=tmp_path)
    claim = FastSwitch(requests=40, rounds=2)
    claim.run(context, quick=True)
    served = dict(context._memory)
    aa = claim.run(context, quick=True, as_baseline=True)
    assert dict(context._memory) == served  # nothing had to be served again
    first, second = (served[f"per-block synchronous swap {turn} True"] for turn in range(2))
    reuse = aa.metrics["bytes_with_reuse"]
    assert reuse.method == reuse.baseline == (second.blocks, first.blocks)
    assert aa.metrics["copies_with_groups"].method[0] == second.copies
    assert aa.metrics["copies_with_groups"].baseline[0] == first.copies


@pytest.mark.parametrize("options", [{"rounds": 0}, {"rate": 0.0}, {"frequency": 2.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"claim\.fastswitch\."):
        FastSwitch(**options)
