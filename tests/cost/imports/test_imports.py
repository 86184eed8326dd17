"""Logs of other engines: small ones in their documented forms, and files that are none.

The samples were made up for these tests, line by line in the forms that the engines print.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from shoal.core.errors import DataError, UnknownPartError
from shoal.cost.imports import LOGS
from shoal.cost.imports.log import Log, LogEntry, steady
from shoal.cost.imports.measure import measure, read, report
from shoal.cost.imports.protocols import LogReader
from shoal.cost.imports.tensorboard import _masked, scalars
from shoal.cost.shapes import resolve
from shoal.ir import Estimate, Interval, ServeJob, ServePlan, TrainJob, TrainPlan
from shoal.machine.described import load

TITAN = """\
[rank0]:[titan] 2026-09-01 10:00:00,100 - root - INFO - Starting job: Llama 3 8B
[rank0]:[titan] 2026-09-01 10:00:30,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.25\
  \x1b[38;2;54;234;195mmemory: 40.10GiB(42.31%)  \x1b[34mtps: 512  \x1b[36mtflops: 29.70\
  \x1b[35mmfu: 3.00%\x1b[39m
[rank0]:[titan] 2026-09-01 10:00:31,500 - root - INFO - step: 2  loss: 11.50  memory: \
42.00GiB(44.30%)  tps: 5,700  tflops: 330.00  mfu: 33.37%
[rank0]:[titan] 2026-09-01 10:00:33,000 - root - INFO - step: 3  loss: 10.75  memory: \
42.00GiB(44.30%)  tps: 5,762  tflops: 333.60  mfu: 33.73%
[rank0]:[titan] 2026-09-01 10:00:34,500 - root - INFO - validate step: 3  loss: 10.70  memory: \
43.00GiB(45.00%)  tps: 9,999
[rank0]:[titan] 2026-09-01 10:00:36,000 - root - INFO - step: 4  loss: 10.00  memory: \
42.00GiB(44.30%)  tps: 5,800  tflops: 335.80  mfu: 33.95%
"""
MEGATRON = """\
 [2026-09-01 10:00:00] iteration        1/     100 | consumed samples:           64 | elapsed time \
per iteration (ms): 27160.0 | throughput per GPU (TFLOP/s/GPU): 40.4 | learning rate: 1.5E-06 | \
global batch size:    64 | lm loss: 1.192634E+01 | grad norm: 5.960 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 30000.5 | max allocated: 60000.0 | \
reserved: 61000.0 | max reserved: 65536.0
 [2026-09-01 10:00:03] iteration        2/     100 | consumed samples:          128 | elapsed time \
per iteration (ms): 3000.0/15080.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | global batch size: \
   64 | lm loss: 1.1E+01 |
 iteration        3/     100 | consumed samples:          192 | elapsed time per iteration (ms): \
3100.0 | throughput per GPU (TFLOP/s/GPU): 410.0 | global batch size:    64 | lm loss: 1.05E+01 |
 iteration        4/     100 | consumed samples:          256 | elapsed time per iteration (ms): \
3050.0 | throughput per GPU (TFLOP/s/GPU): 405.0 | global batch size:    64 | lm loss: 1.0E+01 |
"""
DEEPSPEED = """\
[2026-09-01 10:00:00,936] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.0001]
loss=9.5
[2026-09-01 10:00:01,936] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=8.0, MemAllocated=4.32GB, MaxMemAllocated=38.5GB
[2026-09-01 10:00:05,936] [INFO] [timer.py:260:stop] epoch=0/micro_step=80/global_step=20, \
RunningAvgSamplesPerSec=25.1, CurrSamplesPerSec=32.0, MemAllocated=4.32GB, MaxMemAllocated=40.0GB
[2026-09-01 10:00:09,936] [INFO] [timer.py:260:stop] epoch=0/micro_step=120/global_step=30, \
RunningAvgSamplesPerSec=25.1, CurrSamplesPerSec=32.0, MemAllocated=4.32GB, MaxMemAllocated=40.0GB
"""
ACCELERATE = (
    "  0%|          | 0/100 [00:00<?, ?it/s]\r"
    "  1%|1         | 1/100 [00:09<14:51,  9.00s/it]\r"
    "  2%|2         | 2/100 [00:11<03:16,  2.00s/it]\n"
    "{'loss': 9.25, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.02}\n"
    "  3%|3         | 3/100 [00:13<03:14,  2.00s/it]\r"
    "  4%|4         | 4/100 [00:15<03:12,  2.00s/it]\n"
    "{'loss': 8.75, 'grad_norm': 1.1, 'learning_rate': 4e-05, 'epoch': 0.04}\n"
    "{'train_runtime': 200.0, 'train_samples_per_second': 32.0, 'train_steps_per_second': 0.5, "
    "'train_loss': 9.0, 'epoch': 1.0}\n"
)
VLLM = """\
(APIServer pid=3646) INFO 09-01 10:13:01 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 \
tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs
(APIServer pid=3646) INFO 09-01 10:13:11 [loggers.py:271] Engine 000: Avg prompt throughput: 900.0 \
tokens/s, Avg generation throughput: 400.0 tokens/s, Running: 18 reqs, Waiting: 43 reqs
(APIServer pid=3646) INFO 09-01 10:13:21 [loggers.py:271] Engine 000: Avg prompt throughput: \
1000.0 tokens/s, Avg generation throughput: 1000.0 tokens/s, Running: 18 reqs, Waiting: 42 reqs
(APIServer pid=3646) INFO 09-01 10:13:31 [loggers.py:271] Engine 000: Avg prompt throughput: \
1000.0 tokens/s, Avg generation throughput: 1020.0 tokens/s, Running: 18 reqs, Waiting: 33 reqs
"""
SUMMARY = """\
============ Serving Benchmark Result ============
Successful requests:                     200
Benchmark duration (s):                  20.5
Request throughput (req/s):              9.76
Output token throughput (tok/s):         1950.0
---------------Time to First Token----------------
Median TTFT (ms):                        120.5
P95 TTFT (ms):                           300.0
-----Time per Output Token (excl. 1st token)------
Median TPOT (ms):                        12.5
==================================================
"""
SGLANG = """\
[2026-09-01 10:30:10 TP0] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 128, token \
usage: 0.00, #running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): 734.0
[2026-09-01 10:30:11 TP0] Decode batch, #running-req: 9, #token: 11584, token usage: 0.01, cuda \
graph: True, gen throughput (token/s): 22.40, #queue-req: 1
[2026-09-01 10:30:12 TP1] Decode batch, #running-req: 9, #token: 11584, token usage: 0.01, cuda \
graph: True, gen throughput (token/s): 22.40, #queue-req: 1
[2026-09-01 10:30:13 TP0] Decode batch, #running-req: 20, #token: 11584, token usage: 0.01, cuda \
graph: True, gen throughput (token/s): 1174.0, #queue-req: 6
[2026-09-01 10:30:14 TP0] Decode batch, #running-req: 20, #token: 11584, token usage: 0.01, cuda \
graph: True, gen throughput (token/s): 1180.0, #queue-req: 6
"""
LLAMA = """\
slot print_timing: id  0 | task 0 |
prompt eval time =     128.00 ms /   512 tokens (    0.25 ms per token,  4000.00 tokens per second)
       eval time =    1280.00 ms /   128 tokens (   10.00 ms per token,   100.00 tokens per second)
      total time =    1408.00 ms /   640 tokens
llama_perf_context_print:        eval time =    1260.00 ms /   127 runs   (    9.92 ms per token)
"""
BENCH = """\
| model          |     size |   params | backend | ngl |  test |             t/s |
| llama 8B Q4_0  | 4.33 GiB |   8.03 B | CUDA    |  99 | pp512 | 8000.00 ± 12.00 |
| llama 8B Q4_0  | 4.33 GiB |   8.03 B | CUDA    |  99 | tg128 |  125.00 ± 0.40  |
"""
WANDB_CSV = """\
"Step","run-7 - throughput(tps)","run-7 - throughput(tps)__MIN","run-7 - loss"
1,500,500,12
2,5700,5700,11
3,5762,5762,10.5
4,5800,5800,10
"""
WANDB_JSON = "".join(
    json.dumps({"_step": i, "_runtime": 10.0 + 2.0 * i, "train/loss": 9.0 - i}) + "\n"
    for i in range(5)
)


def plan(**changes: object) -> TrainPlan:
    job = TrainJob(
        model="Llama-3-8B",
        steps=100,
        seq_len=2048,
        global_batch=64,
        microbatch=1,
        parallel={"dp": 16},
        **changes,
    )
    return TrainPlan(
        job=job,
        machine=load("16xH100"),
        shape=resolve(job.model),
        estimate=Estimate(
            step_s=Interval.around(2.0, 0.2),
            tokens=64 * 2048.0,
            memory_bytes={"weights": 4e10},
        ),
    )


def serve_plan() -> ServePlan:
    return ServePlan(
        job=ServeJob(model="Qwen3-8B"),
        machine=load("H100"),
        shape=resolve("Qwen3-8B"),
        predicted={"tokens_per_s": Interval.around(1000.0, 0.2)},
    )


def put(folder: Path, text: str, name: str = "run.log") -> Path:
    path = folder / name
    path.write_text(text, newline="")
    return path


@pytest.mark.parametrize("name", list(LOGS))
def test_protocol(name: str) -> None:
    assert isinstance(LOGS.build(name), LogReader)


@pytest.mark.parametrize(
    ("text", "name", "format_", "wanted"),
    [
        (
            TITAN,
            "run.log",
            "torchtitan",
            {
                "device_tokens_per_s": 5762.0,
                "device_flops": 333.6e12,
                "mfu": 0.3373,
                "memory_bytes": 42 * 2**30,
                "loss": 10.0,
            },
        ),
        (
            MEGATRON,
            "run.log",
            "megatron",
            {
                "step_s": 3.05,
                "device_flops": 405e12,
                "memory_bytes": 65536 * 2**20,
                "loss": 10.0,
            },
        ),
        (
            DEEPSPEED,
            "run.log",
            "deepspeed",
            {"samples_per_s": 32.0, "memory_bytes": 40 * 2**30, "loss": 9.5},
        ),
        (
            ACCELERATE,
            "run.log",
            "accelerate",
            {"step_s": 2.0, "samples_per_s": 32.0, "loss": 8.75},
        ),
        (VLLM, "run.log", "vllm", {"tokens_per_s": 1010.0, "prompt_tokens_per_s": 1000.0}),
        (
            SUMMARY,
            "bench.log",
            "vllm",
            {
                "tokens_per_s": 1950.0,
                "requests_per_s": 9.76,
                "ttft_p50_s": 0.1205,
                "ttft_p95_s": 0.3,
                "tpot_p50_s": 0.0125,
                "total_s": 20.5,
            },
        ),
        ("Backend: sglang\n" + SUMMARY, "bench.log", "sglang", {"tokens_per_s": 1950.0}),
        (SGLANG, "run.log", "sglang", {"tokens_per_s": 1177.0}),
        (
            LLAMA,
            "run.log",
            "llamacpp",
            {"ttft_p50_s": 0.128, "prompt_tokens_per_s": 4000.0},
        ),
        (
            BENCH,
            "run.log",
            "llamacpp",
            {"decode_tokens_per_s": 125.0, "prompt_tokens_per_s": 8000.0, "tpot_p50_s": 0.008},
        ),
        (WANDB_CSV, "run.csv", "wandb", {"device_tokens_per_s": 5762.0, "loss": 10.0}),
        (WANDB_JSON, "history.jsonl", "wandb", {"step_s": 2.0, "loss": 5.0}),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_log_is_recognised_and_read(
    tmp_path: Path, text: str, name: str, format_: str, wanted: dict[str, float]
) -> None:
    path = put(tmp_path, text, name)
    log = read(path)
    assert log.format == format_
    result, used = steady(log)
    assert {key: result[key] for key in wanted} == pytest.approx(wanted)
    assert used <= len(log.entries)
    assert read(path, format_).entries == log.entries


def test_state_of_a_trainer(tmp_path: Path) -> None:
    raw = {"log_history": [{"loss": 9.0, "step": 10}, {"train_steps_per_second": 0.25, "step": 20}]}
    result, _ = steady(read(put(tmp_path, json.dumps(raw), "trainer_state.json")))
    assert result == {"loss": 9.0, "step_s": 4.0}


def test_saved_benchmark(tmp_path: Path) -> None:
    raw = {"output_throughput": 1950.0, "median_ttft_ms": 120.0, "backend": "vllm"}
    for name, text in (("b.json", json.dumps(raw)), ("b.jsonl", "{}\n" + json.dumps(raw) + "\n")):
        result, _ = steady(read(put(tmp_path, text, name), "vllm"))
        assert result == {"tokens_per_s": 1950.0, "ttft_p50_s": pytest.approx(0.12)}


def test_steps_follow_from_the_plan(tmp_path: Path) -> None:
    result = measure(read(put(tmp_path, TITAN)), plan())
    step = 64 * 2048 / (16 * 5762)
    assert result.quantities["step_s"] == pytest.approx(step)
    assert result.quantities["tokens_per_s"] == pytest.approx(16 * 5762)
    assert result.derived == ("step_s", "tokens_per_s")
    samples = measure(read(put(tmp_path, DEEPSPEED)), plan())
    assert samples.quantities["step_s"] == pytest.approx(2.0)
    made = report(samples, plan())
    assert made.errors["step_s"] == pytest.approx(0.0)
    assert made.errors["memory_bytes"] == pytest.approx(40 * 2**30 / 4e10 - 1)


def test_serving_stands_beside_its_plan(tmp_path: Path) -> None:
    result = measure(read(put(tmp_path, VLLM)), serve_plan())
    assert report(result, serve_plan()).errors == {"tokens_per_s": pytest.approx(0.01)}


def test_warm_up_is_what_is_slower_at_the_start() -> None:
    def log(*seconds: float) -> Log:
        entries = tuple(LogEntry(i, i, {"step_s": s}) for i, s in enumerate(seconds))
        return Log("x", Path("x"), "train", entries)

    assert steady(log(9.0, 2.0, 1.0, 1.1, 0.9, 1.0)) == ({"step_s": 1.0}, 4)
    # The first of several is never steady; a late hiccup does not move the median.
    assert steady(log(1.0, 1.0, 1.0, 30.0, 1.0))[1] == 4
    assert steady(log(1.0, 3.0)) == ({"step_s": 2.0}, 2)


@pytest.mark.parametrize(
    ("text", "name", "format_", "message"),
    [
        ("hello\nworld\n", "a.log", "auto", r"line 1: 'hello': in no known format \(torchtitan"),
        ("\n\nhello\n", "a.log", "megatron", "line 3: 'hello': this is not a log of megatron"),
        ("hello\n", "a.log", "torchtitan", "not a log of torchtitan"),
        ("hello\n", "a.log", "deepspeed", "not a log of deepspeed"),
        ("hello\n", "a.log", "accelerate", "not a log of accelerate"),
        ("hello\n", "a.log", "vllm", "not a log of vllm"),
        ("hello\n", "a.log", "sglang", "not a log of sglang"),
        ("hello\n", "a.log", "llamacpp", "not a log of llamacpp"),
        ("hello\n", "a.log", "wandb", "line 1: 'hello': not JSON"),
        ("hello\n", "a.log", "tensorboard", "record 1"),
        ("", "a.log", "auto", "is empty"),
        ("a\0b\n", "a.log", "megatron", "line 1: not text"),
        (TITAN.replace("5,762", "many"), "a.log", "auto", "line 4: tps = 'many'"),
        (TITAN.replace("loss: 10.75", "loss: nan"), "a.log", "auto", "line 4: loss = 'nan'"),
        (MEGATRON.replace("3100.0", "--"), "a.log", "auto", "line 4: elapsed time"),
        (
            MEGATRON.replace("elapsed time per iteration (ms): 3100.0", "x"),
            "a.log",
            "auto",
            "line 4: .*without its elapsed time",
        ),
        (DEEPSPEED.replace("=32.0", "=fast"), "a.log", "auto", "line 4: SamplesPerSec = 'fast'"),
        (ACCELERATE.replace("'epoch': 0.02}", "'epoch"), "a.log", "auto", "without its end"),
        (ACCELERATE.replace("9.25", "open('x')"), "a.log", "auto", "without its end|expected"),
        (VLLM.replace("1020.0", "n/a"), "a.log", "auto", "line 4: generation throughput"),
        (SGLANG.replace("1180.0", "?"), "a.log", "auto", "line 5: gen throughput = '\\?'"),
        (WANDB_CSV.replace("5762,5762", "x,x"), "a.csv", "auto", "line 4: .*'x'"),
        (WANDB_CSV.replace("tps", "lr"), "a.csv", "wandb", None),
        ('"Step","lr"\n1,0.1\n', "a.csv", "auto", "no curve .* there are Step, lr"),
        ('"lr"\n0.1\n', "a.csv", "wandb", "line 2: no step"),
        (WANDB_JSON + "{broken\n", "a.jsonl", "auto", "line 6: '{broken': not JSON"),
        ("[1, 2\n", "a.json", "wandb", "not JSON"),
        ("{}", "trainer_state.json", "auto", "no list log_history"),
        ("{", "trainer_state.json", "auto", "line 1: not JSON"),
        ("{}", "b.json", "vllm", "none of output_throughput"),
        ("{\n", "b.json", "sglang", "line 1: '{': not JSON"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(
    tmp_path: Path, text: str, name: str, format_: str, message: str | None
) -> None:
    path = put(tmp_path, text, name)
    if message is None:
        assert steady(read(path, format_))[0] == {"loss": 10.0}
        return
    with pytest.raises(DataError, match=message) as raised:
        read(path, format_)
    assert str(raised.value).startswith(str(path))


def test_a_log_cut_in_its_last_line_is_read(tmp_path: Path) -> None:
    for text in (TITAN, MEGATRON, DEEPSPEED, VLLM, SGLANG):
        whole = read(put(tmp_path, text))
        cut = read(put(tmp_path, text[:-60].rpartition("tps")[0] if text is TITAN else text))
        assert 0 < len(cut.entries) <= len(whole.entries)
    broken = "iteration 1/9 | consumed samples: 1 | elapsed time per iteration (ms): 5.0 |\n"
    log = read(put(tmp_path, broken + " iteration 2/9 | consumed sam"))
    assert len(log.entries) == 1


def test_missing_files_formats_and_plans(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--import"):
        read(tmp_path / "none.log")
    with pytest.raises(DataError, match="a directory without event files"):
        read(tmp_path)
    with pytest.raises(UnknownPartError, match="megatron"):
        read(put(tmp_path, TITAN), "megatorn")
    with pytest.raises(DataError, match="a plan of train, as the log"):
        measure(read(put(tmp_path, TITAN)), serve_plan())
    other = plan().model_copy(
        update={"job": plan().job.model_copy(update={"global_batch": 128, "microbatch": None})}
    )
    with pytest.raises(DataError, match=r"line 5: global_batch = 64, and the plan has 128"):
        measure(read(put(tmp_path, MEGATRON)), other)
    bare = plan().model_copy(update={"estimate": None})
    with pytest.raises(DataError, match="plan again"):
        report(measure(read(put(tmp_path, TITAN)), bare), bare)


# ------------------------------------------------------------------ event files


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def event(step: int, name: str, value: float, wall: float) -> bytes:
    tag = name.encode()
    inner = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(inner)]) + inner
    head = b"\x09" + struct.pack("<d", wall) + b"\x10" + bytes([step])
    return head + b"\x2a" + bytes([len(summary)]) + summary


def events(*names: str) -> bytes:
    first = record(b"\x09" + struct.pack("<d", 0.0) + b"\x1a\x0dbrain.Event:2")
    return first + b"".join(
        record(event(step, name, 10.0 - step, 100.0 + 2.0 * step))
        for step in range(5)
        for name in names
    )


def test_checksum_is_the_published_one() -> None:
    # CRC-32C of "123456789" is e3069283.
    crc = 0xE3069283
    assert _masked(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def test_event_files(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(events("lm loss", "lr"))
    log = read(path)
    assert log.format == "tensorboard"
    assert [entry.step for entry in log.entries] == [0, 1, 2, 3, 4]
    # No curve of time: the clock of the events tells it.
    assert steady(log)[0] == {"loss": 6.0, "step_s": 2.0}
    assert read(tmp_path).entries == log.entries
    path.write_bytes(events("lm loss")[:-7])  # cut off in the last record
    assert len(read(path).entries) == 4


def test_event_files_of_the_real_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from shoal.core.meter.tensorboard import TensorBoard

    writer = TensorBoard(path=tmp_path).open()
    for step in range(6):
        said = {"kind": "step", "step": step, "time": 1.0, "step_s": 0.5, "loss": 9.0 - step}
        writer.event(said, {})
    writer.close()
    result, _ = steady(read(tmp_path))
    assert result["step_s"] == 0.5
    assert result["loss"] == pytest.approx(4.0)
    assert {name for _, _, name, _ in scalars(next(tmp_path.iterdir()))} >= {"step/step_s"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:30] + b"x" + data[31:], "record 1: its checksum is wrong"),
        (lambda data: b"\xff" + data[1:], "record 1: its length is damaged"),
        (lambda data: data + record(b"\x0f\x01"), "record 7: not an event"),
        (lambda data: data + record(b"\x2a\x7f"), "record 7: not an event"),
        (lambda data: b"", "record 1"),
        (lambda data: events("lr"), "no curve of loss.*there are lr"),
    ],
)
def test_damaged_event_files_name_the_record(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(damage(events("loss")))
    with pytest.raises(DataError, match=message):
        read(path)
