"""Diffusion experts: the mixture is exact, one expert is a monolith, islands are alone."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.core.parts import table
from shoal.fields.federate.ddm import sample
from shoal.fields.federate.ddm.distill import distill
from shoal.fields.federate.ddm.ensemble import Ensemble, load_ensemble, read_network
from shoal.fields.federate.ddm.execute import execute, scaled
from shoal.fields.federate.ddm.experts import DiffusionExperts
from shoal.fields.federate.ddm.islands import train_islands
from shoal.fields.federate.ddm.job import TrainExpertsJob
from shoal.fields.federate.ddm.partition import balanced_clusters
from shoal.fields.federate.ddm.planning import examples_of, plan_experts, whole_task
from shoal.fields.federate.ddm.protocols import FlowData, FlowRun, FlowShape, NetworkTask
from shoal.fields.federate.ddm.quality import ClassifierFeatures, frechet
from shoal.fields.federate.ddm.training import (
    NetworkTraining,
    build_network,
    read_tensors,
    train_to_the_end,
    write_tensors,
)
from shoal.fields.federate.protocols import FederationError
from shoal.machine import load
from shoal.model.flow import PATHS


class Mixture:
    """Samples of K isotropic normal distributions, of which everything is known."""

    def __init__(self, k: int = 4, dim: int = 2, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.means = torch.from_numpy(draw.normal(0, 2, (k, dim)))
        self.spread = torch.from_numpy(draw.uniform(0.2, 0.8, k))
        self.share = torch.from_numpy(draw.dirichlet(np.full(k, 3.0)))

    def _noisy(self, t: torch.Tensor, path: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = PATHS[path].sample(t)[:, None], PATHS[path].noise(t)[:, None]
        return a, a**2 * self.spread**2 + b**2

    def log_joint(self, x: torch.Tensor, t: torch.Tensor, path: str) -> torch.Tensor:
        """log of share and density of each noisy cluster, [N, K]."""
        a, variance = self._noisy(t, path)
        distance = ((x[:, None] - a[..., None] * self.means) ** 2).sum(-1)
        dim = self.means.shape[1]
        return self.share.log() - distance / (2 * variance) - dim / 2 * variance.log()

    def velocity(self, k: int, path: str) -> Any:
        """Of one cluster, from the conditional means of its sample and noise."""

        def expert(x: torch.Tensor, t: torch.Tensor, labels: object) -> torch.Tensor:
            a, variance = self._noisy(t, path)
            variance = variance[:, k, None]
            b = PATHS[path].noise(t)[:, None]
            away = x - a * self.means[k]
            mean_x = self.means[k] + a * self.spread[k] ** 2 / variance * away
            mean_noise = b / variance * away
            at = t[:, None]
            return PATHS[path].sample_rate(at) * mean_x + PATHS[path].noise_rate(at) * mean_noise

        return expert

    def exact(self, x: torch.Tensor, t: torch.Tensor, path: str) -> torch.Tensor:
        """Of all clusters, from the gradient of the log-density of all: no posterior is used."""
        x = x.clone().requires_grad_()
        (score,) = torch.autograd.grad(self.log_joint(x, t, path).logsumexp(-1).sum(), x)
        at = t[:, None]
        a, b = PATHS[path].sample(at), PATHS[path].noise(at)
        noise = -b * score
        mean_x = (x.detach() - b * noise) / a
        return PATHS[path].sample_rate(at) * mean_x + PATHS[path].noise_rate(at) * noise

    def draw(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        k = random.choice(len(self.share), n, p=self.share.numpy())
        noise = random.standard_normal((n, self.means.shape[1]))
        x = self.means.numpy()[k] + self.spread.numpy()[k, None] * noise
        return x.astype(np.float32), k


def places(n: int, dim: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(1)
    return torch.from_numpy(draw.normal(0, 2, (n, dim))), torch.from_numpy(
        draw.uniform(0.01, 0.99, n)
    )


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_ensemble_is_the_global_velocity(path: str) -> None:
    known = Mixture()
    ensemble = Ensemble(
        [known.velocity(k, path) for k in range(4)],
        lambda x, t, labels: known.log_joint(x, t, path),
        features=2,
    )
    x, t = places(500)
    found = ensemble.velocity(x, t, mode="full")
    torch.testing.assert_close(found, known.exact(x, t, path), rtol=1e-5, atol=1e-5)
    # The likeliest expert alone, or all of them with equal weights, are something else.
    for other in ("top1", {"name": "topm", "m": 2}):
        assert (ensemble.velocity(x, t, mode=other) - found).abs().max() > 1e-2
    everything = ensemble.velocity(x, t, mode={"name": "topm", "m": 9})
    torch.testing.assert_close(everything, found)


def test_a_drawn_expert_is_right_in_expectation() -> None:
    p = torch.tensor([[0.1, 0.6, 0.0, 0.3]]).repeat(20_000, 1)
    weights = table("expert_mixture").build("sample").weights(p, np.random.default_rng(0))
    assert (weights.sum(-1) == 1).all()
    assert weights.mean(0).tolist() == pytest.approx([0.1, 0.6, 0.0, 0.3], abs=0.02)
    assert weights[:, 2].sum() == 0


def test_a_certain_router_is_top1() -> None:
    known = Mixture()

    def certain(x: torch.Tensor, t: torch.Tensor, labels: object) -> torch.Tensor:
        joint = known.log_joint(x, t, "linear")
        return torch.where(joint == joint.max(-1, keepdim=True).values, 0.0, -math.inf)

    ensemble = Ensemble([known.velocity(k, "linear") for k in range(4)], certain, features=2)
    x, t = places(300)
    best = ensemble.velocity(x, t, mode="top1")
    for mode in ("full", "sample", {"name": "topm", "m": 3}):
        assert torch.equal(ensemble.velocity(x, t, mode=mode), best)


def test_guidance_acts_on_the_mixed_velocity() -> None:
    def expert(k: int) -> Any:
        return lambda x, t, labels: x * 0 + (k if labels is None else 10.0 + k)

    def router(x: torch.Tensor, t: torch.Tensor, labels: object) -> torch.Tensor:
        # With labels the second expert is likelier.
        return torch.log(torch.tensor([[0.5, 0.5]] if labels is None else [[0.2, 0.8]])).repeat(
            len(x), 1
        )

    ensemble = Ensemble([expert(0), expert(1)], router, features=1, classes=3)
    x, t, labels = torch.zeros(4, 1), torch.full((4,), 0.5), torch.zeros(4, dtype=torch.int64)
    guided = ensemble.velocity(x, t, labels=labels, guidance=3.0)
    assert guided[0, 0].item() == pytest.approx(0.5 + 3 * (10.8 - 0.5))


def task_of(**changes: Any) -> NetworkTask:
    shape = FlowShape(features=2, outputs=2, width=16, depth=1)
    values: dict[str, Any] = {
        "role": "expert", "experts": 1, "shape": shape, "path": "linear", "steps": 30,
        "batch": 32, "lr": 1e-3, "ema": 0.99, "seed": 3,
    }  # fmt: skip
    return NetworkTask(**{**values, **changes})


def test_the_shape_counts_parameters() -> None:
    for classes in (0, 7):
        shape = FlowShape(
            features=5, outputs=5, width=8, depth=2, classes=classes, residual=bool(classes)
        )
        network = build_network(shape)
        assert sum(one.numel() for one in network.parameters()) == shape.parameters


@pytest.mark.slow
def test_a_router_is_calibrated() -> None:
    """Its cross-entropy on fresh noisy samples is near that of the true posterior."""
    known = Mixture(seed=4)
    x, k = known.draw(20_000, 0)
    shape = FlowShape(features=2, outputs=4, width=48, depth=2)
    task = task_of(role="router", experts=4, shape=shape, steps=1500, batch=256, lr=2e-3)
    training = NetworkTraining(task, FlowData(x=x, y=k, classes=4, cluster=k))
    for _ in range(task.steps):
        training.advance(training.loss())
    training.weights.copy_(training.ema)
    fresh, labels = known.draw(20_000, 1)
    draw = np.random.default_rng(2)
    t = torch.from_numpy(draw.random(len(fresh), np.float32))
    noise = torch.from_numpy(draw.standard_normal(fresh.shape, np.float32))
    place, _ = PATHS["linear"].between(torch.from_numpy(fresh), noise, t)
    target = torch.from_numpy(labels)
    with torch.no_grad():
        found = torch.nn.functional.cross_entropy(training.network(place, t), target)
    joint = known.log_joint(place.double(), t.double(), "linear")
    best = torch.nn.functional.cross_entropy(joint, target)
    assert 0.1 < best < found + 1e-3
    assert found < best + 0.03


def test_a_stopped_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    data = FlowData(x=x, y=np.zeros(200, np.int64), classes=1)
    straight, stopped = tmp_path / "a", tmp_path / "b"
    for place in (straight, stopped):
        place.mkdir()
    train_to_the_end(straight, NetworkTraining(task_of(), data), lambda step, loss: None)
    half = NetworkTraining(task_of(), data)
    for _ in range(13):
        half.advance(half.loss())
    words = {"task": task_of().model_dump(mode="json")}
    write_tensors(stopped / "state.safetensors", half.state(), words)
    train_to_the_end(stopped, NetworkTraining(task_of(), data), lambda step, loss: None)
    file = "model.safetensors"
    assert (straight / file).read_bytes() == (stopped / file).read_bytes()
    assert not (stopped / "state.safetensors").exists()
    write_tensors(stopped / "state.safetensors", half.state(), {"task": {"steps": 1}})
    with pytest.raises(FederationError, match="of another training; remove it"):
        train_to_the_end(stopped, NetworkTraining(task_of(), data), lambda step, loss: None)


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    x = np.full((50, 2), np.nan, np.float32)
    data = FlowData(x=x, y=np.zeros(50, np.int64), classes=1)
    with pytest.raises(FederationError, match="islands/0: the loss is nan at step 1; lower lr"):
        train_to_the_end(tmp_path, NetworkTraining(task_of(), data), lambda step, loss: None)


# Clusters


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_clusters_are_balanced_and_near(k: int) -> None:
    draw = np.random.default_rng(0)
    # One blob has more than half of all.
    middles = draw.normal(0, 3, (6, 10))
    which = draw.choice(6, 1200, p=[0.55, 0.15, 0.1, 0.1, 0.05, 0.05])
    x = (middles[which] + draw.normal(0, 1, (1200, 10))).astype(np.float32)
    labels = balanced_clusters(x, k, fine=64, tolerance=0.2, seed=1)
    sizes = np.bincount(labels, minlength=k)
    assert sizes.min() > 0
    assert sizes.max() <= 1.25 * 1200 / k
    assert np.array_equal(labels, balanced_clusters(x, k, fine=64, tolerance=0.2, seed=1))

    def inertia(of: np.ndarray) -> float:
        return sum(((x[of == c] - x[of == c].mean(0)) ** 2).sum() for c in range(k))

    assert inertia(labels) < 0.95 * inertia(draw.permutation(labels))


def test_an_empty_cluster_is_refused() -> None:
    x = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    with pytest.raises(FederationError, match="a cluster would be empty"):
        balanced_clusters(x, 40, fine=64)
    same = np.ones((300, 4), np.float32)
    with pytest.warns(Warning), pytest.raises(FederationError, match="is empty: the samples have"):
        balanced_clusters(same, 4, fine=8)


# Whole runs


def tiny(**changes: Any) -> TrainExpertsJob:
    values: dict[str, Any] = {
        "width": 24, "depth": 1, "steps": 40, "batch": 64, "samples": 64, "sample_steps": 4,
        "method": {"name": "experts", "k": changes.pop("k", 2)},
    }  # fmt: skip
    return TrainExpertsJob.model_validate({**values, **changes})


class Progress:
    """What a run is given."""

    state = None
    seconds = 1.0

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def say(self, done: float, text: str) -> None: ...

    def tick(self, done: float, text: str, state: Any = None) -> None:
        assert 0 <= done <= 1.0001


def run(directory: Path, **changes: Any) -> Any:
    plan = plan_experts(tiny(**changes), load("laptop"))[0]
    return execute(plan, Progress(directory))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two conditional experts and a router, in processes."""
    directory: Path = tmp_path_factory.mktemp("experts") / "run"
    outcome = run(directory, k=2, conditional=True)
    assert outcome.measured["network_bytes"] == 0
    assert outcome.details["failed"] == {}
    assert (directory / "samples.png").read_bytes().startswith(b"\x89PNG")
    return directory


