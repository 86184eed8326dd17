"""The nets of drafters beside plain definitions of them, and the directory that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from shoal.core.errors import ModelError  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.drafters.falcon import SemiAutoregressive, relaxed_mask  # noqa: E402
from shoal.model.drafters.files import (  # noqa: E402
    DrafterConfig,
    check_target,
    fingerprint,
    read,
    tokenizer_hash,
    write,
)
from shoal.model.drafters.fusion import FusionDrafter  # noqa: E402
from shoal.model.drafters.medusa import MedusaHeads  # noqa: E402
from shoal.model.drafters.ppd import PromptTokens, prompt_mask, prompt_positions  # noqa: E402
from shoal.model.initialise import empty, init_weights  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=40,
    hidden=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_hidden=24,
    max_position=64,
)


def model(seed: int = 0, **changes: object) -> Transformer:
    made = empty(CONFIG.model_copy(update=changes))
    init_weights(made, seed)
    return made.double()


def test_a_block_of_places_sees_all_of_itself() -> None:
    """The mask, place by place: what lies before, and the own block."""
    for k in (1, 2, 3, 4):
        for shift in range(k):
            mask = relaxed_mask(11, k, torch.float32, shift=shift)
            for query in range(11):
                for key in range(11):
                    same = (query + shift) // k == (key + shift) // k
                    assert (mask[query, key] == 0) == (key <= query or same)


def test_one_place_a_block_is_causal() -> None:
    """k = 1: the relaxed mask changes nothing, and the net guesses features one by one."""
    net = SemiAutoregressive(CONFIG, 1).double()
    features, embeds = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    causal = torch.full((9, 9), float("-inf")).triu_(1)
    assert torch.equal(relaxed_mask(9, 1, torch.float32), causal)
    state, cache, parts = None, net.cache(2, 9, torch.float64), []
    with torch.no_grad():
        whole = net(features, embeds)
        for place in range(9):
            one = slice(place, place + 1)
            x, state = net.mixed(features[:, one], embeds[:, one], state)
            parts.append(net.seen(x, torch.tensor([place]), None, cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_falcon_looks_no_further_than_its_block() -> None:
    net = SemiAutoregressive(CONFIG, 2).double()
    features, embeds = torch.randn(2, 1, 8, 16, dtype=torch.float64, requires_grad=True)
    out = net(features, embeds)
    for place in range(8):
        (grad,) = torch.autograd.grad(out[0, place].sum(), features, retain_graph=True)
        reached = grad[0].abs().sum(-1).nonzero().flatten()
        assert reached.max() == place // 2 * 2 + 1


def test_gate_open_or_shut_takes_one_side_alone() -> None:
    net = FusionDrafter(CONFIG, 1).double()
    features, embeds = torch.randn(2, 1, 5, 16, dtype=torch.float64)
    other = torch.randn_like(features)
    for z, changed in ((1.0, (features, other)), (0.0, (other, embeds))):
        one, _ = net.mixed(features, embeds, z=z)
        two, _ = net.mixed(*changed, z=z)
        torch.testing.assert_close(one, two, rtol=0, atol=0)
        assert not torch.allclose(one, net.mixed(features, embeds)[0])


def test_prompt_rows_see_the_context_and_their_own_member() -> None:
    """Every cell of the mask by the rule, and positions behind the place."""
    length, places, m, members = 5, torch.tensor([1, 4]), 3, 2
    mask = prompt_mask(length, places, m, members, torch.float32)
    rows = [("text", t, 0, 0) for t in range(length)]
    rows += [("prompt", t, i, j) for t in (1, 4) for i in range(1, m + 1) for j in range(members)]
    assert mask.shape == (len(rows), len(rows))
    for a, (kind, place, token, member) in enumerate(rows):
        for b, (seen, at, before, other) in enumerate(rows):
            if seen == "text":
                right = at <= place
            else:
                right = kind == "prompt" and (place, member) == (at, other) and before <= token
            assert (mask[a, b] == 0) == right, (rows[a], rows[b])
    assert prompt_positions(places, m, members).tolist() == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_prompt_rows_change_nothing_for_the_text() -> None:
    """Logits of ordinary rows beside prompt rows, to 1e-12; the prompt rows' with more of them."""
    from shoal.model.rope import tables_at
    from shoal.train.drafters.run.ppd import behind

    target = model()
    tokens = torch.randint(0, 40, (2, 7))
    prompts = PromptTokens(2, 3, 16).double()
    torch.nn.init.normal_(prompts.embeddings)
    places = torch.tensor([2, 6])
    x = torch.cat((target.embed(tokens), prompts.group().repeat(2, 1).expand(2, -1, -1)), 1)
    at = torch.cat((torch.arange(7), prompt_positions(places, 2, 3)))
    cos, sin = tables_at(at.float(), *target.unstretched, torch.float64)
    mask = prompt_mask(7, places, 2, 3, torch.float64)[None, None]
    for block in target.blocks:
        x = block(x, cos, sin, mask)
    x = target.norm(x)
    torch.testing.assert_close(target.logits(x[:, :7]), target(tokens), rtol=0, atol=1e-12)
    result = behind(target, tokens, prompts, places)
    torch.testing.assert_close(result.flatten(1, 2), x[:, 7:], rtol=0, atol=1e-12)
    # One group alone is the same group.
    alone = behind(target, tokens, prompts, places[:1])
    torch.testing.assert_close(alone, result[:, :1], rtol=0, atol=1e-12)
    logits = target.logits(result[:, 0])
    mean = prompts.mean(logits)
    torch.testing.assert_close(mean[:, 1], logits[:, 3:].mean(1))


