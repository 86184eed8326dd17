"""Formats of other systems: what is written is read back, and by their own readers."""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict

import pytest
import torch
from rank_files import config, saved, state_of
from stored import flip

from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
from shoal.checkpoint.formats.megatron_names import config_of, grouped, ungrouped
from shoal.checkpoint.formats.transfer import (
    convert_any,
    differences,
    format_of,
    open_any,
    transfer,
)
from shoal.checkpoint.inspect import find, listing, verify
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.errors import CheckpointError, ConfigError, CorruptError, ModelError

DENSE = config(vocab_size=29, tied=True)
EXPERTS = config(family="mixtral", num_experts=4, top_k=2)

WRITTEN = [
    ("universal", ""),
    ("dcp", ""),
    ("deepspeed", "dp=3,tp=2,pp=2"),
    ({"name": "deepspeed", "zero": 3}, "dp=3,tp=2"),
    ({"name": "megatron", "multiple": 4}, "tp=2,pp=2"),
    ("huggingface", ""),
    ("shoal", ""),
]


def equal(a, b) -> int:
    """Tensors that were compared, all of them equal."""
    result = list(differences(a, b))
    assert [one for one in result if one.kind != "equal"] == []
    return len(result)


def slow(case):
    """torch.distributed takes seconds to import."""
    return pytest.param(*case, marks=pytest.mark.slow) if case[0] == "dcp" else case


@pytest.mark.parametrize(("to", "mesh"), [slow(case) for case in WRITTEN])
@pytest.mark.parametrize(
    "model",
    [DENSE, pytest.param(EXPERTS, marks=pytest.mark.slow)],
    ids=["dense", "experts"],
)
def test_there_and_back(tmp_path, to, mesh, model):
    saved(tmp_path / "store", model)
    place = transfer(tmp_path / "store", tmp_path / "out", to, mesh=RankLayout.parse(mesh))
    name = to if isinstance(to, str) else to["name"]
    assert format_of(place) == name
    count = sum(1 for n in state_of(model) if name != "huggingface" or n.startswith("model."))
    assert equal(tmp_path / "store", place) == count
    assert equal(place, f"{name}:{place}") == count
    result = open_any(place)
    assert result.step == (0 if name == "huggingface" else 7)
    kind = find(place).kind
    assert kind == {"shoal": "run"}.get(name, name)
    assert len(listing(place)) == len(list(result.names())) or name == "huggingface"
    assert verify(place).ok


def test_by_way_of_another_split_is_the_same(tmp_path):
    """A -> B -> C is A -> C."""
    saved(tmp_path / "store", DENSE)
    a = transfer(tmp_path / "store", tmp_path / "a", "deepspeed", mesh=RankLayout(dp=4))
    zero3 = {"name": "deepspeed", "zero": 3}
    b = transfer(a, tmp_path / "b", zero3, mesh=RankLayout(dp=2, tp=2))
    c = transfer(b, tmp_path / "c", {"name": "megatron"}, mesh=RankLayout(tp=2, pp=2))
    d = transfer(a, tmp_path / "d", {"name": "megatron"}, mesh=RankLayout(tp=2, pp=2))
    assert equal(c, d) == equal(tmp_path / "store", c) == len(state_of(DENSE))
    for file in sorted(c.rglob("*.pt")):
        one, two = (torch.load(root / file.relative_to(c), weights_only=False) for root in (c, d))
        assert one["model"].keys() == two["model"].keys()
        assert all(torch.equal(one["model"][k], two["model"][k]) for k in one["model"])


