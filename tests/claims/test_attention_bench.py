"""The benchmark of attention: masks, counts, wrong kernels, and the report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.claims.bench.attention.context import AttentionCase, context_row
from shoal.claims.bench.attention.harness import chosen, run
from shoal.claims.bench.attention.kernels import kernel_rows
from shoal.claims.bench.attention.masks import MASKS, build_mask, document_lengths
from shoal.claims.bench.attention.memory import LiveBytes, SavedBytes
from shoal.claims.bench.attention.reference import inputs, reference, worst
from shoal.claims.bench.attention.report import to_html
from shoal.claims.bench.attention.values import (
    AttentionReport,
    AttentionSettings,
    ContextRow,
    RankNetwork,
)
from shoal.core.errors import ConfigError, UnknownPartError
from shoal.core.parts import table
from shoal.ir.mask import Mask

POOL = (5, 9, 20, 33, 70, 400)
LENGTH, BLOCK = 64, 16


def _settings(**changes: Any) -> AttentionSettings:
    return AttentionSettings(
        **{
            "kernels": ("naive", "tiled", "varlen"),
            "masks": ("causal", "causal_document", "block_sparse_20"),
            "methods": ("zigzag", "ring", "ulysses"),
            "lengths": (LENGTH,),
            "context_lengths": (LENGTH,),
            "ranks": (2, 4),
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "repeats": 1,
            "block": BLOCK,
            "threads": 1,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def report() -> AttentionReport:
    return run(_settings(), pool=POOL)


def _mask(name: str, length: int = LENGTH, seed: int = 0) -> Mask:
    return build_mask(name, length, block=BLOCK, seed=seed, pool=POOL)


@pytest.mark.parametrize("name", MASKS)
def test_a_pattern_counts_its_cells(name: str) -> None:
    mask = _mask(name)
    assert mask.area() == int(mask.dense().sum())
    assert mask == _mask(name)
    assert mask.num_queries == LENGTH


def test_there_are_as_many_patterns_as_claimed() -> None:
    assert len(MASKS) >= 12
    assert len({_mask(name) for name in MASKS}) == len(MASKS)
    assert _mask("block_sparse_50") != _mask("block_sparse_50", seed=1)


def test_documents_fill_a_sequence() -> None:
    for index in range(20):
        result = document_lengths(LENGTH, seed=3, index=index, pool=POOL)
        assert sum(result) == LENGTH
        assert set(result[:-1]) <= set(POOL)
    with pytest.raises(ConfigError, match="at least one that fits"):
        document_lengths(4, seed=0, pool=POOL)


def test_every_cell_is_right_or_has_a_reason(report: AttentionReport) -> None:
    assert report.counts()["wrong"] == report.counts()["failed"] == 0
    assert len(report.kernels) == 9
    assert len(report.context) == 18
    for row in report.kernels:
        assert (row.status == "ok") == (row.error is not None)
        assert row.status == "ok" or row.reason
        assert (row.forward is not None) == (row.status == "ok")
        assert row.waste is None or row.waste >= 1
    refused = {(row.kernel, row.mask) for row in report.kernels if row.status == "unsupported"}
    assert refused == {("varlen", "block_sparse_20")}
    blocked = {(row.method, row.ranks) for row in report.context if row.status == "unsupported"}
    assert blocked == {("ulysses", 4)}


def without_times(report: AttentionReport) -> AttentionReport:
    """What no clock and no allocator said: equal for equal settings."""
    measured = dict.fromkeys(("forward", "backward", "saved_bytes", "peak_bytes"))
    rows = tuple(row.model_copy(update=measured) for row in report.kernels)
    return report.model_copy(update={"kernels": rows})


def test_the_same_seed_gives_the_same(report: AttentionReport) -> None:
    again = run(_settings(), pool=POOL)
    assert without_times(again) == without_times(report)
    assert again.context == report.context
    assert AttentionReport.model_validate(json.loads(report.model_dump_json())) == report


def test_a_wrong_kernel_is_said_to_be_wrong_and_not_timed() -> None:
    settings = _settings()
    parts = {"naive": table("attention_kernel").build("naive")}
    (row,) = kernel_rows(parts, "sliding", _mask("causal_sliding"), settings, seen=_mask("causal"))
    assert row.status == "wrong"
    assert "over 2e-05" in row.reason
    assert row.forward is None


class _Odd:
    """A kernel that somebody else wrote."""

    name = "odd"
    compiled = False

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self.run = run

    def refuses(self, mask: Mask, **options: Any) -> str | None:
        return None

    def prepare(self, mask: Mask, **options: Any) -> Callable[..., torch.Tensor]:
        return self.run

    def cells(self, mask: Mask) -> int:
        return mask.area()

    def held_bytes(self, mask: Mask, heads: int) -> int:
        return 0


def test_a_kernel_that_breaks_is_a_row() -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such\ninstruction")

    parts: Any = {"odd": _Odd(broken), "nan": _Odd(lambda q, k, v: (q + k + v) * float("nan"))}
    rows = kernel_rows(parts, "full", Mask.full(LENGTH), _settings(kv_heads=4))
    assert [row.status for row in rows] == ["failed", "wrong"]
    assert rows[0].reason == "RuntimeError: no such instruction"
    assert rows[1].error == float("inf")


def test_a_kernel_that_needs_too_much_memory_is_a_row() -> None:
    greedy: Any = _Odd(lambda q, k, v: q)
    greedy.held_bytes = lambda mask, heads: 2**60
    (row,) = kernel_rows({"greedy": greedy}, "full", Mask.full(LENGTH), _settings())
    assert row.status == "unsupported"
    assert "GB are free" in row.reason


def test_reference_is_the_definition() -> None:
    q, k, v, grad = inputs(1, 2, 1, LENGTH, 4, "fp64", 0)
    mask = _mask("block_sparse_20")
    result = reference(q, k, v, grad, mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / 2.0
    cells = torch.from_numpy(mask.dense())
    weights = torch.softmax(scores.masked_fill(~cells, -1e30), -1) * cells
    out = weights @ leaves[2]
    wanted = dict(zip(result, (out, *torch.autograd.grad(out, leaves, grad)), strict=True))
    assert worst(result, {name: x.detach() for name, x in wanted.items()})[0] < 1e-12


def test_live_results_are_counted() -> None:
    x = torch.zeros(256, requires_grad=True)
    with LiveBytes() as live, SavedBytes([x]) as saved:
        y = x * 2.0  # 1 KiB
        z = y.exp()  # 2 KiB live, and the result is kept for the backward pass
        assert live.now == 2048
        del y
        assert live.now == 1024
        z.view(16, 16)
    assert live.peak == 2048
    assert saved.bytes == 1024


def _row(method: str, mask: str, ranks: int, **changes: Any) -> ContextRow:
    settings = _settings(heads=4, kv_heads=4, **changes)
    case = AttentionCase.of(mask, _mask(mask), settings)
    return context_row(table("context").build(method), method, case, ranks, settings)


def test_work_is_balanced_by_zigzag_alone() -> None:
    assert _row("zigzag", "causal", 4).balance == pytest.approx(1.0, abs=0.01)
    assert _row("ring", "causal", 4).balance == pytest.approx(7 / 4, abs=0.03)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_clocks_count_the_seen_cells(mask: str) -> None:
    """One rank is busy for the mask-exact FLOPs and sends nothing."""
    network = RankNetwork(flops=1e9)
    row = _row("zigzag", mask, 1, network=network)
    assert row.busy_s == pytest.approx(14 * _mask(mask).area() * 4 * 8 / 1e9)
    assert row.step_s == pytest.approx(row.busy_s)
    assert row.exposed_s == pytest.approx(0.0, abs=1e-12)
    assert sum(row.wire_bytes.values()) == 0


def test_bytes_go_by_link() -> None:
    row = _row("ring", "full", 4, network=RankNetwork(ranks_per_node=2))
    sent = 2 * 4 * LENGTH // 4 * 8 * 4 * 3 * 3  # k and v, three hops; thrice with gradients
    assert row.wire_bytes == {"inside": 2 * sent, "between": 2 * sent}
    assert row.exposed_s is not None
    assert row.exposed_s > 0


def test_page_needs_nothing_else(report: AttentionReport) -> None:
    page = to_html(report)
    assert "unsupported: takes documents alone" in page
    assert not re.search(r'(src|href)="', page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<tr>") > len(report.kernels) + len(report.context)


def test_names_that_do_not_exist() -> None:
    assert chosen("all", "mask") == tuple(MASKS)
    assert chosen("none", "context") == ()
    assert chosen("sdpa, naive,sdpa", "attention_kernel") == ("sdpa", "naive")
    with pytest.raises(UnknownPartError, match=r"masks = 'casual': .*full.*did you mean 'causal'"):
        chosen("casual", "mask")
    with pytest.raises(UnknownPartError, match=r"'flash': expected one of naive, sdpa"):
        chosen("flash", "attention_kernel")
    with pytest.raises(UnknownPartError, match="ring"):
        chosen("rings", "context")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (100,)}, "multiples of the masks' block of 16; use 96 or 112"),
        ({"lengths": (8,)}, "use 16, or a smaller block"),
        ({"kv_heads": 3}, "a divisor of the 4 query heads"),
        ({"dtype": "int8"}, "one of fp64, fp32"),
        ({"masks": ()}, "masks"),
        ({"kernels": (), "methods": ()}, "kernels, cp"),
        ({"ranks": (0,)}, "1 to 64"),
        ({"network": {"bandwidth": 0.0}}, "network.bandwidth"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settings(**changes)


def test_a_length_that_ranks_cannot_share_is_a_row() -> None:
    row = _row("zigzag", "full", 5)
    assert row.status == "unsupported"
    assert "such as 60 or 70" in row.reason


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    from shoal.app.cli import app

    files = [tmp_path / "report.html", tmp_path / "report.json"]
    words = ["bench", "attention", "--quick", "--lengths", "64", "--kernels", "naive,varlen"]
    words += ["--masks", "causal,sliding", "--cp", "ring,ulysses", "--ranks", "2,8", "--quiet"]
    words += [word for file in files for word in ("--out", str(file))]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == "9 ok, 0 wrong, 3 unsupported, 0 failed"
    assert files[0].read_text().startswith("<!doctype html>")
    result = AttentionReport.model_validate(json.loads(files[1].read_text()))
    assert result.counts()["ok"] == 9
    for wrong in (["--lengths", "a"], ["--out", "r.pdf"], ["--device", "cuda"]):
        if wrong[1] != "cuda" or not torch.cuda.is_available():
            assert CliRunner().invoke(app, [*words[:8], *wrong]).exit_code != 0