def drafter(**changes: object) -> tuple[DrafterConfig, dict[str, Tensor]]:
    config = DrafterConfig(
        name="medusa",
        options={"heads": 2},
        target="0123",
        tokenizer="4567",
        vocab_size=40,
        hidden=16,
        calibration=((0.5, 0.25), (0.25, 0.125)),
    )
    heads = MedusaHeads.of(model().output_weight.detach(), 2)
    return config.model_copy(update=changes), dict(heads.state_dict())


def test_directory_keeps_what_it_was_given(tmp_path: Path) -> None:
    config, state = drafter()
    write(tmp_path / "d", config, state)
    with pytest.raises(ModelError, match="exists already"):
        write(tmp_path / "d", config, state)
    result = read(tmp_path / "d")
    assert result.config == config
    assert {name: value.tolist() for name, value in result.state.items()} == {
        name: value.tolist() for name, value in state.items()
    }
    assert sorted(file.name for file in (tmp_path / "d").iterdir()) == [
        "drafter.json",
        "drafter.safetensors",
    ]


def test_another_target_or_tokenizer_is_refused() -> None:
    config, _ = drafter()
    check_target(config, target="0123", tokenizer="4567", where="d")
    with pytest.raises(ModelError, match=r"d: trained for the target 0123, .* is 89ab"):
        check_target(config, target="89ab", tokenizer="4567", where="d")
    with pytest.raises(ModelError, match=r"d: trained for the tokenizer 4567, .* is none"):
        check_target(config, target="0123", tokenizer="", where="d")


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"drafter\.json: missing"):
        read(tmp_path)
    config, state = drafter()
    write(tmp_path / "d", config, state)
    weights = tmp_path / "d" / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        read(tmp_path / "d")
    file = tmp_path / "d" / "drafter.json"
    for wrong in ("[]", "{", json.dumps({**config.model_dump(), "calibration": [[2.0]]})):
        file.write_text(wrong)
        with pytest.raises(ModelError, match=r"drafter\.json|cannot be read"):
            read(tmp_path / "d")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    config, state = drafter()
    name = list(state)[-1]
    state[name] = state[name].clone()
    state[name].view(-1)[-1] = bad
    write(tmp_path / "d", config, state)
    with pytest.raises(ModelError, match=rf"d: {name}: 1 of \d+ values are NaN or infinite"):
        read(tmp_path / "d")


@pytest.mark.parametrize("tied", [False, True])
def test_fingerprint_is_of_all_bytes(tmp_path: Path, tied: bool) -> None:
    """The same however the tensors are spread over files; another for one changed bit."""
    one = model(tied=tied).float()
    huggingface.write(tmp_path / "one", one)
    mark = fingerprint(tmp_path / "one")
    huggingface.write(tmp_path / "same", one)
    assert fingerprint(tmp_path / "same") == mark
    split(tmp_path / "same")
    assert fingerprint(tmp_path / "same") == mark
    huggingface.write(tmp_path / "other", model(1, tied=tied).float())
    assert fingerprint(tmp_path / "other") != mark
    # The last value of a matrix, by less than bf16 tells apart.
    with torch.no_grad():
        value = one.blocks[1].mlp.down_proj.weight[-1, -1]
        value.copy_(torch.nextafter(value, value + 1))
    huggingface.write(tmp_path / "changed", one)
    assert fingerprint(tmp_path / "changed") != mark


def split(directory: Path) -> None:
    """Put the tensors of a model directory into two files with an index."""
    from safetensors.torch import load_file, save_file

    whole = load_file(directory / "model.safetensors")
    names = sorted(whole)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_digests_are_computed_once_for_a_file(tmp_path: Path, monkeypatch) -> None:
    """And anew where the file was written to in place, its size and time as they were."""
    import os

    from shoal.model import digests

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)
    huggingface.write(tmp_path / "one", model().float())
    file = tmp_path / "one" / "model.safetensors"
    mark, computed = fingerprint(tmp_path / "one"), digests._computed
    monkeypatch.setattr(digests, "_computed", lambda path: pytest.fail("computed again"))
    assert fingerprint(tmp_path / "one") == mark
    monkeypatch.setattr(digests, "_computed", computed)
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(tmp_path / "one") != mark
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="safetensors"):
        fingerprint(tmp_path / "one")


def test_a_drafter_with_a_fingerprint_of_some_values_is_refused() -> None:
    config, _ = drafter()
    here = "sha256-" + "0" * 32
    with pytest.raises(ModelError, match=f'earlier version.*"target": "{here}" in d/drafter'):
        check_target(config, target=here, tokenizer="4567", where="d")


def test_tokenizer_hash_is_of_what_it_does(tmp_path: Path) -> None:
    assert tokenizer_hash(tmp_path) == ""
    file = tmp_path / "tokenizer.json"
    raw = {"model": {"vocab": {"a": 0}, "merges": []}, "truncation": None}
    file.write_text(json.dumps(raw))
    mark = tokenizer_hash(tmp_path)
    file.write_text(json.dumps({**raw, "truncation": {"max_length": 5}}, indent=4))
    assert tokenizer_hash(file) == mark
    file.write_text(json.dumps({"model": {"vocab": {"b": 0}, "merges": []}}))
    assert tokenizer_hash(file) != mark
    file.write_text("no")
    with pytest.raises(ModelError, match="no tokenizer"):
        tokenizer_hash(file)
