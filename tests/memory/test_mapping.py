"""Memory mapping above torch: the agent learns, models become programs, mappings really run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shoal.claims.lab.mapping_executor import execute
from shoal.core.errors import PlanError
from shoal.memory.mapping import MAPPERS
from shoal.memory.mapping.learning import MuZeroLearner
from shoal.memory.mapping.muzero import MuZero
from shoal.memory.mapping.networks import Networks
from shoal.memory.mapping.samples import MODELS, SPEED, sample, samples, traced_sample
from shoal.memory.mapping.trace import trace
from shoal.plan.mapping.greedy import GreedyMapper, greedy_actions
from shoal.plan.mapping.layout import DROP, verify
from shoal.plan.mapping.native import FAST, Native, mapping_of, replay
from shoal.plan.mapping.program import Compiled, TierSpec
from shoal.plan.mapping.samples import random_program


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def contested(steps: int = 40, seed: int = 1) -> Compiled:
    program = random_program(steps, seed=seed)
    total = sum(buffer.nbytes for buffer in program.buffers)
    return Compiled(program, TierSpec(fast_bytes=total // 4))


def small(**changes: float) -> MuZero:
    options = {"rounds": 3, "moves": 3000, "updates": 30, "demonstrations": 16, **changes}
    part: MuZero = MAPPERS.build({"name": "muzero", **options})
    return part


def test_the_search_computes_what_the_networks_compute() -> None:
    """Where one action is legal, the search's value is the networks' own."""
    compiled = contested(6)
    native = Native(compiled)
    networks = Networks(
        hidden=24, latent=12, discount=0.9, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for matrix in networks.matrices:
            matrix.add_(0.1 * torch.randn(matrix.shape))
    game = native.trace(native.replay(np.full(compiled.decisions, FAST))[0])
    game.masks[:] = 1
    native.reanalyse(networks.weights(), game, simulations=4, seed=0)
    with torch.no_grad():
        logits, value = networks.predict(networks.represent(torch.from_numpy(game.seen)))
    assert np.allclose(game.values, value.numpy(), atol=1e-5)
    # One simulation from a root of two goes to the action that the policy prefers, and its value
    # is backed up with the reward.
    game.masks[:] = 3
    native.reanalyse(networks.weights(), game, simulations=1, seed=0)
    with torch.no_grad():
        action = logits[:, :2].argmax(-1)
        state, reward = networks.dynamics(networks.represent(torch.from_numpy(game.seen)), action)
        second = networks.predict(state)[1]
    assert np.array_equal(game.shares[:, :2].argmax(-1), action.numpy())
    mean = (value + reward + 0.9 * second) / 2
    assert np.allclose(game.values, mean.numpy(), atol=1e-5)


def test_games_are_legal_and_add_up() -> None:
    compiled = contested()
    learner = MuZeroLearner(small(), Native(compiled), 0)
    game = learner._search(1.0, 0.5, None)
    plain = replay(compiled, game.actions)
    assert plain.actions == game.actions.tolist()
    assert plain.ticks == game.ticks == compiled.all_slow - int(game.rewards.sum())
    assert np.allclose(game.shares.sum(-1), 1.0, atol=1e-5)
    assert ((game.shares > 0) <= (game.masks[:, None] >> np.arange(3) & 1)).all()
    again = MuZeroLearner(small(), Native(compiled), 0)._search(1.0, 0.5, None)
    assert np.array_equal(again.actions, game.actions)
    given = MuZeroLearner(small(), Native(compiled), 0)._search(1.0, 0.5, game.actions[:9])
    assert np.array_equal(given.actions[:9], game.actions[:9])


def test_value_targets_are_rewards_and_then_the_searchs_value() -> None:
    compiled = contested(10)
    learner = MuZeroLearner(small(horizon=3, discount=0.9), Native(compiled), 0)
    game = learner._search(1.0, 0.0, None)
    learner.games.add(game)
    target = learner.games._values(game)
    rewards, count = game.rewards / learner.games.unit, len(game.rewards)
    for k in (0, 4, count - 2):
        wanted = sum(0.9**j * rewards[k + j] for j in range(3) if k + j < count)
        wanted += 0.9**3 * game.values[k + 3] if k + 3 < count else 0.0
        assert target[k] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_the_hybrid_is_never_slower_than_greedy_and_sometimes_faster() -> None:
    results = []
    for seed in (1, 2):
        compiled = contested(seed=seed)
        hybrid = MAPPERS.build({"name": "hybrid", "rounds": 2, "moves": 3000, "updates": 20}).map(
            compiled.program, compiled.tiers
        )
        greedy = GreedyMapper().map(compiled.program, compiled.tiers)
        assert verify(hybrid) == hybrid.ticks <= greedy.ticks
        results.append(greedy.ticks / hybrid.ticks)
    assert max(results) > 1.01


@pytest.mark.slow
def test_what_it_learns_is_what_makes_it_good() -> None:
    """The same search with networks that never learn plays far worse games."""
    compiled = contested(60)
    known = greedy_actions(compiled, 4)
    played = {
        updates: MuZeroLearner(small(updates=updates, rounds=5), Native(compiled), 0).run(known)
        for updates in (0, 40)
    }
    assert min(played[40].curve) < 0.9 * min(played[0].curve)
    assert played[40].best.ticks <= played[0].best.ticks


@pytest.mark.slow
def test_it_learns_from_nothing() -> None:
    """Without greedy, later rounds are better than the first, and beat a player at random."""
    compiled = contested(60)
    learner = MuZeroLearner(small(rounds=8, moves=6000, updates=60), Native(compiled), 0)
    learner.run(None)
    assert min(learner.curve[4:]) < learner.curve[0]
    random = np.random.default_rng(0)
    native = Native(compiled)
    tried = [native.replay(random.integers(0, 4, compiled.decisions))[1] for _ in range(500)]
    assert learner.best.ticks < min(tried)


def test_models_become_programs() -> None:
    """A product's bytes and FLOPs, views without a decision, and outputs that must come home."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(inplace=True), nn.Flatten())
    program = trace(model, (torch.randn(16, 64),), name="tiny", speed=SPEED).program
    product, relu = program.instructions
    assert product.compute_s == pytest.approx(2 * 16 * 64 * 32 / SPEED.matmul_flops)
    sizes = {buffer.name: buffer.nbytes for buffer in program.buffers}
    read = sorted(sizes[program.root(access.buffer)] for access in product.reads)
    assert read == sorted([16 * 64 * 4, 32 * 64 * 4])
    (written,) = product.writes
    assert sizes[written.buffer] == 16 * 32 * 4
    assert [program.root(access.buffer) for access in relu.reads] == [written.buffer]
    assert [buffer.name for buffer in program.buffers if buffer.output] == [relu.writes[0].buffer]
    assert trace(model.to("meta"), (torch.randn(16, 64, device="meta"),), speed=SPEED)


