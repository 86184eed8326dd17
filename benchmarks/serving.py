"""Serving: the same tokens as transformers, speed beside it, and how good the prediction was.

Usage: python benchmarks/serving.py [--only PART] [--rounds N]; parts are tokens, speed, refusals,
simulator, scheduling, ready and exact.

Everything that is said of the server goes through its real HTTP interface.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import overhead
import torch
from common import Row, record, require_quiet

from shoal.core.measure import bootstrap

DATA = Path(os.environ.get("SHOAL_DATA", Path(__file__).parents[2] / "shared" / "data"))
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")
VOCAB = 512
NEW_TOKENS = 64


@dataclass(frozen=True)
class Server:
    """``shoal serve`` in a process of its own."""

    url: str
    ready_s: float


@contextlib.contextmanager
def background(model: Path, *options: str) -> Iterator[Server]:
    """Serve a model as a user would, from the start of the command to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    command = [sys.executable, "-m", "shoal", "serve", str(model), "--port", str(port), *options]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if child.poll() is not None or time.perf_counter() - began > 60:
                    raise SystemExit("the server does not start") from None
                time.sleep(0.02)
        yield Server(url, time.perf_counter() - began)
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(timeout=30)


def random_model(folder: Path, family: str, **changes: int) -> Any:
    """A model of ``family`` with random weights in fp32, written by transformers."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    classes: dict[str, tuple[Any, dict[str, int]]] = {
        "llama": (hf.LlamaConfig, {}),
        "qwen2": (hf.Qwen2Config, {}),
        "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
        "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }
    config, more = classes[family]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(FAMILIES.index(family))
    model = hf.AutoModelForCausalLM.from_config(config(**{**common, **more, **changes}))
    model.float().eval().save_pretrained(folder)
    # One word a token, so that the text of an answer tells its tokens.
    size = model.config.vocab_size
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Sequence([decoders.Replace("t", " t")])
    words.save(str(folder / "tokenizer.json"))
    return model


def numbers(text: str) -> list[int]:
    """The tokens that a text of :func:`random_model`'s tokenizer spells."""
    return [int(word[1:]) for word in text.split()]


