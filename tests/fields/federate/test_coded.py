"""Gradient coding: all straggler patterns of a model decode in time, and some beyond it do not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_home import own_home

pytest.importorskip("sklearn")
pytest.importorskip("safetensors")

from shoal.app.cli import app
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice, table
from shoal.fields.federate.coded.codes import GradientCode
from shoal.fields.federate.coded.execute import coded_server
from shoal.fields.federate.coded.job import CodedJob
from shoal.fields.federate.coded.planning import examples_of, plan_coded
from shoal.fields.federate.coded.protocols import CodedError, Coding, check_models, rounds_of
from shoal.fields.federate.coded.times import loads_of, read_times, slow_factors
from shoal.machine import load

Pattern = Sequence[frozenset[int]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def started(scheme: Any, workers: int, jobs: int) -> Coding:
    coding: Coding = table("coded_scheme").build(scheme).start(workers, jobs)
    return coding


def bursty(pattern: Pattern, burst: int, window: int, most: int) -> bool:
    """Whether a pattern is of the model, by its definition."""
    for at in range(len(pattern)):
        some = pattern[at : at + window]
        if len(frozenset().union(*some)) > most:
            return False
        for worker in frozenset().union(*some):
            slow = [index for index, one in enumerate(some) if worker in one]
            if slow[-1] - slow[0] + 1 > burst:
                return False
    return True


def patterns(workers: int, rounds: int, burst: int, window: int, most: int) -> Iterator[Pattern]:
    """All patterns of the model, grown round by round."""
    sets = [
        frozenset(some)
        for size in range(most + 1)
        for some in itertools.combinations(range(workers), size)
    ]

    def grow(before: list[frozenset[int]]) -> Iterator[Pattern]:
        if len(before) == rounds:
            yield before
            return
        for one in sets:
            if bursty([*before, one][-window:], burst, window, most):
                yield from grow([*before, one])

    return grow([])


def decoded(coding: Coding, workers: int, pattern: Pattern, jobs: int) -> list[float]:
    """Relative error of each job's gradient at its deadline; infinite if it cannot be decoded."""
    draw = np.random.default_rng(0)
    gradients = draw.normal(size=(jobs + 1, len(coding.chunks), 3))
    results: dict[tuple[int, int, int], np.ndarray] = {}
    errors = []
    for number in rounds_of(coding, jobs):
        arrived = frozenset(range(workers)) - pattern[number - 1]
        for worker in arrived:
            for task in coding.tasks(number, worker):
                chunks, weights = zip(*task.parts, strict=True)
                value = np.array(weights) @ gradients[task.job, list(chunks)]
                results[number, worker, task.job] = value
        coding.close(number, arrived)
        job = number - coding.delay
        if job < 1:
            continue
        found = coding.decode(job)
        if found is None:
            errors.append(np.inf)
            continue
        total = sum(one.weight * results[one.round, one.worker, job] for one in found)
        whole = gradients[job].sum(0)
        errors.append(float(np.linalg.norm(total - whole) / np.linalg.norm(whole)))
    return errors


SCHEMES = [
    ({"name": "gc", "s": 1}, 4, (1, 1, 1)),
    ({"name": "gc", "s": 2}, 5, (1, 1, 2)),
    ({"name": "gc", "s": 2}, 6, (1, 1, 2)),
    ({"name": "sr_sgc", "B": 1, "W": 2, "lambda_": 2}, 4, (1, 2, 2)),
    ({"name": "sr_sgc", "B": 1, "W": 3, "lambda_": 3}, 5, (1, 3, 3)),
    ({"name": "sr_sgc", "B": 2, "W": 3, "lambda_": 2}, 4, (2, 3, 2)),
    ({"name": "m_sgc", "B": 1, "W": 2, "lambda_": 2}, 4, (1, 2, 2)),
    ({"name": "m_sgc", "B": 1, "W": 3, "lambda_": 1}, 5, (1, 3, 1)),
    ({"name": "m_sgc", "B": 2, "W": 3, "lambda_": 1}, 6, (2, 3, 1)),
    ({"name": "m_sgc", "B": 2, "W": 3, "lambda_": 2}, 4, (2, 3, 2)),
    ({"name": "m_sgc", "B": 1, "W": 2, "lambda_": 4}, 4, (1, 2, 4)),
]


