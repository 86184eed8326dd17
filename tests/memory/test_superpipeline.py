"""Superpipeline: the numbers are those of the resident model, the window is never larger."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, ModelError, PlanError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from shoal.memory.streaming.chain import find_chain  # noqa: E402
from shoal.memory.streaming.slide import Slide, choose, rehearse, sweep  # noqa: E402
from shoal.memory.streaming.superpipeline import wrap  # noqa: E402
from shoal.memory.tiers.device import DeviceScope  # noqa: E402
from shoal.memory.tiers.tier import ALIGNMENT, BudgetedTier  # noqa: E402

MIB = 2**20
WIDTH = 16


class Part(nn.Module):
    def __init__(self, width=WIDTH, inner=2 * WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, n=7, *, again=None, inner=None):
        super().__init__()
        torch.manual_seed(n)
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(
            Part(inner=2 * WIDTH if inner is None else inner[i]) for i in range(n)
        )
        self.head = nn.Linear(WIDTH, 20)
        self.again = again

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            again = self.again
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, wide, out, stride):
        super().__init__()
        self.a = nn.Conv2d(wide, out, 3, stride, 1)
        self.norm = nn.BatchNorm2d(out)
        self.b = nn.Conv2d(out, out, 3, 1, 1)
        self.skip = nn.Conv2d(wide, out, 1, stride)

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.norm(self.a(x)))) + self.skip(x))


class Stages(nn.Module):
    """A network of stages, none of which holds most of the weights by blocks.

    No convolution with a stride reads fewer than 16 channels: with fewer than a vector register
    holds, oneDNN 3.12 writes out of bounds in the backward pass of a 1 x 1 convolution in
    ``channels_last`` on a CPU with AVX2 (uxlfoundation/oneDNN#6035).
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3)
        self.one = nn.Sequential(Residual(16, 16, 1), Residual(16, 16, 1))
        self.two = nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1))
        self.three = nn.Sequential(Residual(32, 32, 2), Residual(32, 32, 1))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(self.stem(x)))).mean((2, 3)))


@pytest.fixture
def tokens():
    return torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(1))


def loads_of(wrapped, run):
    before = wrapped.stats.loads
    result = run()
    return wrapped.stats.loads - before, result


@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (3, 2), (5, 5), (6, 2), (7, 3)])
def test_inference_is_that_of_the_resident_model(tokens, k, k_prime):
    model = Stack()
    whole = copy.deepcopy(model)
    names = list(model.state_dict())
    with wrap(model, k, k_prime, device="cpu") as wrapped, torch.no_grad():
        for _ in range(3):
            loads, result = loads_of(wrapped, lambda: model(tokens))
            assert torch.equal(result, whole(tokens))
        assert loads == (0 if k == 7 else 7)
        assert wrapped.stats.out_of_turn == 0
        size = wrapped.report.block_bytes[0]
        kept = sum(wrapped.report.pinned.values())
        assert wrapped.tier.stats.peak == wrapped.report.peak_bytes == kept + k * size
        with torch.inference_mode():
            assert torch.equal(model(tokens), whole(tokens))
    assert list(model.state_dict()) == names
    assert torch.equal(model(tokens), whole(tokens))


