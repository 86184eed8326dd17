"""The frame of a claim: samples collected, arms swapped and timed in turn, ranks that race."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.claims import frame
from shoal.claims.frame import ClaimRun, paired, wire_bytes
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import in_turn, on_ranks, slowest
from shoal.core.errors import ConfigError
from shoal.ir import TrainJob


def run_of(tmp_path: Path, **options: bool) -> ClaimRun:
    return ClaimRun(ExperimentContext(work_dir=tmp_path), **options)


def test_samples_may_be_one_number_or_any_row_of_numbers() -> None:
    assert paired(True).method == (1.0,)
    assert paired((n for n in (1, 2)), [3, 4]).baseline == (3.0, 4.0)
    with pytest.raises(ConfigError, match="none; give at least one"):
        paired([])
    with pytest.raises(ConfigError, match="equally many"):
        paired([1.0, 2.0], 1.0)


def test_everything_collected_is_in_the_samples(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.put("a", 2, 4, bound=8.0)
    run.put_peer("a", [2.0], [4.0])
    assert run.lacks("no GPU", "b", "c") and not run.lacks(None, "a")
    run.details |= {"by_size": {1: (2, 3)}}
    run.profile = "all of it"
    samples = run.samples()
    assert samples.metrics["a"] == paired(2.0, 4.0)
    assert samples.bounds == {"a": 8.0}
    assert samples.peers["a"] == paired(0.5, 0.25)
    assert samples.skipped == {"b": "no GPU", "c": "no GPU"}
    assert samples.details == {"by_size": {"1": [2, 3]}}
    assert samples.profile == "all of it"
    run.details["bad"] = object()
    with pytest.raises(TypeError, match="object"):
        run.samples()


def test_the_aa_run_has_the_baseline_in_the_place_of_the_method(tmp_path: Path) -> None:
    arms = {"method": 1, "baseline": 2, "other": 3}
    run, again = run_of(tmp_path), run_of(tmp_path, as_baseline=True)
    assert run.arms(arms) == arms
    assert again.arms(arms) == {"method": 2, "baseline": 2, "other": 3}
    assert again.arms(arms, {"other": "method"}) == {"method": 1, "baseline": 2, "other": 1}
    assert (run.pick("ours", "theirs"), again.pick("ours", "theirs")) == ("ours", "theirs")
    with pytest.raises(KeyError, match="nobody"):
        again.arms(arms, {"other": "nobody"})


def test_an_arm_that_is_its_own_baseline_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        pass

    with pytest.raises(ConfigError, match="a and b are one and the same arm"):
        run_of(tmp_path).race({"a": work, "b": work}, 1, swaps={"a": "b"})


def test_each_baseline_stands_in_the_place_of_the_method_in_its_own_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_turn(arms: Any, rounds: int, **_: Any) -> Any:
        return SimpleNamespace(seconds={name: (arm(),) * rounds for name, arm in arms.items()})

    monkeypatch.setattr(frame, "interleave", in_turn)
    arms = {"ours": lambda: 1.0, "slow": lambda: 3.0, "slower": lambda: 5.0}
    pairs = {"over_slow": ("ours", "slow"), "over_slower": ("ours", "slower")}
    run, again = run_of(tmp_path), run_of(tmp_path, as_baseline=True)
    assert run.versus(arms, pairs, 5).keys() == arms.keys()
    assert run.metrics["over_slow"] == paired([1.0] * 5, [3.0] * 5)
    assert run.metrics["over_slower"] == paired([1.0] * 5, [5.0] * 5)
    assert len(again.versus(arms, pairs, 5)) == 5
    assert again.metrics["over_slow"] == paired([3.0] * 5, [3.0] * 5)
    assert again.metrics["over_slower"] == paired([5.0] * 5, [5.0] * 5)


def test_arms_race_in_turn_with_their_threads(tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    calls: list[tuple[str, int]] = []
    arms = {name: lambda name=name: calls.append((name, torch.get_num_threads())) for name in "ab"}
    run = run_of(tmp_path, as_baseline=True)
    seconds = run.race(arms, 4, swaps={"a": "b"}, warmup=1, threads=1)
    assert {name: len(each) for name, each in seconds.items()} == {"a": 4, "b": 4}
    assert calls == [("b", 1)] * 10
    assert torch.get_num_threads() == before


def test_arms_that_measure_themselves_take_turns_too(tmp_path: Path) -> None:
    calls: list[str] = []
    arms = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    said = run_of(tmp_path).turns(arms, 3, warmup=1)
    assert "".join(calls) == "abbaabba"
    assert said == {"a": [4, 5, 8], "b": [3, 6, 7]}


def test_bytes_on_the_wire_are_those_whose_counters_have_every_word() -> None:
    totals = {
        "wire_bytes{op=send,scope=node,tag=a}": 3.0,
        "wire_bytes{op=send,scope=loopback,tag=a}": 5.0,
        "seconds{scope=node}": 7.0,
    }
    assert wire_bytes(totals) == 8.0
    assert wire_bytes(totals, "scope=node", "tag=a") == 3.0


@pytest.mark.parametrize("seed", [None, 0])
def test_ranks_time_arms_in_an_order_that_changes_and_agree_about_it(seed: int | None) -> None:
    orders: list[list[str]] = [[], []]

    def rank(comm):
        def ready(name: str) -> None:
            orders[comm.rank].append(name)

        arms = {name: lambda: None for name in "abc"}
        return in_turn(comm, arms, 5, warmup=2, ready=ready, seed=seed)

    ranks = run_ranks(2, rank)
    assert orders[0] == orders[1]
    rounds = ["".join(orders[0][at : at + 3]) for at in range(0, 21, 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 1
    if seed is None:
        assert rounds == ["cba", "abc", "cba", "abc", "cba", "abc", "cba"]
    assert all(len(times) == 5 for one in ranks for times in one.values())


def test_the_slowest_rank_of_each_round_counts() -> None:
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}], "a") == (2.0, 5.0)
    with pytest.raises(ValueError, match="shorter"):
        slowest([{"a": [1.0, 5.0]}, {"a": [2.0]}], "a")


def named(comm, job, sizes, by_name):
    """What a rank was given: on real processes."""
    return [comm.rank, type(job).__name__, job.seq_len, sizes, type(by_name["x"]).__name__]


@pytest.mark.slow
@pytest.mark.multi
def test_ranks_get_values_as_values() -> None:
    job = TrainJob(model="shoal-0.3m", seq_len=24, global_batch=2)
    ranks = on_ranks(f"{__file__}:named", 2, job=job, sizes=[1, 2], by_name={"x": job})
    assert ranks == [[rank, "TrainJob", 24, [1, 2], "TrainJob"] for rank in (0, 1)]
    with pytest.raises(ConfigError, match=r"processes\.arguments.*set is neither"):
        on_ranks(f"{__file__}:named", 2, job={1, 2}, sizes=[], by_name={})


def test_answers_that_all_repeat_themselves_are_refused() -> None:
    from shoal.claims.experiments.decoding import seconds_per_token
    from shoal.core.errors import ConfigError

    with pytest.raises(ConfigError, match="every answer repeats itself"):
        seconds_per_token([[]], [[]])