@pytest.mark.slow
def test_torch_reads_what_is_exported_and_what_torch_writes_is_imported(tmp_path):
    import torch.distributed.checkpoint as dcp

    saved(tmp_path / "store", DENSE)
    place = transfer(tmp_path / "store", tmp_path / "dcp", "dcp")
    truth = state_of(DENSE)
    state = {"model": {"norm.weight": torch.zeros(8)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=place, no_dist=True)
        assert torch.equal(state["model"]["norm.weight"], truth["model.norm.weight"])
        theirs = {"layers": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3, "rng": b"x"}
        dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    result = open_any(tmp_path / "theirs")
    assert list(result.names()) == ["model.layers.w"]
    assert result.tensor("model.layers.w", (1, 1), (1, 2)).tolist() == [[4.0, 5.0]]
    assert (result.step, dict(result.meta)) == (0, {})


SHARDED = """
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def save(comm, place):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).view(7, 5)
    state = {"model": {f"w{d}": distribute_tensor(whole, mesh, [Shard(d)]) for d in (0, 1)}}
    dcp.save(state, checkpoint_id=place)
"""


@pytest.mark.slow
@pytest.mark.multi
def test_what_two_ranks_of_torch_have_sharded(tmp_path):
    from shoal.parallel.comm.processes import run_processes

    (tmp_path / "ranks.py").write_text(SHARDED)
    run_processes(f"{tmp_path / 'ranks.py'}:save", 2, {"place": str(tmp_path / "dcp")})
    result = open_any(tmp_path / "dcp")
    whole = torch.arange(35.0).view(7, 5)
    for name in ("model.w0", "model.w1"):
        assert "and 1 more" in result.where(name)
        assert torch.equal(result.tensor(name), whole)
        assert torch.equal(result.tensor(name, (2, 1), (4, 3)), whole[2:6, 1:4])
    assert verify(tmp_path / "dcp").ok


# DeepSpeed's own files, without our tables ------------------------------------------------


def foreign(folder, zero, layout_dp=2, tables=False):
    """Two parameters over two dp ranks, as DeepSpeed itself fills its files."""
    folder.mkdir()
    truth = {"a.weight": torch.randn(5, 3), "b.bias": torch.randn(4)}
    flat = torch.cat([t.reshape(-1) for t in truth.values()])
    shapes = [OrderedDict((name, t.shape) for name, t in truth.items())]
    info = {
        "tp_replicated_parameter_patterns": ["b"],
        "vocabulary_parameter_patterns": ["a"],
        "original_vocab_size": 5,
    }
    states = {
        "param_shapes": shapes,
        "dp_world_size": layout_dp,
        "mp_world_size": 1,
        "global_steps": 9,
        "universal_checkpoint_info": info,
        "module": {},
    }
    share = -(-len(flat) // layout_dp)
    padded = torch.cat([flat, torch.zeros(share * layout_dp - len(flat))])
    for dp in range(layout_dp):
        name = f"zero_pp_rank_{dp}_mp_rank_00_"
        if zero == 3:
            mine = [t.reshape(-1) for t in truth.values()]
            mine = [torch.cat([t, torch.zeros(-len(t) % layout_dp)]) for t in mine]
            part = torch.cat([t.chunk(layout_dp)[dp] for t in mine])
            torch.save(states, folder / f"{name}model_states.pt")
        else:
            part = padded[dp * share : (dp + 1) * share]
            torch.save(states, folder / "mp_rank_00_model_states.pt")
        key = "fp32_flat_groups" if zero == 3 else "single_partition_of_fp32_groups"
        base = {"state": {0: {"exp_avg": 2 * part, "exp_avg_sq": 3 * part, "step": 9}}}
        inner = "optimizer_state_dict" if zero == 3 else "base_optimizer_state"
        state = {"zero_stage": zero, key: [part], inner: base}
        torch.save({"optimizer_state_dict": state}, folder / f"{name}optim_states.pt")
    return truth


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_flat_buffers_without_tables(tmp_path, zero):
    truth = foreign(tmp_path / "global_step9", zero)
    (tmp_path / "latest").write_text("global_step9")
    result = open_any(tmp_path)
    assert result.step == 9
    for name, tensor in truth.items():
        assert torch.equal(result.tensor(f"model.{name}"), tensor)
        assert torch.equal(result.tensor(f"optimizer.{name}.exp_avg_sq"), 3 * tensor)
        assert float(result.tensor(f"optimizer.{name}.step")) == 9


def test_patterns_that_deepspeed_does_not_say_are_given(tmp_path):
    foreign(tmp_path / "s", 1)
    file = tmp_path / "s" / "mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=True)
    states["universal_checkpoint_info"] = {"parameter_with_2_sub_params_cat_dim_0": ["a"]}
    torch.save(states, file)
    with pytest.raises(CheckpointError, match="fused parameters, whose parts it does not say"):
        open_any(tmp_path / "s")
    del states["universal_checkpoint_info"]
    torch.save(states, file)
    with pytest.raises(CheckpointError, match="does not say how its fragments combine"):
        open_any(tmp_path / "s")
    spec = tmp_path / "spec.yaml"
    spec.write_text("- {match: '.*', rule: unique}")
    assert convert_any(tmp_path / "s", tmp_path / "u", to="universal", spec=spec) == ""
    assert len(list(open_any(tmp_path / "u").names())) == 8
    assert UniversalSpec.load(spec).pattern("x").copies == "none"


def test_files_that_are_missing_or_damaged(tmp_path):
    saved(tmp_path / "store", DENSE)
    place = transfer(tmp_path / "store", tmp_path / "d", "deepspeed", mesh=RankLayout(dp=2, tp=2))
    folder = place / "global_step7"
    for name in ("zero_pp_rank_1_mp_rank_01_optim_states.pt", "mp_rank_01_model_states.pt"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: this rank's file is missing"):
            open_any(place)
        assert not verify(place).ok
        (folder / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(CorruptError, match=f"{name}: truncated"):
            open_any(place)
        (folder / name).write_bytes(data)
    name = "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    data = (folder / name).read_bytes()
    flip(folder / name, len(data) // 3)
    with pytest.raises(CorruptError, match=f"{name}"):
        open_any(place)
    assert not (place / "global_step7.universal").exists()
    with pytest.raises(CheckpointError, match="no such directory"):
        DeepSpeedDumps(tmp_path / "nothing")
    (place / "latest").write_text("../d")
    with pytest.raises(CheckpointError, match="no directory beside it"):
        DeepSpeedDumps(place)


def test_tables_that_lie(tmp_path):
    foreign(tmp_path / "s", 1)
    file = tmp_path / "s" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(file, weights_only=True)
    for table, said in [
        ({"a.weight": (0, 999)}, "puts a.weight at 0 to 999 of a buffer of 10"),
        ({"c": (0, 4)}, "its table names c"),
        ({"b.bias": (0, 8)}, "has elements beyond its shape"),
        ({"a.weight": (0, 4)}, "gap"),
    ]:
        content["optimizer_state_dict"]["param_slice_mappings"] = [table]
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=said):
            open_any(tmp_path / "s")
    for wrong in ({"zero_stage": 1}, {}, "text", 3, None):
        content["optimizer_state_dict"] = wrong
        torch.save(content, file)
        with pytest.raises(CorruptError, match="not laid out as its format says"):
            open_any(tmp_path / "s")
    states = torch.load(tmp_path / "s" / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save({**states, "dp_world_size": "two"}, tmp_path / "s" / "mp_rank_00_model_states.pt")
    with pytest.raises(CorruptError, match="no numbers of ranks"):
        open_any(tmp_path / "s")


# Megatron -----------------------------------------------------------------------------------


def test_groups_of_queries_keys_and_values():
    model = config(num_heads=6, num_kv_heads=2, head_dim=2)
    rows = {letter: [f"{letter}{n}" for n in range(6 if letter == "q" else 2)] for letter in "qkv"}
    ours = [*rows["q"], *rows["k"], *rows["v"]]
    theirs = ["q0", "q1", "q2", "k0", "v0", "q3", "q4", "q5", "k1", "v1"]
    numbers = torch.arange(10).repeat_interleave(2).view(20, 1)
    results = [ours[int(n)] for n in grouped(numbers, model)[::2, 0]]
    assert results == theirs
    assert torch.equal(ungrouped(grouped(numbers, model), model), numbers)


def test_megatrons_own_files_give_weights_and_say_what_they_leave_out(tmp_path):
    saved(tmp_path / "store", DENSE)
    place = transfer(tmp_path / "store", tmp_path / "m", "megatron", mesh=RankLayout(tp=2))
    for file in place.rglob("*.pt"):
        content = torch.load(file, weights_only=False)
        assert isinstance(content["args"], argparse.Namespace)
        del content["shoal"], content["optimizer"]["shoal_names"]
        layer = "decoder.layers.0"
        model = content["model"]
        # Kernels with a fused norm call it otherwise, and keep their scales beside.
        norm = model.pop(f"{layer}.input_layernorm.weight")
        model[f"{layer}.self_attention.linear_qkv.layer_norm_weight"] = norm
        model[f"{layer}.mlp.linear_fc1._extra_state"] = None
        torch.save(content, file)
    note = convert_any(place, tmp_path / "u", to="universal")
    assert "optimizer's state" in note
    result = list(differences(tmp_path / "store", tmp_path / "u"))
    assert {one.kind for one in result} == {"equal"}
    assert len(result) == len(state_of(DENSE)) // 4
    with pytest.raises(CheckpointError, match=r"args\.swiglu = False"):
        config_of(argparse.Namespace(swiglu=False), 8, "x")
    model["decoder.layers.0.mamba.weight"] = norm
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="belongs to no model that is built here"):
        open_any(place)


def test_meshes_that_cannot_be(tmp_path):
    saved(tmp_path / "store", config(num_layers=3, num_heads=2, num_kv_heads=1))
    for to, mesh, said in [
        ("megatron", "dp=2", "Megatron writes one copy"),
        ("megatron", "pp=2", "3 layers cannot be shared evenly"),
        ("deepspeed", "tp=4", "a part of 2 along dim 0 cannot be divided by 4 tp ranks"),
        ("deepspeed", "pp=5", "3 blocks cannot be shared by so many stages"),
        ("deepspeed", "ep=2", "experts are cut by their width"),
    ]:
        with pytest.raises((CheckpointError, ConfigError), match=said):
            transfer(tmp_path / "store", tmp_path / "o", to, mesh=RankLayout.parse(mesh))
        assert not (tmp_path / "o").exists()
    for text in ("dp", "dp=0", "xp=2", "dp=2;tp=2"):
        with pytest.raises(ConfigError, match="mesh"):
            RankLayout.parse(text)


# Differences and conversion -------------------------------------------------------------------


def test_differences_are_told_by_kind(tmp_path):
    saved(tmp_path / "a", DENSE)
    saved(tmp_path / "b", config(tied=False), seed=0)
    kinds = {one.name: one for one in differences(tmp_path / "a", tmp_path / "b")}
    assert kinds["model.output.weight"].kind == "only in B"
    assert kinds["model.norm.weight"].kind == "equal"
    transfer(tmp_path / "a", tmp_path / "hf", {"name": "huggingface", "dtype": "bf16"})
    result = {one.name: one for one in differences(tmp_path / "a", tmp_path / "hf")}
    one = result["model.norm.weight"]
    assert (one.kind, one.a, one.b) == ("values", "F32 8", "BF16 8")
    assert 0 < one.largest < 0.01
    assert 0 < one.share <= 1
    saved(tmp_path / "c", config(tied=True, ffn_hidden=16))
    kinds = {one.name: one.kind for one in differences(tmp_path / "a", tmp_path / "c")}
    assert kinds["model.blocks.0.mlp.down_proj.weight"] == "shape"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"to": "pickle"}, ConfigError, "expected one of shoal, huggingface"),
        ({"to": "dcp", "mesh": "dp=2"}, ConfigError, "no files for ranks"),
        ({"to": "dcp", "dtype": "bf16"}, ConfigError, "keeps what is stored"),
        ({"to": "deepspeed", "options": ["zero=4"]}, ConfigError, "1 to 3"),
        ({"to": "deepspeed", "options": ["zero"]}, ConfigError, "expected option=value"),
        ({"to": "dcp", "spec": "x"}, ConfigError, "no fragments to combine"),
    ],
)
def test_conversions_that_are_refused(tmp_path, given, error, said):
    from pathlib import Path

    saved(tmp_path / "store", DENSE)
    if "spec" in given:
        given = {**given, "spec": Path(given["spec"])}
    with pytest.raises(error, match=said):
        convert_any(tmp_path / "store", tmp_path / "o", **given)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        open_any(tmp_path / "x")
    with pytest.raises(ModelError, match="no known format"):
        open_any(tmp_path)
    with pytest.raises(ConfigError, match="'zip' is no format"):
        open_any("zip:x")