async def ask_all(
    url: str, prompts: list[list[int]], count: int, *, stream: bool = False
) -> list[list[int]]:
    """Greedy answers to all prompts at once, through the openai client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        name = (await client.models.list()).data[0].id

        async def ask(prompt: list[int]) -> list[int]:
            options: dict[str, Any] = {
                "model": name,
                "prompt": prompt,
                "max_tokens": count,
                "temperature": 0,
            }
            if not stream:
                result = await client.completions.create(**options)
                return numbers(result.choices[0].text)
            parts = [
                piece.choices[0].text
                async for piece in await client.completions.create(**options, stream=True)
            ]
            return numbers("".join(parts))

        return list(await asyncio.gather(*map(ask, prompts)))


def same_tokens(folder: Path) -> list[Row]:
    """20 prompts of 1 to 300 tokens, four families."""
    lengths = np.linspace(1, 300, 20).round().astype(int)
    same = 0
    ready: list[float] = []
    for family in FAMILIES:
        model = random_model(folder / family, family)
        draw = np.random.default_rng(1)
        prompts = [draw.integers(0, VOCAB, length).tolist() for length in lengths]
        expected = []
        with torch.no_grad():
            for prompt in prompts:
                ids = torch.tensor([prompt])
                out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
                expected.append(out[0, len(prompt) :].tolist())
        with background(folder / family) as server:
            ready.append(server.ready_s)
            result = asyncio.run(ask_all(server.url, prompts, NEW_TOKENS))
        same += result == expected
    return [
        Row(
            name="families with the same 64 greedy tokens over HTTP as transformers",
            value=float(same),
            unit="of 4",
            comparison=">=",
            threshold=4.0,
            note=f"{', '.join(FAMILIES)}; 20 prompts of 1 to 300 tokens at once, fp32, random "
            "weights with a range of 0.1; every token of every prompt",
        ),
        Row(
            name="seconds until a served mini-model is ready",
            value=max(ready),
            unit="s",
            comparison="<=",
            threshold=5.0,
            note=f"slowest of {len(ready)} starts: from the start of the process to the first "
            "good /health",
            samples={"ready_s": ready},
        ),
    ]


def speed(folder: Path, rounds: int) -> list[Row]:
    """16 streams at once against one-at-a-time generate, on the same checkpoint."""
    streams, length = 16, 64
    # The shape of shoal-4m. The server is as it is by default: it computes on all cores but
    # one, which speaks HTTP.
    shape = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = random_model(folder / "speed", "llama", **shape)
    draw = np.random.default_rng(2)
    prompts = [draw.integers(0, 4096, length).tolist() for _ in range(streams)]
    torch.set_num_threads(os.cpu_count() or 1)

    def one_at_a_time() -> list[list[int]]:
        results = []
        with torch.no_grad():
            for prompt in prompts:
                out = model.generate(
                    torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False
                )
                results.append(out[0, length:].tolist())
        return results

    with background(folder / "speed", "--set", "kv={name: paged, prefix_reuse: false}") as server:

        def served() -> list[list[int]]:
            return asyncio.run(ask_all(server.url, prompts, NEW_TOKENS, stream=True))

        methods: dict[str, Callable[[], list[list[int]]]] = {
            "served": served,
            "generate": one_at_a_time,
        }
        answers = {name: method() for name, method in methods.items()}  # warms up
        equal = sum(a == b for a, b in zip(*answers.values(), strict=True))
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(rounds):
            for name in list(methods) if number % 2 else list(methods)[::-1]:
                begin = time.perf_counter()
                methods[name]()
                seconds[name].append(time.perf_counter() - begin)
    ratio = bootstrap(np.divide(seconds["generate"], seconds["served"]))
    tokens = streams * NEW_TOKENS
    return [
        Row(
            name="16 streams over HTTP against one-at-a-time transformers generate",
            value=ratio.value,
            low=ratio.low,
            high=ratio.high,
            unit="x",
            comparison=">=",
            threshold=3.0,
            note=f"tokens/s; a Llama of shoal-4m's shape, fp32, prompts of {length} and outputs of "
            f"{NEW_TOKENS} tokens, no prefix reuse; the server computes on "
            f"{max(1, torch.get_num_threads() - 1)} thread, generate on {torch.get_num_threads()}; "
            "served "
            f"{tokens / statistics.median(seconds['served']):,.0f} tokens/s, generate "
            f"{tokens / statistics.median(seconds['generate']):,.0f}; {equal} of {streams} answers "
            f"equal; {rounds} rounds in turn",
            samples={"served_s": seconds["served"], "generate_s": seconds["generate"]},
        )
    ]


def refusals(folder: Path) -> list[Row]:
    """The slowest answer to a request that must be refused; a good one follows each."""
    import http.client
    import json

    import psutil

    random_model(folder / "refusing", "llama")
    key = "a-key-of-this-benchmark"
    good: dict[str, Any] = {"model": "refusing", "prompt": [1, 2, 3], "max_tokens": 1}
    chat: dict[str, Any] = {
        "model": "refusing",
        "messages": [{"role": "user", "content": "t1"}],
        "max_tokens": 1,
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    given: dict[str, tuple[Any, dict[str, str]]] = {
        "malformed JSON": (b"{", {}),
        "deep JSON": (b"[" * 1_000_000, {}),
        "unknown model": ({**good, "model": "x"}, {}),
        "prompt too long": ({**good, "prompt": [1] * 100_000}, {}),
        "text too long": ({**good, "prompt": " " * 4_000_000}, {}),
        "n": ({**good, "n": 5_000_000}, {}),
        "logprobs": ({**good, "logprobs": 1_000_000_000}, {}),
        "max_tokens": ({**good, "max_tokens": 1_000_000_000}, {}),
        "best_of": ({**good, "best_of": 5_000_000}, {}),
        "stop": ({**good, "stop": ["x"] * 100_000}, {}),
        "long stop": ({**good, "stop": "x" * 1_000_000}, {}),
        "bias": ({**good, "logit_bias": {str(n): 1 for n in range(100_000)}}, {}),
        "quotes in a string": ({**good, "prompt": '"' * 1_000_000}, {}),
        "messages": ({**chat, "messages": chat["messages"] * 20_000}, {}),
        "tools": ({**chat, "tools": [tool] * 5_000}, {}),
        "many strings": ({**good, "prompt": ["a"] * 500_000}, {}),
        "many lists": ({**good, "prompt": [[1]] * 100_000}, {}),
        "large grammar": ({**good, "stop_token_ids": [1], "guided_regex": "a" * 1_000_000}, {}),
        "token id beyond the vocabulary": ({**good, "prompt": [VOCAB]}, {}),
        "token id below zero": ({**good, "prompt": [-1]}, {}),
        "wrong key": (good, {"Authorization": "Bearer wrong"}),
        "foreign origin": (good, {"Origin": "http://evil.example"}),
        "foreign host": (good, {"Host": "evil.example"}),
        "large header": (good, {"X-Large": "x" * 100_000}),
        "many headers": (good, {f"X-{number}": "x" for number in range(200)}),
        "large body": (b"x" * 64_000_000, {}),
    }
    # What a client makes of its request before it sends it is none of the server's time.
    wrong = {
        name: (body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        for name, (body, headers) in given.items()
    }
    fine = json.dumps(good).encode()
    times: dict[str, list[float]] = {name: [] for name in wrong}
    os.environ["SHOAL_API_KEY"] = key
    try:
        with background(folder / "refusing") as server:
            place = server.url.removeprefix("http://")

            def post(raw: bytes, headers: dict[str, str]) -> int:
                path = "/v1/chat/completions" if b'"messages"' in raw[:50] else "/v1/completions"
                connection = http.client.HTTPConnection(place, timeout=10)
                try:
                    common = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        # A server may answer before it has read all, and stop reading.
                        connection.request("POST", path, raw, {**common, **headers})
                    return connection.getresponse().status
                finally:
                    connection.close()

            port = place.rpartition(":")[2]
            (process,) = [c for c in psutil.Process().children() if port in c.cmdline()]

            def memory() -> int:
                family = [process, *process.children(recursive=True)]
                return sum(one.memory_info().rss for one in family)

            used = [memory()]
            for _ in range(10):
                for name, (raw, headers) in wrong.items():
                    begin = time.perf_counter()
                    status = post(raw, headers)
                    times[name].append(time.perf_counter() - begin)
                    if not 400 <= status < 500:
                        raise SystemExit(f"{name}: answered with {status}")
                    if post(fine, {}) != 200:
                        raise SystemExit(f"{name}: the next request was not served")
                used.append(memory())
            # Compiling takes its time, up to a cap; then whoever compiles is killed.
            grammars: list[float] = []
            for size in range(10):
                # Whether any text has so many patterns at once is a question for hours.
                every = [{"pattern": f".*a.{{{size + more}}}b.*"} for more in range(10, 34)]
                schema = {"type": "string", "allOf": every}
                slow = json.dumps({**good, "stop_token_ids": [1], "guided_json": schema}).encode()
                begin = time.perf_counter()
                status = post(slow, {})
                grammars.append(time.perf_counter() - begin)
                if not 400 <= status < 500 or post(fine, {}) != 200:
                    raise SystemExit(f"a grammar: answered with {status}")
    finally:
        del os.environ["SHOAL_API_KEY"]
    slowest = max(times, key=lambda name: max(times[name]))
    return [
        Row(
            name="slowest refusal of a bad request",
            value=max(times[slowest]),
            unit="s",
            comparison="<=",
            threshold=0.1,
            note=f"{len(wrong)} kinds of bad request, 10 times each, a good one served after each; "
            f"the slowest was: {slowest}; sending and reading included",
            samples={name.replace(" ", "_"): taken for name, taken in times.items()},
        ),
        Row(
            name="growth of a server's memory by bad requests",
            value=(max(used) - used[0]) / 2**20,
            unit="MiB",
            comparison="<=",
            threshold=50.0,
            note=f"{len(wrong)} kinds of bad request, 10 times each, after the first start; all "
            "processes of the server together, the most after any round",
            samples={"memory_bytes": list(map(float, used))},
        ),
        Row(
            name="slowest refusal of a grammar that takes too long",
            value=max(grammars),
            unit="s",
            comparison="<=",
            threshold=1.0,
            note="10 schemas, each in a process that is killed after half a second; the start "
            "of that process is included",
            samples={"refused_s": grammars},
        ),
    ]


def simulator(folder: Path) -> list[Row]:
    """The throughput that the simulator says beforehand, on two recorded traces."""
    from shoal.ir import ServeJob
    from shoal.serve.bench.replay import bench_serve

    random_model(
        folder / "simulated",
        "llama",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        max_position_embeddings=2048,
    )
    rows = []
    for name, workload in (
        (
            "azure conversations",
            {"name": "azure", "path": str(DATA / "azure-llm-traces" / "conv.csv"), "scale": 4},
        ),
        (
            "mooncake conversations",
            {
                "name": "mooncake",
                "path": str(DATA / "mooncake-trace" / "conversation_trace.jsonl"),
                "scale": 16,
            },
        ),
    ):
        job = ServeJob.model_validate({"model": str(folder / "simulated"), "workload": workload})
        # Faster than the engine can serve them: slower arrivals would set the throughput.
        report = bench_serve(job, requests=200, rate=200.0)
        error = report.errors["tokens_per_s"]
        result = report.plan.predicted["tokens_per_s"]
        rows.append(
            Row(
                name=f"error of the simulated throughput, {name}",
                value=abs(error),
                unit="",
                comparison="<=",
                threshold=0.15,
                note=f"{workload['name']}, lengths divided by {workload['scale']}, 200 requests at "
                f"200 a second; measured {report.measured['tokens_per_s']:,.0f} tokens/s, "
                "predicted before "
                f"the replay {result.value:,.0f} ({result.low:,.0f} to {result.high:,.0f}): "
                f"{error:+.3f}; time to first token, median: "
                f"{report.errors.get('ttft_p50_s', float('nan')):+.3f}; between tokens: "
                f"{report.errors.get('tpot_p50_s', float('nan')):+.3f}",
            )
        )
    return rows


def ready(folder: Path, rounds: int) -> list[Row]:
    """From the start of the command to a good /health, with a model of 0.4 GB."""
    from shoal.corpora.tokenizer import train
    from shoal.model import huggingface
    from shoal.train import zoo

    place = folder / "random-206m"
    model = zoo.random(overhead.SHAPE).bfloat16()
    huggingface.write(place, model)
    train([""], 257).save(str(place / "tokenizer.json"))
    size = sum(one.stat().st_size for one in place.iterdir())
    del model
    seconds = []
    for _ in range(rounds):
        with background(place) as server:
            seconds.append(server.ready_s)
    return [
        Row(
            name="seconds until a served model of 0.4 GB is ready",
            value=max(seconds),
            unit="s",
            comparison="<=",
            threshold=5.0,
            note=f"slowest of {rounds} starts, median {statistics.median(seconds):.2f} s: from the "
            f"start of the process to the first good /health; 205.6 M parameters in bf16, "
            f"{size / 1e9:.2f} GB in the page cache, and all kernels built",
            samples={"ready_s": seconds},
        )
    ]


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loud", action="store_true", help="try it out: nothing is recorded")
    parts: dict[str, Callable[[Path, int], list[Row]]] = {
        "tokens": lambda folder, _: same_tokens(folder),
        "speed": speed,
        "refusals": lambda folder, _: refusals(folder),
        "simulator": lambda folder, _: simulator(folder),
        "scheduling": lambda _, __: overhead.scheduling(),
        "ready": ready,
        "exact": lambda _, rounds: overhead.exact(rounds),
    }
    parser.add_argument("--only", choices=list(parts))
    options = parser.parse_args()
    if not options.loud:
        require_quiet()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, measure in parts.items():
            if options.only in (None, part):
                rows += measure(folder, options.rounds)
    if options.loud:
        print(*rows, sep="\n")
    else:
        record(rows)


if __name__ == "__main__":
    main()
