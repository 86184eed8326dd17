import csv
import io
import math
from dataclasses import replace
from importlib import resources

import pytest

from shoal.core.errors import ConfigError, MachineError
from shoal.cost.gpu.device import CALIBRATED
from shoal.cost.gpu.engines import MEGATRON
from shoal.cost.kernels.serving_engines import ENGINES
from shoal.cost.published import devices
from shoal.cost.published.baselines import BASELINES, llm_analysis
from shoal.cost.published.board import half_width, share_within, widths
from shoal.cost.published.calibration import NAMED, calibrate, calibration_for, fitted
from shoal.cost.published.page import write
from shoal.cost.published.plan import predict
from shoal.cost.published.quantity import model_flops, reported
from shoal.cost.published.rows import UnplayableError, read, replay
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.serving import predict_serving, read_serving, replay_serving
from shoal.cost.published.serving_scoreboard import score_serving
from shoal.cost.serving.closed_loop import Clients, arriving, drained_s, token_s
from shoal.cost.shapes import find
from shoal.cost.step_cost.accelerated import AcceleratedStepCost
from shoal.cost.step_cost.roofline import Roofline, Terms
from shoal.cost.training.step import GPU_SPREAD, Pricer
from shoal.ir import TrainJob, Work
from shoal.machine.described import load


def row(name):
    return next(r for r in read() if r.id == name)


def serving_row(name):
    return next(r for r in read_serving() if r.id == name)


@pytest.mark.slow
def test_the_boards_reach_what_they_promise():
    training, serving = score_training(), score_serving()
    assert (training.total, serving.total) == (383, 439)
    assert len(training.rows) / 383 > 0.94 and len(serving.rows) / 439 > 0.93
    assert training.median_error() <= 0.085 and share_within(training.rows) >= 0.88
    assert serving.median_error() <= 0.13 and share_within(serving.rows) >= 0.70
    assert 0.85 <= training.coverage <= 0.95 and 0.85 <= serving.coverage <= 0.95
    assert all(r.reason for r in (*training.rows, *serving.rows) if abs(r.error) > 0.25)
    for name in BASELINES:
        assert training.median_error() < training.scaled_error(name)


def test_plans_are_priced_with_the_constants_of_the_named_rows():
    for name, value in vars(fitted()).items():
        assert getattr(CALIBRATED, name) == pytest.approx(value, rel=0.01)


def test_intervals_of_plans_are_those_of_the_board():
    errors = [(r.group, abs(math.log(1 + r.error))) for r in score_training().rows]
    assert math.exp(half_width(errors)) - 1 == pytest.approx(GPU_SPREAD, abs=0.02)


@pytest.mark.parametrize("source", ["llm-foundry", "torchtitan", "megatron-bridge"])
def test_what_is_scored_never_sets_what_scores_it(source):
    doubled = tuple(replace(r, value=r.value * 1.3) if r.group == source else r for r in read())
    assert calibration_for(source, doubled) == calibration_for(source)
    other = "nanotron"
    assert calibration_for(other, doubled) != calibration_for(other)


def test_at_most_five_rows_calibrate():
    assert len(NAMED) == 5
    with pytest.raises(ConfigError, match="at most 5"):
        calibrate(read()[:6])


def test_a_row_with_everything_stated():
    item = replay(row("megatron-sc21-530B"))
    run = item.run
    assert (run.tp, run.pp, run.vpp, run.dp, run.micro_batch) == (8, 35, 3, 9, 1)
    assert run.recompute == "full" and run.engine.attention == "plain" and not item.filled
    assert run.devices == 2520 and run.passes == 280
    # 96 B s l h^2 (1 + s / 6h + V / 16lh), the source's formula, recomputation counted.
    L, h, s, V = 105, 20480, 2048, 51200
    by_hand = 96 * 2520 * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
    seconds = 42.0
    result = reported(item.row, run, seconds, 312e12)
    assert result == pytest.approx(by_hand / seconds / 2520 / 1e12, rel=0.01)


def test_quantities_of_a_step():
    item = replay(row("bridge-25.11-pre-training-llama3_8b-h100-fp8-cs-g8-b128"))
    assert reported(item.row, item.run, 2.0, 1e15) == pytest.approx(128 * 8192 / 2.0 / 8)
    mfu = replay(row("vocabpar-2k-v32k-baseline"))
    rate = 3 * model_flops(mfu.run) * 128 * 2048 / 5.0 / 8
    assert reported(mfu.row, mfu.run, 5.0, 1e15) == pytest.approx(rate / 312e12)


