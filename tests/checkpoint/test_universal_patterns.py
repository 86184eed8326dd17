"""Patterns put together what ranks held, whatever its parts, padding and copies."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_files import Dumps, config, rank_files

from shoal.checkpoint.universal.atomic import UniversalCheckpoint
from shoal.checkpoint.universal.convert import consolidate
from shoal.checkpoint.universal.generate import boxes_of_run
from shoal.checkpoint.universal.protocols import Coord, Fragment, RankLayout
from shoal.checkpoint.universal.spec import UniversalSpec, default_spec
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, ConfigError, UnknownKeyError, UnknownPartError
from shoal.ir.job import Parallel
from shoal.parallel.tensor.slices import slices, take, whole_shapes


def whole(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def put_together(tmp_path: Path, name: str, rule: str, locals_, layout: RankLayout, **cuts):
    held = rank_files([(name, key, at, t) for key, at, t in locals_], layout.dp, **cuts)
    place = consolidate(Dumps(tmp_path / "s", layout, [{"match": ".*", "rule": rule}], held))
    return UniversalCheckpoint(place)


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    q=st.integers(1, 5),
    k=st.integers(1, 2),
    dim=st.sampled_from([0, 1]),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_fused_parts_of_different_sizes(tmp_path_factory, tp, q, k, dim, cuts):
    parts = [q * tp, k * tp, k * tp]
    shape = (sum(parts), 3) if dim == 0 else (3, sum(parts))
    locals_ = []
    truth = {key: whole(shape, number) for number, key in enumerate(("fp32", "exp_avg"))}
    for key, tensor in truth.items():
        # Cut by hand: every part by itself, then behind each other on each rank.
        chunks = [part.chunk(tp, dim) for part in tensor.split(parts, dim)]
        for rank in range(tp):
            local = torch.cat([chunk[rank] for chunk in chunks], dim)
            locals_.append((key, Coord(tp=rank), local))
    result = put_together(
        tmp_path_factory.mktemp("u"),
        "w",
        f"fused(dim={dim}, parts={parts})",
        locals_,
        RankLayout(tp=tp, dp=len(cuts) + 1),
        cuts=cuts,
    )
    assert torch.equal(result.tensor("model.w"), truth["fp32"])
    assert torch.equal(result.tensor("optimizer.w.exp_avg"), truth["exp_avg"])


def test_fragments_put_behind_each_other_are_not_a_fused_matrix(tmp_path):
    tensor = whole((8, 2))
    q, k, v = tensor.split([4, 2, 2])
    locals_ = [
        ("fp32", Coord(tp=r), torch.cat([p.chunk(2)[r] for p in (q, k, v)])) for r in range(2)
    ]
    wrong = put_together(tmp_path, "w", "fragment(dim=0)", locals_, RankLayout(tp=2))
    assert wrong.shape("model.w") == (8, 2)
    assert not torch.equal(wrong.tensor("model.w"), tensor)


def test_vocabulary_of_509_padded_to_512_is_509_again(tmp_path):
    tensor = whole((509, 3))
    padded = torch.cat([tensor, torch.zeros(3, 3)])
    locals_ = [("fp32", Coord(tp=r), padded.chunk(4)[r]) for r in range(4)]
    result = put_together(
        tmp_path, "embed.weight", "fragment(dim=0, size=509)", locals_, RankLayout(tp=4, dp=3)
    )
    assert torch.equal(result.tensor("model.embed.weight"), tensor)
    spec = UniversalSpec.parse([{"match": ".*", "rule": "fragment(dim=0, size=509, multiple=128)"}])
    last = spec.pattern("x").cut("x", (509, 3), (4,), (3,))
    assert (last.local_shape, last.padding) == ((128, 3), 3)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fragments_along_any_dimension_of_any_extent(tmp_path, dim):
    tensor = whole((4, 6, 5))
    sizes = {0: [1, 3], 1: [4, 2], 2: [2, 3]}[dim]
    locals_ = [("fp32", Coord(tp=r), part) for r, part in enumerate(tensor.split(sizes, dim))]
    result = put_together(tmp_path, "w", f"fragment({dim})", locals_, RankLayout(tp=2, dp=4))
    assert torch.equal(result.tensor("model.w"), tensor)


@pytest.mark.parametrize(("shard_dim", "parts"), [(1, [4, 4]), (2, [6])])
def test_experts_over_two_axes(tmp_path, shard_dim, parts):
    tensor = whole((4, 8, 6))
    locals_ = []
    for ep, tp in itertools.product(range(2), range(2)):
        mine = tensor.chunk(2)[ep]
        cut = [part.chunk(2, shard_dim)[tp] for part in mine.split(parts, shard_dim)]
        locals_.append(("fp32", Coord(ep=ep, tp=tp), torch.cat(cut, shard_dim)))
    rule = f"moe(shard_dim={shard_dim}, parts={parts})"
    result = put_together(tmp_path, "w", rule, locals_, RankLayout(tp=2, ep=2, dp=2))
    assert torch.equal(result.tensor("model.w"), tensor)


def test_copies(tmp_path):
    tensor = whole((5,))
    same = [("fp32", Coord(pp=p, tp=t), tensor) for p in range(2) for t in range(2)]
    result = put_together(tmp_path / "a", "n", "replicated", same, RankLayout(tp=2, pp=2))
    assert torch.equal(result.tensor("model.n"), tensor)
    drifted = [("fp32", Coord(tp=t), tensor + t) for t in range(2)]
    result = put_together(tmp_path / "b", "n", "average", drifted, RankLayout(tp=2))
    assert torch.allclose(result.tensor("model.n"), tensor + 0.5)
    near = [("fp32", Coord(tp=t), tensor + 1e-3 * t) for t in range(2)]
    result = put_together(tmp_path / "c", "n", "replicated(tolerance=0.01)", near, RankLayout(tp=2))
    assert torch.equal(result.tensor("model.n"), tensor)
    alone = [("fp32", Coord(pp=1), tensor)]
    result = put_together(tmp_path / "d", "n", "unique", alone, RankLayout(pp=2))
    assert torch.equal(result.tensor("model.n"), tensor)


def test_tied_tensors_are_stored_once_and_read_twice(tmp_path):
    tensor = whole((6, 2))
    locals_ = [
        (name, key, Coord(pp=pp, tp=t), tensor.chunk(2)[t] * scale)
        for name, pp in (("embed.weight", 0), ("output.weight", 1))
        for key, scale in (("fp32", 1), ("exp_avg", 2))
        for t in range(2)
    ]
    rules = [
        {"match": ".*", "rule": "fragment(0)"},
        {"rule": "tied(embed.weight, output.weight)"},
    ]
    source = Dumps(tmp_path / "s", RankLayout(tp=2, pp=2), rules, rank_files(locals_))
    place = consolidate(source)
    assert sorted(p.name for p in (place / "zero").iterdir()) == ["embed.weight"]
    checkpoint = UniversalCheckpoint(place)
    for name in ("embed.weight", "output.weight"):
        assert torch.equal(checkpoint.tensor(f"model.{name}"), tensor)
        assert torch.equal(checkpoint.tensor(f"optimizer.{name}.exp_avg"), 2 * tensor)
    locals_[-1] = (*locals_[-1][:3], locals_[-1][3] + 1)
    with pytest.raises(CheckpointError, match=r"tied\(embed.weight, output.weight\): exp_avg"):
        consolidate(Dumps(tmp_path / "t", RankLayout(tp=2, pp=2), rules, rank_files(locals_)))


MODELS = {
    "grouped": config(),
    "odd vocabulary": config(vocab_size=31, tied=True),
    "biases": config(family="qwen2", attention_bias=True),
    "norms of heads": config(family="qwen3", qk_norm=True),
    "experts": config(family="mixtral", num_experts=4, top_k=2),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_generated_spec_cuts_as_training_does(model, tp):
    chosen, parallel = MODELS[model], Parallel(tp=tp)
    spec = default_spec(chosen)
    for rank in range(tp):
        held = slices(chosen, parallel, rank)
        for name, shape in whole_shapes(chosen).items():
            counts = RankLayout(tp=tp).sizes(spec.pattern(name).axes)
            place = (0,) * (len(counts) - 1) + (rank,) if counts else ()
            cut = spec.pattern(name).cut(name, shape, counts, place)
            numbers = torch.arange(math.prod(shape)).view(shape)
            assert torch.equal(take(numbers, cut), take(numbers, held[name]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_of_a_run_are_its_elements_in_order(shape, data):
    numbers = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    boxes = boxes_of_run(tuple(shape), start, stop)
    origin = Box.whole(tuple(shape))
    results = [numbers.view(shape)[box.slices(origin)].reshape(-1) for box in boxes]
    assert torch.cat([numbers[:0], *results]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_spec_reads_what_it_writes():
    text = """