@pytest.mark.slow
def test_one_expert_is_a_monolith(tmp_path: Path) -> None:
    run(tmp_path / "one", method={"name": "experts", "k": 1})
    run(tmp_path / "monolith", method="monolith")
    for file in ("islands/0/model.safetensors", "samples.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "monolith" / file).read_bytes()


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns_and_send_gradients(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", method="monolith")
    ranks = run(tmp_path / "ranks", method={"name": "monolith", "ranks": 2})
    one, _ = read_tensors(tmp_path / "alone/islands/0/model.safetensors")
    two, _ = read_tensors(tmp_path / "ranks/islands/0/model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    plan = plan_experts(tiny(method={"name": "monolith", "ranks": 2}), load("laptop"))[0]
    assert alone.measured["network_bytes"] == 0
    assert ranks.measured["network_bytes"] == plan.predicted["network_bytes"].value > 0


@pytest.mark.slow
def test_samples_are_drawn_in_every_mode(trained: Path) -> None:
    for mode in ("full", "top1", {"name": "topm", "m": 2}, "sample"):
        drawn = sample(trained, 5, mode=mode, steps=3)
        assert drawn.shape == (5, 1, 8, 8)
        assert np.isfinite(drawn).all()
        assert np.array_equal(drawn, sample(trained, 5, mode=mode, steps=3))
    guided = sample(trained, 5, mode="full", steps=3, label=2, guidance=2.0)
    assert not np.array_equal(guided, sample(trained, 5, mode="full", steps=3, label=2))


@pytest.mark.slow
def test_wrong_requests_to_the_sampler(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="label 10; expected one of 0 to 9"):
        sample(trained, 5, label=10)
    with pytest.raises(FederationError, match="guidance needs a label"):
        sample(trained, 5, guidance=2.0)
    with pytest.raises(FederationError, match="n = 0"):
        sample(trained, 0)
    with pytest.raises(ShoalError, match="mode = 'top2': expected one of full, top1"):
        sample(trained, 5, mode="top2")
    with pytest.raises(FederationError, match="cannot be read"):
        sample(tmp_path, 5)


@pytest.mark.slow
def test_a_missing_expert_needs_a_word(trained: Path, tmp_path: Path) -> None:
    whole, less = load_ensemble(trained), tmp_path / "less"
    shutil.copytree(trained, less)
    (less / "islands/1/model.safetensors").unlink()
    with pytest.raises(FederationError, match="expert 1 of 2 is missing; continue the run"):
        load_ensemble(less)
    ensemble = load_ensemble(less, degrade=True)
    x, t = places(20, 64)
    x, t = x.float(), t.float()
    p = ensemble.probabilities(x, t)
    assert torch.equal(p, torch.tensor([[1.0, 0.0]]).repeat(20, 1))
    first = whole.experts[0]
    assert first is not None
    torch.testing.assert_close(ensemble.velocity(x, t), first(x, t, None))
    (less / "islands/0/model.safetensors").unlink()
    with pytest.raises(FederationError, match="all 2 experts are missing"):
        load_ensemble(less, degrade=True)


def altered(directory: Path, file: str, **changes: Any) -> None:
    path = directory / file
    tensors, words = read_tensors(path)
    write_tensors(path, tensors, {"task": {**words["task"], **changes}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changes", "match"),
    [
        ("islands/1/model.safetensors", {"path": "cosine"}, "islands/1: noise path cosine, and"),
        ("router/model.safetensors", {"experts": 3}, "router: trained as one of 3 experts"),
        ("islands/0/model.safetensors", {"shape": {"width": 10**9}}, "no checkpoint of an expert"),
    ],
)
def test_networks_that_do_not_belong_together(
    trained: Path, tmp_path: Path, file: str, changes: dict[str, Any], match: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    altered(copy, file, **changes)
    with pytest.raises(FederationError, match=match):
        load_ensemble(copy)
    (copy / file).write_bytes(b"\x10" + b"\0" * 30)
    with pytest.raises(FederationError, match="no checkpoint of an expert"):
        load_ensemble(copy)


def test_a_router_of_other_experts() -> None:
    three = Ensemble([lambda x, t, labels: x] * 2, lambda x, t, labels: torch.zeros(len(x), 3), 2)
    with pytest.raises(FederationError, match="router: of 3 experts, and there are 2"):
        three.velocity(*places(4))


@pytest.mark.slow
def test_a_failed_island_stops_alone(tmp_path: Path) -> None:
    """One is killed; the others end, the ensemble is refused, and the run goes on from there."""
    job = tiny(k=2, steps=60)
    train, _, *_ = scaled(*examples_of(job))
    whole = whole_task(job, 64, 10)
    method = DiffusionExperts(k=2)
    ticks: list[float] = []
    given = FlowRun(
        directory=tmp_path, data=train, task=whole, at_once=2,
        tick=lambda done, text: ticks.append(done),
    )  # fmt: skip
    for task in method.tasks(whole):
        method._give(given, task, balanced_clusters(train.x, 2))

    def started(task: NetworkTask, process: subprocess.Popen[Any]) -> None:
        if task.folder == "islands/1":
            process.send_signal(signal.SIGKILL)

    failed = train_islands(tmp_path, method.tasks(whole), 2, given.tick, started)
    assert failed == {"islands/1": "ended by signal 9"}
    assert (tmp_path / "islands/0/model.safetensors").exists()
    before = (tmp_path / "islands/0/model.safetensors").stat().st_mtime_ns
    assert method.train(given).failed == {}
    assert (tmp_path / "islands/0/model.safetensors").stat().st_mtime_ns == before
    assert (tmp_path / "islands/1/model.safetensors").exists()
    # A shard that cannot be read is named; the run says how to go on.
    (tmp_path / "islands/1/model.safetensors").unlink()
    (tmp_path / "islands/1/shard.safetensors").write_bytes(b"no shard")
    (why,) = train_islands(tmp_path, method.tasks(whole), 2, given.tick).values()
    assert "shard.safetensors: no checkpoint" in why


@pytest.mark.slow
def test_an_island_has_no_sockets_and_sees_no_other_island(tmp_path: Path) -> None:
    code = (
        "import sys, socket, pathlib\n"
        "from shoal.fields.federate.ddm.worker import isolate\n"
        "run = pathlib.Path(sys.argv[1])\n"
        "isolate(run, run / 'islands/0')\n"
        "open(run / 'islands/0/own', 'w').close()\n"
        "for what in (lambda: socket.socket(), lambda: open(run / 'islands/1/x')):\n"
        "    try:\n        what()\n"
        "    except Exception as error:\n        print(type(error).__name__, error)\n"
    )
    for at in (0, 1):
        (tmp_path / "islands" / str(at)).mkdir(parents=True)
    (tmp_path / "islands/1/x").write_text("secret")
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert "an island opened a socket" in first
    assert "islands/1/x, which is not its own" in second


@pytest.mark.slow
def test_a_student_learns_from_the_ensemble(trained: Path, tmp_path: Path) -> None:
    ensemble = load_ensemble(trained)
    train, test, *_ = scaled(*examples_of(tiny()))
    task = whole_task(tiny(), 64, 10).model_copy(update={"steps": 150, "lr": 3e-3, "ema": 0.9})

    def apart(steps: int) -> float:
        place = tmp_path / str(steps)
        place.mkdir()
        distill(place, task.model_copy(update={"steps": steps}), train, ensemble)
        student, _ = read_network(place / "student/model.safetensors")
        draw = np.random.default_rng(0)
        t = torch.from_numpy(draw.random(len(test.x), np.float32))
        noise = torch.from_numpy(draw.standard_normal(test.x.shape, np.float32))
        place_, _ = PATHS["linear"].between(torch.from_numpy(test.x), noise, t)
        with torch.no_grad():
            difference = student(place_, t, None) - ensemble.velocity(place_, t)
        return float((difference**2).mean())

    assert apart(150) < 0.5 * apart(1)


def test_the_frechet_distance() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(6, 6)), draw.normal(size=(6, 6))
    first, second = a @ a.T, b @ b.T
    from scipy import linalg

    root = linalg.sqrtm(first @ second).real
    mean, other = draw.normal(size=6), draw.normal(size=6)
    expected = ((mean - other) ** 2).sum() + np.trace(first + second - 2 * root)
    assert frechet(mean, first, other, second) == pytest.approx(expected)
    assert frechet(mean, first, mean, first) == pytest.approx(0, abs=1e-9)
    train, test, *_ = scaled(*examples_of(tiny()))
    features = ClassifierFeatures.of(train.rows(np.arange(400)))
    noise = draw.uniform(-1, 1, (500, 64))
    assert features.distance(test.x) < 0.1 * features.distance(noise)


# Plans


def test_plans_compare_what_is_sent() -> None:
    plans = {str(one.job.method): one for one in plan_experts(tiny(method=None), load("laptop"))}
    assert plans["experts"].predicted["network_bytes"].value == 0
    sent = plans["monolith(ranks=4)"].predicted["network_bytes"].value
    parameters = plans["experts"].parameters
    assert sent == 2 * 4 * parameters * 3 * 40  # a ring of four, forty steps
    assert plans["experts"].predicted["gradient_bytes"].value == sent
    for one in plans.values():
        assert "2,560 training samples" in " ".join(one.notes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": {"name": "experts", "k": 3}}, "batch of 64 cannot be divided among 3 experts"),
        ({"method": {"name": "monolith", "ranks": 3}}, "among 3 ranks"),
        ({"method": {"name": "experts", "k": 0}}, "k"),
        ({"mixture": "top3"}, "mixture = 'top3': expected one of full"),
        ({"data": "nothing"}, "'nothing': expected one of digits"),
    ],
)
def test_wrong_jobs(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ShoalError, match=match):
        plan_experts(tiny(**changes), load("laptop"))
