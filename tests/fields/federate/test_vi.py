"""Variational inequalities: methods against their oracles, bytes on sockets, what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_home import own_home

pytest.importorskip("safetensors")

from shoal.app.cli import app
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.vi import solve
from shoal.fields.federate.vi.job import SolveViJob
from shoal.fields.federate.vi.kind import SolveViKind
from shoal.fields.federate.vi.problems.quadratic import QuadraticOperator, QuadraticSaddle
from shoal.fields.federate.vi.problems.regression import RobustRegression
from shoal.fields.federate.vi.protocols import SERVER, ViError
from shoal.fields.federate.vi.setting import built, described_as
from shoal.fields.federate.vi.solving import solve_over_sockets
from shoal.fields.federate.wire.messages import unpack
from shoal.fields.federate.wire.star import Star, frame
from shoal.machine import load

PROBLEM = {"name": "quadratic_saddle", "dimension": 10, "condition": 5}
RAND = {"name": "rand_k", "share": 0.3}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def oracle(operator: QuadraticOperator, step: float, iterations: int) -> np.ndarray:
    """Extragradient as in a textbook, of the mean operator, in float64."""
    workers = range(operator.workers)

    def mean(z: np.ndarray) -> np.ndarray:
        return np.mean([operator.value(worker, z, None) for worker in workers], axis=0)

    z = operator.start()
    for _ in range(iterations):
        z = z - step * mean(z - step * mean(z))
    return z


@pytest.mark.parametrize(
    "method",
    ["extragradient", {"name": "masha1", "refresh": 1.0}, {"name": "masha2", "refresh": 1.0}],
)
def test_without_compression_every_method_is_extragradient(method: Any) -> None:
    options = {"workers": 3, "compressor": "identity", "step": 0.3, "tolerance": 1e-30}
    found = solve(PROBLEM, method=method, iterations=40, **options)
    expected = oracle(QuadraticSaddle(dimension=10, condition=5).build(3, 0), 0.3, 40)
    # Numbers travel as float32.
    assert np.linalg.norm(found.point - expected) <= 1e-5 * np.linalg.norm(expected)
    assert found.iterations == 40


@pytest.mark.parametrize(
    ("method", "compressor", "options"),
    [
        ("masha1", RAND, {}),
        ("masha1", "natural", {"server_compressor": "natural"}),
        ({"name": "masha1", "participants": 2}, RAND, {}),
        ("masha2", {"name": "top_k", "share": 0.3}, {}),
        pytest.param(
            "masha2",
            {"name": "power_sgd", "rank": 1},
            {"server_compressor": "top_k"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_solutions_are_those_of_a_linear_solver(
    method: Any, compressor: Any, options: dict[str, Any]
) -> None:
    found = solve(
        PROBLEM, method=method, compressor=compressor, workers=3, tolerance=1e-6, iterations=20000,
        **options,
    )  # fmt: skip
    operator = QuadraticSaddle(dimension=10, condition=5).build(3, 0)
    assert found.reached
    assert np.linalg.norm(found.point - operator.solution) <= 1.1e-3 * np.linalg.norm(
        operator.solution
    )
    residual = np.mean([operator.value(one, found.point, None) for one in range(3)], axis=0)
    assert np.linalg.norm(residual) < 1e-2


def test_compression_without_a_reference_stalls() -> None:
    options: dict[str, Any] = {"workers": 2, "compressor": RAND, "step": 0.1, "iterations": 1500}
    plain = solve(PROBLEM, method="compressed_extragradient", **options)
    assert plain.error is not None
    assert plain.error > 1e-3
    assert solve(PROBLEM, method="masha1", **options).reached


def test_samples_of_the_operator_are_unbiased_and_solve_it_roughly() -> None:
    operator = QuadraticSaddle(dimension=10, condition=5).build(2, 0)
    z = np.arange(10.0)
    draw = np.random.default_rng(0)
    values = np.stack([operator.value(1, z, draw) for _ in range(4000)])
    error = values.std(0) / np.sqrt(4000)
    assert (np.abs(values.mean(0) - operator.value(1, z, None)) <= 4 * error).all()
    method = {"name": "masha1", "stochastic": True}
    found = solve(PROBLEM, method=method, compressor=RAND, workers=2, step=0.05, iterations=6000)
    assert found.reached


def test_a_constraint_holds_and_the_residual_vanishes() -> None:
    found = solve(
        "robust_regression", method="masha1", compressor=RAND, workers=3, step=0.05, tolerance=1e-7
    )
    operator = RobustRegression().build(3, 0)
    assert found.reached
    w, r = np.split(found.point, 2)
    assert np.linalg.norm(r) == pytest.approx(0.1)  # the adversary uses all it has
    # In a ball, the maximum of the perturbation is along its gradient.
    mean = np.mean([operator.value(one, found.point, None) for one in range(3)], axis=0)
    up = -mean[20:]
    assert up @ r == pytest.approx(np.linalg.norm(up) * np.linalg.norm(r), rel=1e-2)
    assert np.linalg.norm(mean[:20]) < 1e-2
    assert np.linalg.norm(w) > 0.1


@pytest.mark.slow
def test_bytes_on_the_sockets_are_bits_and_framing() -> None:
    described = described_as(PROBLEM, "masha1", 2, RAND, "natural", 3)
    setting = built(described)
    here = solve(
        PROBLEM, method="masha1", workers=2, compressor=RAND, server_compressor="natural", seed=3,
        iterations=50, tolerance=1e-12,
    )  # fmt: skip
    found = solve_over_sockets(described, [0.0, 0.0], iterations=50, tolerance=1e-12)
    assert (found.point == here.point).all()
    assert found.traffic.up_floats == here.traffic.up_floats
    exact = table("update_compressor").build("identity")
    place, refreshes = setting.place(SERVER, 0.1), 0
    for at in range(49):  # the run ends before a refresh after its last iteration
        place.iterations = at
        refreshes += place.coin(0.3)

    def framing(compressor: Any) -> int:
        tensors = compressor.encode(np.ones(10), 0)
        return len(frame(tensors, {})) - sum(one.nbytes for one in tensors.values())

    def on_wire(compressor: Any) -> int:
        return -(-compressor.bits(10) // 8) + framing(compressor)

    whole, up, down = (on_wire(one) for one in (exact, setting.up, setting.down))
    counted = found.traffic
    assert counted.up_bytes == 2 * ((1 + refreshes) * whole + 50 * up)
    assert counted.down_bytes == 2 * ((1 + refreshes) * whole + 50 * down)
    assert counted.up_payload == 2 * ((1 + refreshes) * 40 + 50 * 12)


@pytest.mark.slow
def test_a_worker_that_ends_ends_the_run() -> None:
    described = described_as(PROBLEM, "masha1", 2, RAND, "identity", 0)
    broken = {**described, "problem": {"name": "quadratic_saddle", "options": {"dimension": "x"}}}
    settings = [{**broken, "step": 0.1, "bytes_per_s": 0.0}]
    ended = pytest.raises(FederationError, match=r"worker 0 has ended: .*dimension")
    with ended, Star("shoal.fields.federate.vi.worker", settings, 1000) as star:
        star.receive(30.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "masha1", "compressor": "top_k"}, "biased.*masha2"),
        ({"method": "masha1", "server_compressor": "top_k"}, "server_compressor.*biased"),
        ({"method": "masha2", "compressor": "rand_k"}, "no contraction.*masha1"),
        ({"method": {"name": "masha1", "participants": 9}}, "9 of 4 workers"),
        ({"workers": 0}, "workers = 0"),
        ({"method": "extragradient", "step": 5.0, "iterations": 2000}, "diverged.*bound"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ViError, match=match):
            solve(PROBLEM, **options)


def test_a_constraint_is_refused_by_masha2_and_a_missing_step_by_all() -> None:
    with pytest.raises(ViError, match="constraint; take masha1"):
        solve("robust_regression", method="masha2", compressor="top_k", step=0.1)
    with pytest.raises(ViError, match="give a step"):
        solve("robust_regression", method="masha1")


def test_a_step_above_the_bound_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="is above"):
        solve(PROBLEM, method="extragradient", step=1.2, iterations=1)


def test_an_operator_of_ones_own() -> None:
    matrices = np.array([[[1.0, 2.0], [-2.0, 1.0]], [[1.0, 1.0], [-1.0, 1.0]]])
    operator = QuadraticOperator(matrices, np.array([[1.0, 0.0], [0.0, 1.0]]))
    found = solve(operator, method="masha1", compressor="natural")
    expected = np.linalg.solve(matrices.mean(0), [-0.5, -0.5])
    assert found.point == pytest.approx(expected, abs=2e-3)
    with pytest.raises(ViError, match="cannot be sent"):
        solve(operator, processes=True)


def test_plans_offer_what_fits() -> None:
    def methods(**options: Any) -> list[str]:
        job = SolveViJob.model_validate({"problem": PROBLEM, **options})
        return [plan.job.method.name for plan in SolveViKind().plan(job, load("laptop"))]  # type: ignore[union-attr]

    assert set(methods(compressor="rand_k")) == {"extragradient", "masha1"}
    assert set(methods(compressor="top_k")) == {"extragradient", "masha2"}
    assert methods(compressor=RAND)[0] == "extragradient"
    # With one step for all, on slow links, fewer bits win.
    problem = {"name": "quadratic_saddle", "condition": 20}
    slow = {"clients": "4@1Mbit", "step": 0.01, "problem": problem, "tolerance": 0.1}
    assert methods(**slow)[0] == "masha1"
    assert methods(compressor="top_k", **slow)[0] == "masha2"
    # What does not get there comes last.
    assert methods(**slow, iterations=3000)[0] == "extragradient"
    with pytest.raises(ConfigError, match="clients"):
        SolveViJob.model_validate({"clients": "0"})


@pytest.mark.slow
def test_a_run_writes_its_solution_and_is_scored(tmp_path: Path) -> None:
    words = ["run", "solve_vi", "quadratic_saddle", "--clients", "2", "--compressor", "natural",
             "--set", "problem={name: quadratic_saddle, dimension: 10, condition: 5}",
             "--method", "masha1", "-m", "laptop", "--dir", str(tmp_path / "run")]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    tensors, _ = unpack((tmp_path / "run" / "solution.safetensors").read_bytes())
    operator = QuadraticSaddle(dimension=10, condition=5).build(2, 0)
    assert operator.error(tensors["z"]) <= 1e-6


@pytest.mark.slow
def test_gradients_of_the_language_model_are_those_of_its_loss() -> None:
    pytest.importorskip("torch")
    problem = {"name": "adversarial_lm", "characters": 2000, "context": 8, "width": 8, "batch": 4}
    operator: Any = built(described_as(problem, "masha1", 2, "natural", "identity", 0)).operator
    z = operator.start()
    z[-8 * 8 :] = 0.01
    gradient = operator.value(0, z, None)
    windows = operator._texts[0][0]

    def loss(at: np.ndarray) -> float:
        return float(operator._gradient(at, windows)[0])

    for way in (np.random.default_rng(1).normal(size=operator.size),):
        weights, attack = way.copy(), way.copy()
        weights[-64:], attack[:-64] = 0, 0
        for direction, sign in ((weights, 1), (attack, -1)):
            slope = (loss(z + 1e-3 * direction) - loss(z - 1e-3 * direction)) / 2e-3
            assert slope == pytest.approx(sign * gradient @ direction, rel=2e-2, abs=2e-3)
    options: Any = {"method": "masha1", "compressor": "natural", "workers": 2, "step": 0.1}
    found = solve(problem, iterations=30, **options)
    assert np.linalg.norm(found.point[-64:]) <= 1 + 1e-6
    assert found.judged["robust_loss"] >= found.judged["clean_loss"]
    assert found.judged["clean_loss"] < operator.judge(operator.start())["clean_loss"]