def check_patterns(scheme: Any, workers: int, model: tuple[int, int, int], stride: int) -> int:
    """Every stride-th pattern of the model is decoded in time and never waited for; how many."""
    jobs, count = 2, 0
    rounds = len(rounds_of(started(scheme, workers, jobs), jobs))
    for pattern in itertools.islice(patterns(workers, rounds, *model), 0, None, stride):
        errors = decoded(started(scheme, workers, jobs), workers, pattern, jobs)
        assert max(errors) <= 1e-5, pattern
        assert len(errors) == jobs
        assert fits(started(scheme, workers, jobs), workers, pattern, jobs), pattern
        count += 1
    return count


def fits(coding: Coding, workers: int, pattern: Pattern, jobs: int) -> bool:
    """Whether the server would close all rounds with such stragglers."""
    for number in rounds_of(coding, jobs):
        arrived = frozenset(range(workers)) - pattern[number - 1]
        if not coding.recoverable(number, arrived):
            return False
        coding.close(number, arrived)
    return True


@pytest.mark.parametrize(("scheme", "workers", "model"), SCHEMES, ids=str)
def test_patterns_of_the_model_decode_in_time(
    scheme: Any, workers: int, model: tuple[int, int, int]
) -> None:
    assert check_patterns(scheme, workers, model, 53) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "workers", "model"), SCHEMES, ids=str)
def test_every_pattern_of_the_model_decodes_in_time(
    scheme: Any, workers: int, model: tuple[int, int, int]
) -> None:
    assert check_patterns(scheme, workers, model, 1) > 20


@pytest.mark.parametrize(
    ("scheme", "workers"),
    [
        ({"name": "gc", "s": 1}, 4),
        ({"name": "sr_sgc", "B": 1, "W": 2, "lambda_": 2}, 4),
        ({"name": "m_sgc", "B": 1, "W": 2, "lambda_": 1}, 4),
        ({"name": "m_sgc", "B": 1, "W": 2, "lambda_": 4}, 4),
    ],
    ids=str,
)
def test_the_server_waits_for_exactly_what_cannot_be_decoded_otherwise(
    scheme: Any, workers: int
) -> None:
    """Among all patterns: those that are closed decode; the first that is not, does not."""
    jobs = 2
    sets = [
        frozenset(some)
        for size in range(workers + 1)
        for some in itertools.combinations(range(workers), size)
    ]
    rounds = len(rounds_of(started(scheme, workers, jobs), jobs))
    beyond = 0
    for pattern in itertools.islice(itertools.product(sets, repeat=rounds), 0, None, 7):
        coding = started(scheme, workers, jobs)
        refused = None
        for number in rounds_of(coding, jobs):
            arrived = frozenset(range(workers)) - pattern[number - 1]
            if not coding.recoverable(number, arrived):
                refused = number
                break
            coding.close(number, arrived)
        if refused is None:
            assert max(decoded(started(scheme, workers, jobs), workers, pattern, jobs)) <= 1e-5
            continue
        # From then on nobody is slow, and still a job is lost.
        rest = (*pattern[:refused], *[frozenset[int]()] * (rounds - refused))
        assert max(decoded(started(scheme, workers, jobs), workers, rest, jobs)) == np.inf
        beyond += 1
    assert beyond > 10


