"""GPipe of any layers equals one process: ragged, dropped, normalised, skipping; bad cells."""

from __future__ import annotations

import copy
import functools

import pytest
import ranks_gpipe
import torch
from torch import nn

from shoal.claims.lab.gpipe import Pipeline, Save, Use, gpipe, held_bytes
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.random import seed64
from shoal.parallel.comm.processes import run_processes

WIDTH, CLASSES, BATCH = 6, 5, 11


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _layers(dropout: float = 0.0, *, norm: bool = False, skip: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(dropout)]
    if norm:
        layers.insert(0, nn.BatchNorm1d(WIDTH))
    if skip:
        layers += [Save("a")]
    layers += [nn.Linear(9, 9), nn.GELU(), nn.Dropout(dropout), nn.Linear(9, 9)]
    if skip:
        layers += [nn.Tanh(), Save("b"), nn.Linear(9, 9), Use("a"), nn.Linear(9, 9)]
        layers += [Use("b", torch.mul)]
    layers += [nn.Linear(9, CLASSES)]
    return [layer.double() for layer in layers]


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=source, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=source)


def _one(layers: list[nn.Module], m: int, steps: int = 1) -> tuple[list[float], dict]:
    """One process: micro-batches one after the other, and what is random by its key."""
    x, y = _data()
    losses = []
    for step in range(steps):
        total = 0.0
        for number, (part, aim) in enumerate(
            zip(x.tensor_split(m), y.tensor_split(m), strict=True)
        ):
            saved = {}
            for at, layer in enumerate(layers):
                torch.manual_seed(seed64(3, purpose="gpipe", step=step, layer=at, index=number))
                if isinstance(layer, Save):
                    saved[layer.name] = part
                elif isinstance(layer, Use):
                    part = layer(part, saved[layer.name])
                else:
                    part = layer(part)
            loss = nn.functional.cross_entropy(part, aim) * len(aim) / BATCH
            loss.backward()
            total += loss.item()
        losses.append(total)
    gradients = {
        f"layers.{at}.{name}": p.grad
        for at, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }
    return losses, gradients


def _many(layers, k, m, steps=1, **options) -> tuple[list[float], dict, list[Pipeline]]:
    x, y = _data()

    def on(comm):
        pipeline = gpipe(copy.deepcopy(layers), k, m, comm=comm, seed=3, **options)
        losses = [float(pipeline.step(x, y)) for _ in range(steps)]
        return losses, {n: p.grad for n, p in pipeline.named_parameters()}, pipeline

    ranks = run_ranks(k, on)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    gradients = {name: grad for rank in ranks for name, grad in rank[1].items()}
    return ranks[0][0], gradients, [rank[2] for rank in ranks]


def _same(one, many):
    assert one.keys() == many.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(many[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("recompute", [True, False])
def test_equals_one_process_ragged_and_dropped(k, m, recompute):
    layers = _layers(0.3, skip=k == 4)
    losses, gradients, _ = _many(layers, k, m, steps=2, recompute=recompute)
    expected, of_one = _one(layers, m, steps=2)
    assert losses == pytest.approx(expected, rel=1e-12)
    _same(of_one, gradients)


@pytest.mark.parametrize("m", [1, 3, 8])
def test_ragged_micro_batches_give_the_gradient_of_the_mini_batch(m):
    """Without randomness the cut does not show at all."""
    layers = _layers()
    _, gradients, _ = _many(layers, 2, m)
    _same(_one(layers, 1)[1], gradients)


def test_sums_are_not_averaged():
    layers = _layers()

    def loss(out, aim):
        return nn.functional.cross_entropy(out, aim, reduction="sum")

    _, gradients, _ = _many(layers, 2, 3, loss=loss, reduction="sum")
    _same({n: g * BATCH for n, g in _one(layers, 1)[1].items()}, gradients)


def test_skips_travel_with_the_boundaries_between():
    layers = _layers(skip=True)
    expected = _one(copy.deepcopy(layers), 1)[1]
    for k in (3, 5):
        _, gradients, _ = _many(layers, k, 3, costs=[1.0] * len(layers))
        _same(expected, gradients)
    inside = [at in (9, 10) for at in range(len(layers))]  # where both are under way
    _, gradients, (first, _) = _many(layers, 2, 3, costs=[float(one) for one in inside])
    _same(expected, gradients)
    assert first._leave == ("a", "b")


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_moving_statistics_follow_the_mini_batch_once(recompute, momentum):
    layers = _layers(norm=True)
    layers[0].momentum = momentum
    x, _ = _data()
    expected = copy.deepcopy(layers[0])
    for _ in range(2):
        expected(x)
    _, _, pipelines = _many(layers, 2, 4, steps=2, recompute=recompute)
    norm = pipelines[0].layers["0"]
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked == 2


def test_statistics_in_training_are_those_of_the_micro_batch():
    layers = _layers(norm=True)
    gradients = _many(layers, 2, 4)[1]
    _same(_one(layers, 4)[1], gradients)


def test_evaluation_uses_moving_statistics_and_drops_nothing():
    layers = _layers(0.5, norm=True)
    x, _ = _data()

    def on(comm):
        pipeline = gpipe(copy.deepcopy(layers), 2, 3, comm=comm).eval()
        return pipeline(x)

    first, last = run_ranks(2, on)
    assert first is None
    torch.testing.assert_close(last, nn.Sequential(*copy.deepcopy(layers)).eval()(x))


def test_the_default_generator_is_left_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    pipeline = gpipe(_layers(0.5)[:], 1, 2)
    torch.manual_seed(7)
    pipeline.step(*_data())
    assert torch.equal(torch.get_rng_state(), before)


def test_images_change_shape_from_cell_to_cell():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, CLASSES)]
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5)

    def on(comm):
        pipeline = gpipe(copy.deepcopy(layers), 3, 2, comm=comm, costs=[1.0] * 5)
        return pipeline.step(x, y), {n: p.grad for n, p in pipeline.named_parameters()}

    ranks = run_ranks(3, on)
    out = nn.functional.cross_entropy(nn.Sequential(*layers)(x), y)
    out.backward()
    torch.testing.assert_close(ranks[0][0], out.detach())
    torch.testing.assert_close(ranks[0][1]["layers.0.weight"], layers[0].weight.grad)
    torch.testing.assert_close(ranks[2][1]["layers.4.weight"], layers[4].weight.grad)