- match: "layers\\\\.\\\\d+\\\\.attn\\\\.qkv\\\\.weight"
  rule: fused(dim=0, parts=[2048,256,256])
- match: "e"
  rule: {name: fragment, size: 509}
- match: ".*norm"
  rule: average
- rule: tied("a.0.w", b.w)
"""
    spec = UniversalSpec.parse(text)
    assert UniversalSpec.parse(spec.text()).plain() == spec.plain()
    assert spec.pattern("layers.3.attn.qkv.weight").arity == 3
    assert spec.pattern("e").cut("e", (509, 2), (4,), (3,)).padding == 3
    assert spec.tied == {"b.w": "a.0.w"}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{}", ConfigError, "expected a list"),
        ("- match: x", ConfigError, "expected the keys match and rule"),
        ("- {match: x, rule: fold}", UnknownPartError, "expected one of unique, replicated"),
        ("- {match: x, rule: fragment(dims=1)}", UnknownKeyError, "did you mean"),
        ("- {match: x, rule: fragment(dim=-1)}", ConfigError, "at least 0"),
        ("- {match: x, rule: 'fused(parts=[1, 0])'}", ConfigError, "above 0"),
        ("- {match: '(', rule: average}", ConfigError, "no regular expression"),
        ('- {match: x, rule: \'__import__("os").system("x")\'}', ConfigError, "cannot be read"),
        ("- {match: x, rule: 'fused(parts=open(\"x\"))'}", ConfigError, "cannot be read"),
        ("- {rule: tied(a)}", ConfigError, "two different names"),
        ("- {rule: average}", ConfigError, "match is missing"),
    ],
)
def test_a_spec_that_is_none(text, error, said):
    with pytest.raises(error, match=said):
        UniversalSpec.parse(text)


def two(tmp_path, rules, locals_, layout=None):
    held = rank_files([("w", key, at, t) for key, at, t in locals_], 1)
    return Dumps(tmp_path / "s", layout or RankLayout(tp=2), rules, held)


HALVES = [("fp32", Coord(tp=0), torch.ones(2, 2)), ("fp32", Coord(tp=1), torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("rules", "locals_", "said"),
    [
        ([("v", "average")], HALVES, "no pattern of the spec matches"),
        ([("w", "unique")], HALVES, "unique and 2 ranks hold it"),
        ([("w", "fragment(dim=5)")], HALVES, "names dim 5"),
        ([("w", "fragment(dim=0, size=9)")], HALVES, "size=9; a rank is missing"),
        ([("w", "fused(parts=[3, 2])")], HALVES, "parts .3, 2. make 5"),
        ([("w", "fused(parts=[3, 1])")], HALVES, "a part of 3 along dim 0 cannot be divided by 2"),
        ([("w", "fragment(dim=0)")], HALVES[:1], "fragments of 1 ranks and its pattern wants 2"),
        (
            [("w", "fused(parts=[2, 2])"), (".*", "fused(parts=[2, 1, 1])")],
            HALVES,
            "two patterns of different arity",
        ),
        (
            [("w", "replicated")],
            [HALVES[0], ("fp32", Coord(tp=1), torch.ones(2, 2) + 0.5)],
            "w: fp32 differs by up to 0.5 between",
        ),
        (
            [("w", "fragment(dim=0)")],
            [HALVES[0], ("fp32", Coord(tp=1), torch.ones(2, 3))],
            "cannot be put together along dim 0",
        ),
        ([("w", "fragment(dim=0)")], [("exp_avg", *one[1:]) for one in HALVES], "and no weight"),
    ],
)
def test_fragments_that_do_not_fit(tmp_path, rules, locals_, said):
    source = two(tmp_path, [{"match": m, "rule": r} for m, r in rules], locals_)
    with pytest.raises(CheckpointError, match=said):
        consolidate(source)
    assert not (tmp_path / "s.universal").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(0, 3), (4, 8)], "gap: no file of pp 0, tp 0 holds the elements 3 to 3"),
        ([(0, 5)], "gap: no file of pp 0, tp 0 holds the elements 5 to 7"),
        ([(0, 5), (4, 8)], "overlaps"),
        ([(0, 8), (0, 8)], "overlaps"),
    ],
)
def test_gaps_and_overlaps(tmp_path, runs, said):
    flat = torch.arange(8.0)
    held = {}
    for rank, (start, stop) in enumerate(runs):
        at = Coord(dp=rank)
        held[at] = [Fragment("w", "fp32", at, (2, 4), start, flat[start:stop])]
    source = Dumps(
        tmp_path / "s", RankLayout(dp=len(runs)), [{"match": ".*", "rule": "unique"}], held
    )
    with pytest.raises(CheckpointError, match=said):
        consolidate(source)


def test_what_fp32_cannot_hold(tmp_path):
    locals_ = [("fp32", Coord(), torch.ones(2, dtype=torch.float64))]
    source = two(tmp_path, [{"match": ".*", "rule": "unique"}], locals_, RankLayout())
    with pytest.raises(CheckpointError, match="is of float64"):
        consolidate(source)


def test_a_target_without_padding_is_refused():
    spec = UniversalSpec.parse([{"match": ".*", "rule": "fragment(dim=1)"}])
    with pytest.raises(CheckpointError, match="5 along dim 1 cannot be divided by 2 tp ranks"):
        spec.pattern("w").cut("w", (4, 5), (2,), (0,))
    spec = UniversalSpec.parse([{"match": ".*", "rule": "moe(shard_dim=1)"}])
    with pytest.raises(CheckpointError, match="3 experts cannot be divided by 2 ep ranks"):
        spec.pattern("w").cut("w", (3, 4, 5), (2, 1), (0, 0))


def test_ties_of_different_patterns_are_refused(tmp_path):
    rules = [
        {"match": "a", "rule": "fragment(dim=0)"},
        {"match": "b", "rule": "replicated"},
        {"rule": "tied(a, b)"},
    ]
    spec = UniversalSpec.parse(rules)
    with pytest.raises(CheckpointError, match="their patterns differ"):
        spec.check(["a", "b"])
    with pytest.raises(CheckpointError, match="there is no parameter a"):
        spec.check(["b"])