def test_loads_are_those_of_the_paper() -> None:
    for workers in (4, 6, 16):
        for s in range(workers):
            name = {"name": "gc", "s": s} if s else "uncoded"
            assert started(name, workers, 3).load == pytest.approx((s + 1) / workers)
        for burst, window, most in itertools.product(
            (1, 2, 3), (2, 3, 4, 5), range(1, workers + 1)
        ):
            if burst >= window:
                continue
            options = {"B": burst, "W": window, "lambda_": most}
            coding = started({"name": "m_sgc", **options}, workers, 3)
            slots = window - 1 + burst
            load = Fraction((most + 1) * slots, workers * (burst + (window - 1) * (most + 1)))
            if most == workers:
                load = Fraction(slots, workers * (window - 1))
            assert coding.load == pytest.approx(float(load))
            assert coding.delay == window - 2 + burst
            assert sum(coding.chunks) == pytest.approx(1)
            if (window - 1) % burst == 0:
                s = -(-burst * most // slots)
                if s < workers:
                    repeated = started({"name": "sr_sgc", **options}, workers, 3)
                    assert repeated.load == pytest.approx((s + 1) / workers)
                    assert repeated.delay == burst


@pytest.mark.parametrize("name", sorted(table("coded_scheme")))
def test_workers_process_what_the_load_says(name: str) -> None:
    """In rounds in which as many jobs are open as can be, tasks weigh what is stated."""
    coding = started(name, 8, 9)
    for number in rounds_of(coding, 9):
        loads = loads_of(coding, number, 8)
        if coding.delay < number <= 9:
            assert loads == pytest.approx(coding.load)
        assert (loads <= coding.load * (1 + 1e-9)).all()
        coding.close(number, frozenset(range(8)))


def test_codes_decode_from_any_workers() -> None:
    for workers, s in ((5, 1), (5, 3), (6, 2), (7, 4), (16, 2), (16, 5)):
        code = GradientCode(workers, s)
        assert ((code.matrix != 0).sum(1) == s + 1).all()
        draw = np.random.default_rng(workers)
        for _ in range(30):
            some = sorted(draw.choice(workers, workers - s, replace=False).tolist())
            weights = code.decode(some)
            assert np.abs(weights @ code.matrix[some] - 1).max() < 1e-8


def test_the_picker_follows_the_log(tmp_path: Path) -> None:
    def best(rows: list[dict[str, float]], **options: Any) -> list[str]:
        path = tmp_path / "log.json"
        path.write_text(json.dumps(rows))
        job = CodedJob(
            data=Choice(name="wine"), learner=Choice(name="logistic"), workers=8, models=4,
            gradients=15, most=3, log=str(path), **options,
        )  # fmt: skip
        return [str(plan.job.scheme) for plan in plan_coded(job, load("laptop"))]

    def rows(factors: np.ndarray) -> list[dict[str, float]]:
        return [
            {"round": at, "worker": worker, "seconds": 0.02 + factor, "load": 0.125}
            for at, row in enumerate(factors)
            for worker, factor in enumerate(row)
        ]

    assert best(rows(np.ones((30, 8))))[0] == "uncoded"
    bursts = slow_factors(8, 30, chance=0.08, recovery=0.9, factor=20, seed=0)
    found = best(rows(bursts))
    assert found[0].startswith("m_sgc")
    assert found.index("uncoded") == len(found) - 1
    always = np.ones((30, 8))
    always[:, 3] = 50.0  # not a burst: only a code without delay helps
    assert best(rows(always))[0].startswith("gc(s=1") or best(rows(always))[0] == "gc"


def test_a_log_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    row = {"round": 0, "worker": 0, "seconds": 1.0, "load": 0.5}
    for text, match in (
        ("{", "cannot be read"),
        ("[]", "no rows"),
        (json.dumps([{**row, "seconds": 0.0}]), "not above 0"),
        (json.dumps([{**row, "worker": -1}]), "no rows"),
        ("[1]", "cannot be read"),
        (json.dumps([{**row, "load": 0.0}]), "above 0"),
        (json.dumps([{**row, "worker": 5}]), "no time of worker 0"),
        (json.dumps([row]), "no time of worker 1 in round 0"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            read_times(str(path), 2, 0.0)
    with pytest.raises(DataError, match="cannot be read"):
        read_times(str(tmp_path / "none.parquet"), 2, 0.0)


def test_logs_are_read_from_parquet_too(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"round": 7, "worker": one, "seconds": 1.5, "load": 0.5} for one in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    times = read_times(str(tmp_path / "log.parquet"), 2, 0.5)
    assert times.at(1, np.array([0.5, 1.0])) == pytest.approx([1.5, 2.5])


def test_the_fixed_part_of_times_is_fitted_and_cut_rounds_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"round": at + 10 * number, "worker": worker, "seconds": 0.25 + load * 2, "load": load}
        for number, load in enumerate((0.25, 0.5))
        for at in range(3)
        for worker in range(2)
    ]
    rows[-1] |= {"seconds": 0.3, "whole": False}
    (tmp_path / "log.json").write_text(json.dumps(rows))
    times = read_times(str(tmp_path / "log.json"), 2, 0.0)
    assert times.fixed_s == pytest.approx(0.25)
    assert times.whole_s == pytest.approx(np.full((5, 2), 2.0))


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ({"name": "sr_sgc", "B": 2, "W": 4}, "does not divide"),
        ({"name": "sr_sgc", "lambda_": 5}, "smaller lambda_"),
        ({"name": "m_sgc", "lambda_": 5}, "lambda_ = 5 of 4"),
        ({"name": "m_sgc", "B": 2, "W": 2}, "is shorter"),
        ({"name": "gc", "s": 4}, "at least one"),
    ],
)
def test_options_that_do_not_fit_are_refused(scheme: Any, match: str) -> None:
    with pytest.raises(CodedError, match=match):
        started(scheme, 4, 3)
    with pytest.raises(ConfigError):
        started({"name": "gc", "s": 0}, 4, 3)
    with pytest.raises(CodedError, match="at least 3"):
        check_models(2, 2)
    job = CodedJob(
        data=Choice(name="wine"), learner=Choice(name="logistic"), models=2, gradients=5,
        scheme=Choice(name="m_sgc", options={"B": 1, "W": 3}),
    )  # fmt: skip
    with pytest.raises(CodedError, match="models = 2"):
        plan_coded(job, load("laptop"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    ["uncoded", {"name": "gc", "s": 1}, {"name": "sr_sgc"}, {"name": "m_sgc", "W": 3}],
    ids=str,
)
def test_processes_train_as_one_would(scheme: Any) -> None:
    """With slow workers in bursts, every gradient is that of all the data."""
    pytest.importorskip("torch")
    job = CodedJob(
        data=Choice(name="wine"), learner=Choice(name="logistic"), workers=4, models=3, gradients=9,
        data_s=0.1, slow_chance=0.2, slow_factor=8.0,
    )  # fmt: skip
    data, _ = examples_of(job)
    errors = []

    def after(_: int, model: np.ndarray, gradient: np.ndarray) -> None:
        whole, _ = oracle.gradient(model, data)
        errors.append(float(np.linalg.norm(gradient - whole) / np.linalg.norm(whole)))

    with coded_server(job, data) as server:
        oracle: Any = server.learning
        models, times, coding = server.train(Choice.model_validate(scheme), after=after)
    assert len(errors) == 9
    assert max(errors) <= 1e-5
    assert len(times.seconds) == 9 + coding.delay
    start = [oracle.start(at) for at in range(3)]
    for one in range(1, 10):
        start[one % 3] = start[one % 3] - np.float32(0.1) * oracle.gradient(start[one % 3], data)[0]
    for model, alone in zip(models, start, strict=True):
        assert model == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
def test_a_run_is_scored_and_its_log_picks_a_scheme(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ["wine", "--learner", "logistic", "--workers", "3", "-m", "laptop"]
    place = str(tmp_path / "run")
    run = ["run", "coded_training", *words, "--gradients", "8", "--dir", place]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "run" / "worker_times.json").read_text())
    assert {row["worker"] for row in rows} == {0, 1, 2}
    log = tmp_path / "log.json"
    log.write_text(json.dumps(rows))
    planned = CliRunner().invoke(app, ["plan", "coded_training", *words, "--log", str(log)])
    assert planned.exit_code == 0, planned.output