def test_rows_are_completed_by_rules_that_they_name():
    item = replay(row("bigscience-194b-n48-pp6-mb1"))
    assert item.run.shape.num_layers == 78  # 194e9 less the embedding, over 12 h^2, times of 6
    assert any("multiple of the stages" in text for text in item.filled)
    titan = replay(row("torchtitan-405b-512-1f1b"))
    assert titan.run.passes == titan.run.pp == 8
    free = replay(row("megatron-175B-readme"))
    assert "degrees" in free.open
    chosen = predict(free, fitted()).run
    assert chosen.devices == 1024 and chosen.tp >= 4 and chosen.pp > 1
    assert replay(row("nanotron-8.86b-1n")).run.shape.hidden == 4096


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("frontier-22B", "number of devices"),
        ("frontier-175B", "bubble"),
        ("deepspeed-zero3-offload-1t", "offloaded"),
        ("bridge-26.06-pre-training-nemotron_3_nano-gb300-mxfp8-g8-b512", "state-space"),
    ],
)
def test_what_cannot_be_replayed_says_why(name, why):
    with pytest.raises(UnplayableError, match=why):
        replay(row(name))
    assert why in score_training().skipped[name]


def _table(name, **changes):
    text = resources.files("shoal.cost.published").joinpath(name).read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))[:3]
    rows[1].update(changes)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize(
    ("reader", "name", "changes", "said"),
    [
        (read, "training.csv", {"reported_value": "fast"}, "line 3: reported_value = 'fast'"),
        (read, "training.csv", {"reported_value": "-1"}, "above 0"),
        (read_serving, "serving.csv", {"value": "nan"}, "line 3: value"),
        (read_serving, "serving.csv", {"value": ""}, "expected a number"),
    ],
)
def test_bad_tables(tmp_path, reader, name, changes, said):
    path = tmp_path / name
    path.write_text(_table(name, **changes))
    with pytest.raises(ConfigError, match=said):
        reader(path)


@pytest.mark.slow
def test_rows_of_unknown_metrics_and_devices_are_listed(tmp_path):
    for name, reader, score, changes in (
        ("training.csv", read, score_training, {"reported_metric": "furlongs"}),
        ("training.csv", read, score_training, {"device": "H1000"}),
        ("serving.csv", read_serving, score_serving, {"metric": "vibes"}),
        ("serving.csv", read_serving, score_serving, {"device": "Abacus"}),
        ("serving.csv", read_serving, score_serving, {"engine": "slide rule"}),
        ("serving.csv", read_serving, score_serving, {"metric": "ttft_ms_mean"}),
    ):
        path = tmp_path / name
        path.write_text(_table(name, **changes))
        board = score(reader(path))
        assert len(board.rows) == 2
        (why,) = board.skipped.values()
        assert next(iter(changes.values())) in why
        # The others are as on the shipped board: its constants and intervals.
        whole = {row.id: row for row in score().rows}
        assert all(row.predicted == whole[row.id].predicted for row in board.rows)


def test_tables_without_columns_and_unknown_devices(tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("id,source\n1,2\n")
    for reader in (read, read_serving):
        with pytest.raises(ConfigError, match="columns"):
            reader(path)
    with pytest.raises(MachineError, match="H100-80GB"):
        devices.gpu("H1000")
    with pytest.raises(MachineError, match="RTX 4090"):
        devices.served_by("Abacus")
    with pytest.raises(MachineError, match="Xeon 6980P"):
        devices.cpu("Abacus")


def test_interval_of_a_new_publication_by_hand():
    # Ten sources; one of them with many good rows counts as one.
    errors = [("many", 0.01)] * 50 + [(f"s{n}", 0.1 * n) for n in range(1, 10)]
    assert half_width(errors) == pytest.approx(0.8)
    kinds = [("a", "x", 0.1), ("b", "x", 0.2), ("c", "y", 0.3)]
    assert widths(kinds)["a", "x"] == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="at least 2"):
        half_width([("a", 0.1)])


