"""Claim sequence_parallel: bytes by hand, the largest that fits, the baseline in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.claims.experiments import sequence_parallel
from shoal.claims.experiments.sequence_parallel import SequenceParallel, largest
from shoal.claims.experiments.sequence_parallel_ranks import Kind, Shape, count
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError


def test_counts_what_autograd_keeps() -> None:
    torch.set_num_threads(1)
    shape = Shape(hidden=32, heads=4, length=16, batch=3)
    one = 4.0 * 3 * 16 * 32  # bytes of the layer's input
    scores = 4.0 * 3 * 4 * 16 * 16
    statistics = 2 * 4.0 * 3 * 16  # of one norm
    sequence, tensor = count(shape, "sequence", 2), count(shape, "tensor", 2)
    # Input; queries, keys, values; weights; output of the heads.
    assert sequence.activations["attention"] == (5 * one + scores) / 2
    assert tensor.activations["attention"] == one + (4 * one + scores) / 2
    # The second norm's output is nobody's input; the first one's counts for the MLP.
    assert sequence.activations["mlp"] == 9 * one / 2
    assert tensor.activations["mlp"] == one + 8 * one / 2
    assert sequence.activations["norms"] == (2 * one + 2 * statistics) / 2
    assert tensor.activations["norms"] == 2 * one + 2 * statistics
    # Weight, gradient, two moments, and a step count for each parameter.
    weights = 4 * 4 * (8 * 32 * 32 + 4 * 32 + 32)
    assert sequence.states["mlp"] == weights + 4 * 4
    assert tensor.states["mlp"] == weights / 2 + 4 * 4 + 4 * 4 * 32 / 2  # the second bias is whole
    assert sequence.total == sum(sequence.states.values()) + sum(sequence.activations.values())


def test_rows_of_scores_are_kept_by_dense_attention_alone() -> None:
    torch.set_num_threads(1)

    def growth(kind: Kind) -> float:
        short, long = (
            count(Shape(32, 4, length, rows=4), kind, 2, train=False).activations["attention"]
            for length in (32, 128)
        )
        return long / short

    assert growth("sequence") > 6
    assert growth("ring") == 4
    assert growth("projected") <= 4


@pytest.mark.parametrize("guess", [0, 8, 40, 48, 400])
def test_the_largest_that_fits_is_found_from_any_guess(guess: int) -> None:
    assert largest(lambda n: n <= 47, guess, 8) == 40
    assert largest(lambda n: n <= 47, guess) == 47
    assert largest(lambda n: n <= 0, guess) == 0


@pytest.mark.slow
def test_baseline_in_its_place_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # An eighth of the layer, and of the budget a 64th, with every ratio as it was.
    monkeypatch.setattr(sequence_parallel, "_QUARTER", 8)
    claim, context = SequenceParallel(), ExperimentContext(work_dir=tmp_path)
    samples = claim.run(context, quick=True)
    baseline = claim.run(context, quick=True, as_baseline=True)
    verdict = judge(claim.metrics, samples, aa=baseline, quick=True)
    assert verdict.status == "works", verdict.reason
    for name in ("batch_ratio_8", "batch_ratio_64", "length_ratio"):
        assert baseline.metrics[name].method == baseline.metrics[name].baseline
    assert min(baseline.metrics["memory_rules"].method) == 0
    assert max(baseline.metrics["model_error"].method) > 0.05


def test_a_budget_beyond_what_is_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"claim\.sequence_parallel\.device_gib.*2 to 32"):
        SequenceParallel(device_gib=80.0)