def test_all_blocks_resident_costs_nothing():
    model = Stack()
    before = [vars(block).keys() - {"_parameters"} for block in model.blocks]
    with wrap(model, 7, 1, device="cpu"):
        assert [vars(block).keys() - {"_parameters"} for block in model.blocks] == before
        assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (3, 2), (4, 4), (7, 1)])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_training_is_that_of_the_resident_model(tokens, k, k_prime, again):
    model = Stack(again=again)
    whole = copy.deepcopy(model)
    with wrap(model, k, k_prime, device="cpu") as wrapped:
        both = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (model, whole)]
        for _ in range(3):
            before = wrapped.stats.loads
            losses = []
            for one, optimizer in both:
                optimizer.zero_grad()
                for scale in (1, 2):
                    loss = one(tokens).logsumexp(-1).mean() * scale
                    loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
            for _, optimizer in both:
                optimizer.step()
            loads = wrapped.stats.loads - before
        if not again:  # there, back, there, back; and the window after the update
            assert loads == (0 if k == 7 else 4 * (7 - k) + k)
        assert wrapped.tier.stats.peak == wrapped.report.peak_bytes
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_graph_is_gone_through_twice(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    with wrap(model, 3, 2, device="cpu"):
        for one in (model, whole):
            loss = one(tokens).logsumexp(-1).mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_two_passes_forward_then_two_back(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    with wrap(model, 3, 1, device="cpu") as wrapped:
        for one in (model, whole):
            losses = [one(tokens + i).logsumexp(-1).mean() for i in (0, 0)]
            for loss in losses:
                loss.backward()
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        assert wrapped.tier.stats.peak == wrapped.report.peak_bytes


def test_gradients_alone_and_frozen_weights(tokens):
    model = Stack()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(True)
    whole = copy.deepcopy(model)
    with wrap(model, 2, 1, device="cpu"):
        for one in (model, whole):
            one(tokens).sum().backward()
        assert torch.equal(model.blocks[2].up.weight.grad, whole.blocks[2].up.weight.grad)
        assert model.blocks[1].up.weight.grad is None
        weight = model.blocks[2].up.weight
        (alone,) = torch.autograd.grad(model(tokens).sum(), [weight])
        assert torch.equal(alone, weight.grad)


def test_operators_find_weights_on_the_device_only(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    size = sum(p.numel() * 4 for p in model.parameters())
    tier = BudgetedTier("device", size)
    with wrap(model, 2, 1, tier=tier):
        kept = tier.stats.peak
        few = tokens[:1, :2].clone()
        with DeviceScope(tier) as scope:
            scope.adopt(few)
            result = model(few).logsumexp(-1).mean()
            result.backward()
        assert kept < tier.stats.peak < size
        with torch.inference_mode(), DeviceScope(tier) as scope:
            scope.adopt(few)
            model(few)
    assert result.item() == whole(few).logsumexp(-1).mean().item()


def test_copies_of_weights_in_another_dtype_are_not_kept(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    few = tokens[:1, :2].clone()
    tier = BudgetedTier("device", MIB)
    weights = sum(p.numel() * 2 for p in model.blocks.parameters())
    with wrap(model, 2, 1, tier=tier), torch.autocast("cpu", torch.bfloat16):
        with DeviceScope(tier) as scope:
            scope.adopt(few)
            loss = model(few).float().logsumexp(-1).mean()
            assert scope.live_bytes < weights / 2
            loss.backward()
        whole(few).float().logsumexp(-1).mean().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_changed_weight_is_loaded_again(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    other = Stack(n=7)
    with wrap(model, 3, 1, device="cpu") as wrapped, torch.no_grad():
        model(tokens)
        for one in (model, whole):
            for block in one.blocks:
                block.up.weight.mul_(1.5)
        assert torch.equal(model(tokens), whole(tokens))

        def write(module, _):
            module.bias.add_(1.0)

        # The block itself writes, on the device.
        hooks = [one.blocks[1].up.register_forward_pre_hook(write) for one in (model, whole)]
        for _ in range(2):
            assert torch.equal(model(tokens), whole(tokens))
        assert wrapped.stats.written_back == 2
        for hook in hooks:
            hook.remove()
        for one in (model, whole):
            one.blocks[1].up.weight.data.mul_(2.0)  # nobody is told
        wrapped.refresh()
        assert torch.equal(model(tokens), whole(tokens))
        model.load_state_dict(other.state_dict())
        whole.load_state_dict(other.state_dict())
        assert torch.equal(model(tokens), whole(tokens))


def test_a_failed_pass_leaves_a_model_that_runs(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    with wrap(model, 2, 1, device="cpu"):
        handle = model.blocks[4].down.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens)
        handle.remove()
        loss = model(tokens).sum()
        hook = model.blocks[3].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        hook.remove()
        model.zero_grad()
        model(tokens).sum().backward()
        whole(tokens).sum().backward()
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_networks_of_stages_are_traced():
    model = Stages().to(memory_format=torch.channels_last)
    whole = copy.deepcopy(model)
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with wrap(model, 3, 1, device="cpu") as wrapped:
        assert wrapped.report.how == "trace"
        assert wrapped.report.blocks == ("one.0", "one.1", "two.0", "two.1", "three.0", "three.1")
        for _ in range(2):
            for one in (model, whole):
                one.zero_grad()
                one(image).pow(2).sum().backward()
        sizes = wrapped.report.block_bytes
        windows = [sum(sizes[(i + j) % 6] for j in range(3)) for i in range(6)]
        assert wrapped.report.peak_bytes <= sum(wrapped.report.pinned.values()) + max(windows)
        assert wrapped.tier.stats.peak <= wrapped.report.peak_bytes
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
            assert mine.stride() == theirs.stride()
    assert torch.equal(model.one[0].norm.running_mean, whole.one[0].norm.running_mean)


@pytest.mark.parametrize("training", [False, True])
def test_blocks_of_different_sizes_find_room_in_a_window(tokens, training):
    """What stays of a window can leave no hole for a larger block: then all of it is replaced."""
    inner = [8, 64, 32, 24, 64, 16]
    model = Stack(6, inner=inner)
    whole = copy.deepcopy(model)
    with wrap(copy.deepcopy(model), 3, 1, device="cpu") as wrapped:
        peak = wrapped.report.peak_bytes
    with wrap(model, 3, 1, tier=BudgetedTier("device", peak)) as wrapped:
        for _ in range(3):
            with torch.set_grad_enabled(training):
                losses = [one(tokens).logsumexp(-1).mean() for one in (model, whole)]
            assert torch.equal(*losses)
            for loss in losses if training else ():
                loss.backward()
        assert wrapped.tier.stats.peak <= peak
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def test_what_blocks_share_stays(tokens):
    model = Stack()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    model.blocks[5] = model.blocks[4]
    whole = copy.deepcopy(model)
    with wrap(model, 2, 1, device="cpu") as wrapped:
        assert "blocks.1.up.weight" in wrapped.report.shared
        assert "blocks.4.down.bias" in wrapped.report.shared
        assert "shared between blocks" in str(wrapped.report)
        assert len(wrapped.report.blocks) == 5
        for one in (model, whole):
            one(tokens).sum().backward()
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_auto_measures_and_chooses(tokens):
    model = Stack()
    whole = copy.deepcopy(model)
    with wrap(model, device="cpu", goal=1e9) as wrapped, torch.no_grad():
        assert (wrapped.slide.k, wrapped.slide.k_prime) == (2, 1)
        with pytest.raises(PlanError, match=r"run the model once"):
            wrapped.sweep()
        model(tokens)
        assert torch.equal(model(tokens), whole(tokens))
        assert wrapped.slide.k == 1  # anything is fast enough
        assert len(wrapped.sweep()) == 6 * 7 // 2 + 1


@pytest.mark.parametrize(
    ("k", "k_prime", "told"),
    [
        (0, 1, r"superpipeline.k = 0: expected 1 to 7"),
        (8, 1, r"superpipeline.k = 8: expected 1 to 7"),
        (3, 4, r"superpipeline.k_prime = 4: expected 1 to k = 3"),
    ],
)
def test_bad_windows(k, k_prime, told):
    with pytest.raises(ConfigError, match=told):
        wrap(Stack(), k, k_prime)


def test_models_without_a_chain():
    with pytest.raises(ModelError, match=r"ModuleList or Sequential of at least two"):
        wrap(nn.Linear(3, 3), 1)
    with pytest.raises(ModelError, match=r"no such module.*blocks"):
        wrap(Stack(), 1, chain="layers")
    one = Stack()
    one.blocks = nn.ModuleList([Part()] * 3)
    one.blocks[1] = one.blocks[2] = one.blocks[0]
    with pytest.raises(ModelError, match=r"at least two; weights that several blocks share"):
        wrap(one, 1)


def test_a_budget_that_is_too_small():
    with pytest.raises(
        PlanError, match=r"k = 4, k' = 2 needs 1[89].\d kB.*device_budget is 10.0 kB"
    ):
        wrap(Stack(), 4, device="cpu", device_budget=10_000)
    with pytest.raises(PlanError, match=r"k = 1, k' = 1 needs"):
        wrap(Stack(), device="cpu", device_budget=4000)


def test_chains_of_several_containers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ModuleList(Part() for _ in range(3))
            self.b = nn.ModuleList(Part() for _ in range(3))

    assert find_chain(Two(), "b,a").names == ("b.0", "b.1", "b.2", "a.0", "a.1", "a.2")
    assert find_chain(Stack()).names[0] == "blocks.0"
    assert len(find_chain(nn.Sequential(*(Part() for _ in range(4))))) == 4


windows = st.integers(1, 9).flatmap(
    lambda n: st.integers(1, n).flatmap(
        lambda k: st.tuples(st.just(n), st.just(k), st.integers(1, k))
    )
)


@given(windows, st.booleans(), st.data())
def test_a_window_is_k_blocks_and_every_block_is_loaded_once(window, training, data):
    n, k, step = window
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    sizes = [size * ALIGNMENT for size in sizes]
    result = rehearse(Slide(n, k, step), sizes, [1.0] * n, [0.5] * n, training=training)
    most = max(sum(sizes[(i + j) % n] for j in range(k)) for i in range(n))
    assert result.peak_bytes <= most
    if step == 1 and not training:
        assert result.peak_bytes == most
    assert result.peak_bytes <= result.span_bytes
    if k == n:
        assert result.loads == 0
    else:
        assert result.loads == (2 * (n - k) + k if training else n)
    if len(set(sizes)) == 1:
        assert result.span_bytes == result.peak_bytes == most


def test_time_is_hidden_where_the_paper_says_so():
    n, sizes = 24, [MIB] * 24
    for k, step in ((8, 2), (8, 8), (6, 3), (4, 1)):
        for load in (0.2, 0.8, 1.0):
            cost = rehearse(Slide(n, k, step), sizes, [1.0] * n, [load] * n)
            hidden = (k - step) >= step * load
            assert (cost.stall_s < 1e-9) == hidden, (k, step, load)
    cells = sweep(sizes, [1.0] * n, [0.5] * n)
    peaks = [max(c.cost.peak_bytes for c in cells if c.k == k) for k in range(1, n + 1)]
    assert peaks == sorted(peaks)
    best = choose(cells, goal=1.01)
    assert (best.k, best.k_prime) == (2, 1)
    assert choose(cells, goal=1.01, budget=MIB).k == 1
    with pytest.raises(PlanError, match=r"k = 1, needs 1.0\d MB"):
        choose(cells, budget=1000)