def test_llm_analysis_by_hand():
    item = replay(row("llmc-gpt2-1558m"))
    run = replace(item.run, dp=1, zero=0, global_batch=item.run.micro_batch)
    shape = run.shape
    tokens = run.micro_batch * run.seq_len
    weights = 48 * 12 * 1600**2 + shape.vocab_size * 1600
    flops = tokens * (2 * weights + 4 * 48 * 1600 * 1024)
    by_hand = 3 * flops / (0.5 * 989e12) + 30 * weights / (0.9 * 3.35e12)
    assert llm_analysis.seconds(run, item.gpu) == pytest.approx(by_hand, rel=1e-6)


def test_every_baseline_prices_every_row():
    for scored in score_training().rows:
        assert set(scored.baselines) == set(BASELINES)
        assert all(math.isfinite(v) and v > 0 for v in scored.baselines.values())


def test_a_token_reads_the_weights_once():
    item = replay_serving(serving_row("gpubench-llama3-8b-q4-k-m-rtx-4090-24gbx1-tg1024"))
    shape, engine = item.shape, ENGINES["llamacpp"]
    weights = 0.60 * 32 * (4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336)
    weights += 0.8203 * shape.vocab_size * 4096
    busy = item.cost.terms([(512, 1)])
    assert busy.memory == pytest.approx(weights / (0.85 * 1008e9), rel=0.15)
    assert busy.overhead == pytest.approx(32 * engine.layer_s) and not item.cost.measured
    assert predict_serving(item) == pytest.approx(1 / busy.total)
    # Units of an A100 take fewer bytes than its memory gives.
    far = replay_serving(serving_row("gpubench-llama3-8b-f16-a100-sxm-80gbx1-tg1024")).cost
    assert far.terms([(512, 1)]).memory > 15.0e9 / (8 * 108 * 1.41e9)


def test_full_load_is_as_many_requests_as_the_memory_holds():
    item = replay_serving(serving_row("trtllm1.0-llama-3.1-8b-h200x1-2048-2048"))
    many = item.cost.most_requests(2048, 2048)
    # A request enters when its whole answer fits: 64 KiB of eight-bit keys and values a token.
    by_hand = (0.92 * 141e9 - 1.5e9 - 7.0e9 - 2.1e9) / (4096 * 65536)
    assert many == pytest.approx(by_hand, rel=0.02)
    clients = Clients(many, 2048, 2048)
    steady = drained_s(item.cost, clients)
    assert steady == pytest.approx(2048 * token_s(item.cost, clients) / many)
    # A thousand and a half requests end in a wave that is not full.
    assert 1 / predict_serving(item) * 2048 == pytest.approx(drained_s(item.cost, clients, 1500))
    assert drained_s(item.cost, clients, 1500) > steady


def test_requests_that_come_faster_than_they_are_answered_wait():
    item = replay_serving(serving_row("llmservingsim-vllm-llama-3.1-8b-rtx-4090x1-ttft-ms-mean"))
    clients = Clients(16, 64, 128)
    first, tpot, answer = arriving(item.cost, clients, rate=1e-3, requests=8)
    assert first < 0.5 and answer == pytest.approx(first + 128 * tpot)
    late = arriving(item.cost, clients, rate=1e3, requests=64)
    assert late[0] > 20 * first and late[1] > tpot


def test_serving_rows_are_priced_by_what_prices_plans(monkeypatch):
    rows = [
        serving_row("trtllm1.0-llama-3.1-8b-h100x1-2048-128"),
        serving_row("ik164-llama.cpp-llama3.1-8b-q4-0-ryzen-7950x-tg128"),
    ]
    once = [predict_serving(replay_serving(row)) for row in rows]
    for part in (AcceleratedStepCost, Roofline):
        plain = part.terms

        def twice(self, chunks, plain=plain):
            terms = plain(self, chunks)
            return Terms(*(2.0 * seconds for seconds in terms))

        monkeypatch.setattr(part, "terms", twice)
    for row, value in zip(rows, once, strict=True):
        assert predict_serving(replay_serving(row)) == pytest.approx(value / 2)


@pytest.mark.slow
def test_the_page_and_the_table(tmp_path):
    (tmp_path / "assets").mkdir()
    board = score_serving()
    write(tmp_path / "board.md", tmp_path / "assets", tmp_path / "board.json", board)
    text = (tmp_path / "board.md").read_text()
    assert "assets/published-serving.svg" in text and "Not replayed (serving)" in text
    assert all(f"| {r.id}" in text for r in board.rows)
    assert (tmp_path / "assets" / "published-serving.svg").read_text().startswith("<svg")
    assert '"coverage_of_90"' in (tmp_path / "board.json").read_text()