def test_tied_weights_are_one_buffer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    traced = trace(Tied(), (torch.randn(2, 8),))
    assert len(traced.arguments) == 4  # a weight, two biases, the input
    with torch.no_grad():
        assert traced.graph(*traced.arguments)[0].shape == (2, 8)


def test_models_that_look_at_values_are_refused() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    with pytest.raises(PlanError, match="must not depend on values"):
        trace(Looks(), (torch.randn(3),))
    with pytest.raises(PlanError, match="computes no tensor"):
        trace(nn.Identity(), (torch.randn(3),))
    with pytest.raises(PlanError, match="cannot be measured"):
        trace(nn.Linear(2, 2, device="meta"), (torch.randn(1, 2),), times="measured")


def test_operators_are_measured() -> None:
    model, inputs = sample("mlp")
    result = trace(model, inputs, times="measured").program
    assert all(step.compute_s > 0 for step in result.instructions)


@pytest.mark.slow
def test_there_are_eight_programs() -> None:
    result = samples()
    assert [program.name for program in result] == [*MODELS, "strassen", "random1", "random2"]
    assert all(len(program.instructions) > 10 for program in result)


@pytest.mark.parametrize("name", MODELS)
def test_a_mapped_model_computes_the_same(name: str) -> None:
    """Bit for bit, from an arena of exactly the size that was planned."""
    traced = traced_sample(name)
    total = sum(buffer.nbytes for buffer in traced.program.buffers if not buffer.alias_of)
    tiers = TierSpec(fast_bytes=total // 6, slow_bandwidth=5e9, fast_bandwidth=1e12)
    compiled = Compiled(traced.program, tiers)
    mapping = mapping_of(compiled, np.full(compiled.decisions, FAST), "fast")
    assert mapping.rectangles
    with torch.no_grad():
        wanted = traced.graph(*traced.arguments)
    done = execute(traced, mapping)
    assert len(done.outputs) == len(wanted)
    assert all(torch.equal(one, two) for one, two in zip(done.outputs, wanted, strict=True))
    moved = sum(piece.ticks for piece in mapping.moved) * 1e-12 * tiers.slow_bandwidth
    assert done.copied == pytest.approx(moved, rel=0.01, abs=64 * len(mapping.moved))
    slow = execute(traced, mapping_of(compiled, np.full(compiled.decisions, DROP), "slow"))
    assert slow.copied == 0
    assert done.read < slow.read


def test_what_cannot_run_is_refused() -> None:
    traced = traced_sample("mlp")
    other = contested(5)
    with pytest.raises(PlanError, match="one of the program mlp"):
        execute(traced, mapping_of(other, np.zeros(other.decisions), "slow"))
    model, inputs = nn.Linear(2, 2, device="meta"), (torch.randn(1, 2),)
    bare = trace(model, inputs)
    compiled = Compiled(bare.program, TierSpec(fast_bytes=1024))
    with pytest.raises(PlanError, match="meta device"):
        execute(bare, mapping_of(compiled, np.zeros(compiled.decisions), "slow"))
