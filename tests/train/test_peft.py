"""One battery over every fine-tuning method: on our model and on one of another library."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import CheckpointError, ConfigError, ModelError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.initialise import init_weights  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.train.peft import PEFTS, files  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=128,
    hidden=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=128,
    max_position=128,
    initializer_range=0.15,
    family="llama",
    tied=True,
)
X = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(1))

# Methods that say that a fresh one changes the output.
NOT_FRESH = {"prefix", "prompt", "mam", "unipelt", "qlora", "loftq", "offsite", "streams"}
# Methods that make a model of another architecture, which other libraries do not know.
OURS_ALONE = {"streams"}
WITHOUT_GRADIENT = {"mezo"}
OPTIONS: dict[str, dict[str, Any]] = {
    "adapter_drop": {"drop": 1},
    "offsite": {"last": 0, "keep": 0.0},
}

each_method = pytest.mark.parametrize("name", sorted(PEFTS))
with_gradient = pytest.mark.parametrize("name", sorted(set(PEFTS) - WITHOUT_GRADIENT))


def ours() -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "base"
    huggingface.write(place, ours())
    return place


@pytest.fixture
def theirs(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits(model: Any, x: Any = X) -> Any:
    out = model(x)
    return getattr(out, "logits", out)


def method(name: str, **options: Any) -> Any:
    return table("peft").build({"name": name, **OPTIONS.get(name, {}), **options})


def shake(handle: Any, size: float = 0.1) -> None:
    """What training might have done."""
    generator = torch.Generator().manual_seed(2)
    if handle.name == "mezo":
        handle.estimate(0, lambda: float(len(handle.moves)), 1e-3)
        handle._move(1, 0.05)
        return
    with torch.no_grad():
        for name, value in handle.trainable().items():
            if "gate" not in name:
                value.add_(torch.randn(value.shape, generator=generator) * size)


def weights(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(model: Any, before: dict[str, Any]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[k], v) for k, v in before.items())


@each_method
def test_a_fresh_method_changes_nothing_and_can_be_removed(name: str) -> None:
    model = ours()
    before, plain = weights(model), logits(model)
    handle = method(name, **({"keep_base": True} if name == "mezo" else {})).inject(model)
    if name not in NOT_FRESH:
        assert torch.equal(logits(model), plain)
    shake(handle)
    assert not torch.equal(logits(model), plain)
    handle.remove()
    assert same(model, before)
    assert torch.equal(logits(model), plain)
    assert all(p.requires_grad for p in model.parameters())


@each_method
def test_what_is_trained_is_what_the_shape_says(name: str) -> None:
    model = ours()
    part = method(name)
    handle = part.inject(model)
    count = sum(p.numel() for p in handle.trainable().values())
    assert count == part.parameters(CONFIG.shape())
    if name in WITHOUT_GRADIENT:
        return
    names = {id(p) for p in handle.trainable().values()}
    assert names == {id(p) for p in model.parameters() if p.requires_grad}


@with_gradient
def test_training_changes_the_trained_alone(name: str) -> None:
    model = ours()
    handle = method(name).inject(model)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    model.train()
    optimizer = torch.optim.AdamW(list(handle.trainable().values()), lr=1e-2)
    targets = X.roll(-1, 1)
    losses = []
    for step in range(12):

        def loss() -> Any:
            penalty = handle.penalty()
            out = model.loss_sum(X, targets) / X.numel()
            return out if penalty is None else out + penalty

        if handle.looks:
            handle.look(lambda _: loss().backward(), lambda _: None)
        handle.before_step(step, 12)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        handle.before_update(step, 12)
        optimizer.step()
        handle.after_update(step, 12)
        losses.append(value.item())
    assert min(losses[6:]) < losses[0], losses
    for n, p in model.named_parameters():
        if n in frozen:
            assert torch.equal(p, frozen[n])


@each_method
def test_files_give_the_same_back(name: str, tmp_path: Path) -> None:
    model = ours()
    handle = method(name).inject(model)
    shake(handle)
    learned = logits(model)
    files.write(tmp_path / "adapter", handle, base="base")
    again = ours()
    if name == "qlora":  # its file is a LoRA's, and says nothing of the base
        loaded = method("qlora").inject(again)
        loaded.load(files.read(tmp_path / "adapter").state)
    else:
        loaded = files.load(again, tmp_path / "adapter")
    torch.testing.assert_close(logits(again), learned, atol=1e-5, rtol=1e-5)
    assert loaded.state().keys() == files.read(tmp_path / "adapter").state.keys()


@each_method
def test_merging_changes_no_output_and_comes_back_bit_for_bit(name: str) -> None:
    model = ours()
    part = method(name)
    handle = part.inject(model)
    shake(handle)
    learned, before = logits(model), weights(model)
    if not part.mergeable:
        with pytest.raises(ModelError, match="cannot be merged"):
            handle.merge()
        return
    if name in ("qlora", "loftq"):
        with pytest.raises(ModelError, match="dequantise"):
            handle.merge()
        assert torch.equal(logits(model), learned)
    handle.merge(dequantise=True)
    # Merging also puts back the blocks that off-site tuning left out.
    learned_whole = logits(model) if name == "offsite" else learned
    torch.testing.assert_close(logits(model), learned_whole, atol=1e-5, rtol=1e-5)
    handle.unmerge()
    assert same(model, before)
    assert torch.equal(logits(model), learned)
    merged = handle.keep_merged()
    torch.testing.assert_close(logits(merged), learned_whole, atol=1e-5, rtol=1e-5)
    if name not in WITHOUT_GRADIENT:
        assert not [n for n, _ in merged.named_parameters() if ".parts." in n]


@with_gradient  # of the others the directions are drawn by the names of parameters
def test_any_module_gives_what_ours_gives(name: str, theirs: Any) -> None:
    model = ours()
    handle = method(name).inject(model)
    if name in OURS_ALONE:
        with pytest.raises(ModelError, match=name):
            method(name).inject(theirs)
        return
    other = method(name).inject(theirs)
    if name not in NOT_FRESH:
        assert torch.equal(logits(theirs), logits(theirs))
    shake(handle)
    if name in ("loftq", "qlora", "offsite"):
        return  # a packed matrix is cut elsewhere, or stored as it lies
    state = handle.state()
    assert state.keys() == other.state().keys()
    other.load(state)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    other.remove()


LIBRARY = ("lora", "rslora", "dora", "lora_fa", "adalora", "vera", "ia3", "prefix", "prompt")


@pytest.mark.parametrize("name", LIBRARY)
def test_files_go_to_the_library_and_come_back(name: str, theirs: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = ours()
    handle = method(name).inject(model)
    shake(handle)
    learned = logits(model)
    files.write(tmp_path / "adapter", handle, base="base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
        result = other(input_ids=X).logits.detach()
        result = result[:, -X.shape[1] :]
        torch.testing.assert_close(result, learned, atol=1e-5, rtol=1e-5)
        other.save_pretrained(str(tmp_path / "back"))
    again = ours()
    files.load(again, tmp_path / "back")
    torch.testing.assert_close(logits(again), learned, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- single methods


def test_adalora_deals_one_budget() -> None:
    model = ours().train()
    part = method("adalora", r=6, target=2, begin=0.0, end=0.6, orthogonal=0.0)
    handle = part.inject(model)
    optimizer = torch.optim.AdamW(list(handle.trainable().values()), lr=3e-2)
    ranks = []
    for step in range(20):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss_sum(X, X.roll(-1, 1)) / X.numel())
        handle.before_update(step, 20)
        optimizer.step()
        handle.after_update(step, 20)
        ranks.append([int((p != 0).sum()) for n, p in handle.trainable().items() if "_E" in n])
    totals = [sum(step) for step in ranks]
    assert totals[0] == 6 * 4 and totals == sorted(totals, reverse=True)
    assert totals[-1] == 2 * 4, "the budget is kept to the end"
    assert len(set(ranks[-1])) > 1, "matrices have ranks of their own"


def test_dylora_trains_what_it_draws() -> None:
    model = ours().train()
    handle = method("dylora", r=8).inject(model)
    up = next(p for n, p in handle.trainable().items() if "lora_B" in n)
    seen = set()
    for step in range(12):
        handle.before_step(step, 12)
        model.zero_grad()
        torch.autograd.backward(model.loss_sum(X, X.roll(-1, 1)))
        seen.add(int((up.grad.abs().sum(0) > 0).sum()))
    assert len(seen) > 3


def test_offsite_trains_the_ends_and_gives_the_middle_back() -> None:
    from shoal.train.peft.run.offsite import kept_of

    model = Transformer(CONFIG.model_copy(update={"num_layers": 6}))
    init_weights(model, 0)
    model.eval()
    before, plain = weights(model), logits(model)
    handle = method("offsite", last=1, keep=0.5).inject(model)
    assert len(model.blocks) == 4
    assert not torch.equal(logits(model), plain)
    handle.merge()
    assert len(model.blocks) == 6
    assert torch.equal(logits(model), plain), "untrained ends around all blocks are the model"
    shake(handle)
    now = weights(model)
    changed = {n.split(".")[1] for n in now if not torch.equal(now[n], before[n])}
    assert changed == {"0", "5"}
    handle.remove()
    assert same(model, before)
    assert kept_of(4, 0.5) == [0, 3]
    assert kept_of(5, 0.2) == [2]
    assert kept_of(5, 0.0) == []
    with pytest.raises(ConfigError, match=r"offsite\.first = 5.*6 blocks"):
        method("offsite", first=5, last=1).inject(model)
    with pytest.raises(ConfigError, match="works on whole blocks"):
        method("offsite").inject(model, "*.q_proj")


def test_nf4_is_the_published_one() -> None:
    # The quantiles of a normal distribution, as the paper's appendix makes them.
    from scipy.stats import norm

    from shoal.kernel.formats import weight_format
    from shoal.kernel.formats.normal import CODEBOOK
    from shoal.train.peft.run.nf4 import NF4Linear, dequantise, to_nf4

    offset = 0.9677083
    high = norm.ppf(torch.linspace(offset, 0.5, 9)[:-1].numpy())
    low = -norm.ppf(torch.linspace(offset, 0.5, 8)[:-1].numpy())
    values = torch.tensor(sorted([*low, 0.0, *high]))
    torch.testing.assert_close(
        values / values.max(), torch.tensor(CODEBOOK, dtype=values.dtype), atol=1e-5, rtol=1e-5
    )
    exact = torch.tensor(CODEBOOK).repeat(64, 4)
    again = dequantise(to_nf4(exact, 64), (64, 64))
    torch.testing.assert_close(again, exact)
    linear = torch.nn.Linear(256, 256, bias=False)
    layer = NF4Linear(linear, 64)
    assert layer.nbytes <= 0.27 * 2 * linear.weight.numel()
    assert not list(layer.parameters()), "no plain weight is kept"
    error = (layer.dense() - linear.weight).norm() / linear.weight.norm()
    assert error < 0.1
    # But for the scales, which are quantised once more, it is the format of the kernels.
    stored = weight_format("nf4-g64").quantize(linear.weight)
    assert (layer.codes.view(256, -1) == stored.tensors["codes"]).float().mean() > 0.97


def test_loftq_begins_nearer_to_the_base_than_qlora() -> None:
    plain = logits(ours())
    result = {}
    for name in ("qlora", "loftq"):
        model = ours()
        method(name, targets="*_proj", r=16).inject(model)
        result[name] = float((logits(model) - plain).detach().norm())
    assert result["loftq"] < 0.8 * result["qlora"]


def test_mezo_comes_back_and_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    model = ours()
    before = weights(model)
    handle = method("mezo").inject(model)
    handle.there_and_back(0)
    now = model.state_dict()
    assert max(float((now[k] - v).abs().max()) for k, v in before.items()) < 1e-6
    model = ours()
    handle = method("mezo").inject(model)
    with torch.no_grad():
        for step in range(3):
            handle.estimate(step, lambda: float(model.loss_sum(X, X.roll(-1, 1))), 1e-6)
    files.write(tmp_path / "adapter", handle)
    assert (tmp_path / "adapter" / files.WEIGHTS).stat().st_size < 1000
    again = ours()
    files.load(again, tmp_path / "adapter")
    assert same(again, weights(model))


def test_sparse_methods_leave_all_other_entries_alone() -> None:
    model = ours()
    before = weights(model)
    handle = method("pafi", share=0.02).inject(model)
    shake(handle)
    handle.merge()
    for owner in ("blocks.0.attention.qkv_proj", "blocks.1.mlp.down_proj"):
        old, new = before[f"{owner}.weight"], model.get_submodule(owner).base.weight
        changed = old != new
        assert 0 < int(changed.sum()) <= 0.02 * old.numel() + 3
        assert old[changed].abs().max() <= old[~changed].abs().max()


def test_fishmask_takes_the_entries_with_the_largest_gradients() -> None:
    model = ours().train()
    handle = method("fishmask", targets="*.o_proj", share=0.01).inject(model)
    targets = X.roll(-1, 1)
    handle.look(lambda _: torch.autograd.backward(model.loss_sum(X, targets)), lambda _: None)
    plain = ours().train()
    torch.autograd.backward(plain.loss_sum(X, targets))
    for layer in range(2):
        places = handle.state()[f"model.layers.{layer}.self_attn.o_proj.places"]
        gradient = plain.blocks[layer].attention.o_proj.weight.grad
        best = gradient.abs().view(-1).topk(len(places)).indices
        assert set(best.tolist()) == set(places.tolist())


def test_lora_fa_keeps_no_inputs() -> None:
    def kept(name: str) -> int:
        model = ours().train()
        method(name, targets="*_proj").inject(model)
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (
                sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t
            ),
            lambda t: t,
        ):
            model.loss_sum(X, X.roll(-1, 1))
        return sum(sizes.values())

    assert kept("lora_fa") < kept("lora")


def test_gradients_are_those_of_the_library(theirs: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = ours().train()
    handle = method("lora", targets="*_proj").inject(model)
    shake(handle)
    files.write(tmp_path / "adapter", handle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"), is_trainable=True)
    torch.autograd.backward((model(X) ** 2).mean())
    torch.autograd.backward((other(input_ids=X).logits ** 2).mean())
    result = {
        n.replace(".default", "").removeprefix("base_model.model."): p.grad
        for n, p in other.named_parameters()
        if p.grad is not None
    }
    assert result.keys() == handle.trainable().keys()
    for n, p in handle.trainable().items():
        torch.testing.assert_close(p.grad, result[n], atol=1e-5, rtol=1e-3)


# ---------------------------------------------------------------------- bad input


def test_patterns_that_match_nothing() -> None:
    with pytest.raises(ConfigError, match=r"matches no linear layer; there are .*q_proj"):
        method("lora", targets="*.query").inject(ours())
    with pytest.raises(ConfigError, match="matches no branch"):
        method("adapter", targets="*.ffn").inject(ours())


@pytest.mark.parametrize("name", ["lora", "dora", "adalora", "dylora", "lora_fa", "qlora"])
def test_a_rank_beyond_the_matrix_leaves_the_model_alone(name: str) -> None:
    model = ours()
    before = weights(model)
    with pytest.raises(ConfigError, match=r"finetune\.\w+\.r = 33: .*k_proj is 32 x 64"):
        method(name, r=33, targets="*.k_proj").inject(model)
    assert same(model, before)


def test_two_methods_on_one_weight() -> None:
    model = ours()
    method("lora").inject(model)
    before = weights(model)
    with pytest.raises(ConfigError, match="already changed by a method"):
        method("dora").inject(model)
    assert same(model, before)
    method("adapter").inject(model)
    with pytest.raises(ConfigError, match="already changed by a method"):
        method("parallel_adapter").inject(model)


def test_states_of_something_else() -> None:
    handle = method("lora").inject(ours())
    state = handle.state()
    with pytest.raises(CheckpointError, match="is missing"):
        handle.load(dict(list(state.items())[1:]))
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        handle.load({**state, "more": torch.zeros(1)})
    name = next(iter(state))
    with pytest.raises(CheckpointError, match="the shape"):
        handle.load({**state, name: torch.zeros(3, 3)})


def test_adapters_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        files.read(tmp_path)
    (tmp_path / files.WEIGHTS).write_bytes(b"no")
    (tmp_path / files.CONFIG).write_text('{"peft_type": "BOFT"}')
    with pytest.raises(ModelError, match="cannot be read"):
        files.read(tmp_path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / files.WEIGHTS)
    with pytest.raises(ModelError, match="peft_type = 'BOFT'"):
        files.read(tmp_path)
    save_file({"x": torch.tensor([0.0, float("inf")])}, tmp_path / files.WEIGHTS)
    with pytest.raises(ModelError, match="x: 1 of 2 values are NaN or infinite"):
        files.read(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / files.WEIGHTS)
    (tmp_path / files.CONFIG).write_text('{"peft_type": "LORA", "modules_to_save": ["lm_head"]}')
    with pytest.raises(ModelError, match="modules_to_save"):
        files.read(tmp_path)