def test_a_row_is_priced_by_what_prices_plans(monkeypatch):
    item = replay(row("mlperf-5.0-405b-h100-8192"))
    once = predict(item, fitted()).value
    assert once == pytest.approx(5.2, rel=0.25)
    plain = Pricer.estimate

    def twice(self, work):
        cost = plain(self, work)
        return cost.model_copy(update={"step_s": cost.step_s.scaled(2.0)})

    monkeypatch.setattr(Pricer, "estimate", twice)
    assert predict(item, fitted()).value == pytest.approx(2 * once)


def test_deepseek_v3_on_2048_h800() -> None:
    """2.79 M GPU hours for 14.8 T tokens (DeepSeek-V3 Technical Report, 2024, table 1).

    Sixteen stages, two chunks each for the two directions of DualPipe, and 64 ranks of experts
    (section 3.2), as Megatron would run them: its tokens travel in bf16, not in fp8.
    """
    job = TrainJob.model_validate(
        {
            "model": "DeepSeek-V3",
            "engine": "megatron",
            "seq_len": 4096,
            "global_batch": 15360,
            "microbatch": 1,
            "products": "fp8",
            "shard": "zero1",
            "recompute": "selective",
            "parallel": {
                "dp": 128,
                "pp": 16,
                "ep": 64,
                "vpp": 2,
                "schedule": "interleaved",
                "overlap": "experts",
            },
        }
    )
    cost = Pricer(load("2048xH800")).estimate(Work(shape=find("DeepSeek-V3"), job=job))
    hours = 14.8e12 / cost.tokens * cost.step_s.value * 2048 / 3600
    assert hours == pytest.approx(2.79e6, rel=0.15)


@pytest.mark.parametrize(
    ("dedup", "overlap", "step_s"),
    [
        (False, "none", 41.25),
        (False, "experts", 31.31),
        (True, "none", 24.71),
        (True, "experts", 20.99),
    ],
)
def test_qwen3_30b_on_16_h100_as_its_tokens_travel(dedup, overlap, step_s) -> None:
    """NVIDIA's benchmark of Megatron-Bridge, July 2026: all-to-all, HybridEP, and overlapped."""
    job = TrainJob.model_validate(
        {
            "model": "Qwen3-30B-A3B",
            "engine": "megatron",
            "seq_len": 4096,
            "global_batch": 1024,
            "microbatch": 1,
            "shard": "zero1",
            "parallel": {"dp": 16, "ep": 16, "overlap": overlap},
        }
    )
    engine = replace(MEGATRON, dedup=dedup)
    cost = Pricer(load("16xH100"), engine).estimate(Work(shape=find("Qwen3-30B-A3B"), job=job))
    assert cost.step_s.value == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize("name", ["torchtitan-8b-8-fsdp", "torchtitan-8b-8-fsdp-compile"])
def test_llama_3_8b_on_8_h100_eager_and_compiled(name) -> None:
    """5.8 and 6.7 thousand tokens/s a GPU (torchtitan, llama3_h100_202412)."""
    scored = next(r for r in score_training().rows if r.id == name)
    assert scored.predicted == pytest.approx(scored.reported, rel=0.15)


def test_llama_3_405b_on_16384_gpus() -> None:
    """Some 400 TFLOP/s a GPU (The Llama 3 Herd of Models, 2024, table 4), its stages interleaved.

    How many chunks a stage has is not published; with four, two blocks each, the price is near.
    """
    job = TrainJob.model_validate(
        {
            "model": "Llama-3.1-405B",
            "engine": "megatron",
            "seq_len": 8192,
            "global_batch": 2048,
            "microbatch": 1,
            "precision": "bf16",
            "shard": "zero2",
            "recompute": "none",
            "parallel": {
                "dp": 128,
                "tp": 8,
                "pp": 16,
                "sp": True,
                "vpp": 4,
                "schedule": "interleaved",
            },
        }
    )
    cost = Pricer(load("16384xH100")).estimate(Work(shape=find("Llama-3.1-405B"), job=job))
    assert cost.flops / cost.step_s.value / 16_384 == pytest.approx(4e14, rel=0.15)