def test_cells_follow_the_costs():
    layers = [nn.Linear(2, 2) for _ in range(4)]
    cells = [p.cells for p in _pipelines(layers, 2, [1.0, 1.0, 1.0, 3.0])]
    assert cells[0] == (range(3), range(3, 4))


def _pipelines(layers, k, costs):
    return run_ranks(k, lambda comm: gpipe(layers, k, 2, costs=costs, comm=comm))


def test_saved_bytes_stay_within_the_formula():
    """Live bytes that autograd keeps, and the inputs that cells keep, against the closed form."""
    from shoal.claims.experiments.gpipe_ranks import saved_bytes

    size = {"layers": 8, "width": 16, "batch": 32}
    tensor = 4.0 * 32 * 16
    for k, m, recompute in ((2, 4, True), (4, 8, True), (2, 4, False), (1, 1, False)):
        how = {**size, "m": m, "recompute": recompute}
        peak = max(run_ranks(k, functools.partial(saved_bytes, **how)))
        # Of a layer its output is kept, which is the next one's input.
        bound = held_bytes(tensor, entry=tensor, layers=8, k=k, m=m, recompute=recompute)
        # Inputs of cells are counted beside what autograd keeps of one of them.
        inputs = tensor / m if recompute else tensor
        assert 0.8 * bound < peak <= bound + inputs, (k, m, recompute)


def test_more_cells_than_layers_are_refused():
    with pytest.raises(PlanError, match="cells = 3"):
        run_ranks(3, lambda comm: gpipe([nn.Linear(2, 2)] * 2, 3, comm=comm))


def test_more_micro_batches_than_samples_are_refused():
    with pytest.raises(ConfigError, match=r"gpipe\.m = 12: expected at most the 11"):
        gpipe(_layers(), 1, 12).step(*_data())


def test_one_process_is_no_pipeline_of_two():
    with pytest.raises(ConfigError, match=r"gpipe\.k = 2: expected 1, the number of ranks"):
        gpipe(_layers(), 2)


class _Both(nn.Module):
    def forward(self, x):
        return x, x


class _Half(nn.Module):
    def forward(self, x):
        return x.long()


@pytest.mark.parametrize("layer", [_Both(), _Half()])
def test_boundaries_that_are_no_floating_tensors_are_refused(layer):
    layers = [nn.Linear(WIDTH, 2).double(), layer, nn.Linear(2, 2).double()]
    with pytest.raises(ConfigError, match=r"gpipe layer 1 = .*one floating-point tensor"):
        _many(layers, 2, 2, costs=[1.0, 1.0, 2.0])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_cells_that_change_their_input_are_refused(k, recompute):
    layers = [nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES).double()]
    if k == 2:
        layers = [nn.Linear(WIDTH, WIDTH).double(), *layers]
    with pytest.raises(ConfigError, match=rf"gpipe layer {k - 1} = .ReLU.: expected no change"):
        _many(layers, k, 2, recompute=recompute, costs=[2.0, 1.0, 1.0][: len(layers)])


def test_layers_that_do_not_fit_are_named_before_anything_runs():
    layers = [nn.Linear(WIDTH, 3).double(), nn.Linear(4, CLASSES).double()]
    with pytest.raises(ConfigError, match="gpipe layer Linear: it does not take"):
        _many(layers, 2, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Save("a"), nn.Tanh()], "expected a later Use"),
        ([nn.Tanh(), Use("a")], "expected a name that an earlier layer saves"),
        ([Save("a"), Save("a"), Use("a")], "expected a name of its own"),
        ([Save("a"), Use("a"), Use("a")], "expected a name that an earlier layer saves, once"),
    ],
)
def test_skips_without_their_other_end_are_refused(layers, message):
    with pytest.raises(ConfigError, match=message):
        gpipe(layers, 1)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(ConfigError, match=r"gpipe\.loss = \[6, 5\]"):
        gpipe(_layers(), 1, 2, loss=lambda out, _: out).step(*_data())


@pytest.mark.slow
def test_processes_do_what_threads_do():
    (both,) = run_ranks(1, functools.partial(ranks_gpipe.step, m=3))
    first, last = run_processes(f"{ranks_gpipe.__file__}:step", 2, {"m": 3}, timeout_s=60.0)
    assert first["loss"] == pytest.approx(both["loss"], rel=1e-6)
    assert last["loss"] == first["loss"]
    gradients = {**first["gradients"], **last["gradients"]}
    assert gradients.keys() == both["gradients"].keys()
    for name, gradient in both["gradients"].items():
        torch.testing.assert_close(torch.tensor(gradients[name]), torch.tensor(gradient))
    torch.testing.assert_close(torch.tensor(last["out"]), torch.tensor(both["out"]))
