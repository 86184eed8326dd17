"""On a processor without AVX-512, and on one without AVX, everything that runs is tested here.

The processor is this one with fewer flags (see ``tests/older_processor.py``), so what it computes
is compared with the same references as everywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from older_processor import PROCESSORS, environment
from shoal.core.native import compiler, cpu_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multi,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("avx2" not in cpu_flags(), reason="what is built needs AVX2 to run"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump"),
]

TESTS = Path(__file__).parents[1]
SHOAL = str(Path(sys.executable).with_name("shoal"))
# What no program for the processor may name.
FOREIGN = {"haswell": r"%zmm|%k[1-7]\b|%tmm", "nehalem": r"%[yz]mm|%k[1-7]\b|\bv[a-z]+\s+.*%xmm"}
# Against references: kernels, and an engine whose tokens are those of the model alone.
BATTERIES = (
    *("kernel/test_linear_kernels.py", "kernel/test_paged.py", "kernel/test_kv_formats.py"),
    *("kernel/test_fused_kernels.py", "kernel/test_fused_training.py", "kernel/test_strided.py"),
    *("kernel/test_rnn.py", "kernel/test_spgemm.py", "serve/test_engine.py"),
)

CHOSEN = """
import json
from shoal.core.native import cpu_flags
from shoal.core.parts import table
from shoal.kernel.calls import LinearCall, PagedAttentionCall, PointwiseCall
from shoal.kernel.dispatch import candidates, kernels_of

calls = [
    LinearCall(rows, 256, 256, dtype, "cpu") for rows in (1, 64) for dtype in ("fp32", "bf16")
]
calls += [PointwiseCall(op, 4, 256, 256, "bf16", "cpu") for op in ("rms_norm", "swiglu")]
calls += [
    PagedAttentionCall(
        batch=4, context=128, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=dtype
    )
    for dtype in ("fp32", "bf16")
]
chosen = {}
for call in calls:
    names = [name for name, _ in candidates(call)]
    assert names, call
    for name in names:
        assert kernels_of(call.op)[name].needs <= cpu_flags(), (name, call)
    chosen.setdefault(call.op, []).extend(names)
print(json.dumps(chosen))
"""


@pytest.fixture(scope="module", params=sorted(PROCESSORS))
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, str]]:
    """Name, a directory, and the environment of the processor."""
    place = tmp_path_factory.mktemp(request.param)
    return request.param, place, environment(request.param, place)


def run(older: tuple[str, Path, dict[str, str]], *words: str) -> str:
    _, place, variables = older
    done = subprocess.run(words, cwd=place, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_needs_more_is_not_chosen(older: tuple[str, Path, dict[str, str]]) -> None:
    chosen = json.loads(run(older, sys.executable, "-c", CHOSEN))
    assert set(chosen) == {"linear", "rms_norm", "swiglu", "paged_attention"}
    assert all(set(names) <= {"reference", "torch"} for names in chosen.values()), chosen


def test_every_kernel_builds_without_a_foreign_instruction(
    older: tuple[str, Path, dict[str, str]],
) -> None:
    name, place, _ = older
    run(older, SHOAL, "doctor", "--build")
    built = sorted((place / "home" / "native").glob("*.so"))
    assert len(built) > 20
    for library in built:
        # Probes ask the processor before they call what they have for newer ones.
        text = run(older, "objdump", "-d", "--no-show-raw-insn", str(library))
        assert re.search(FOREIGN[name], text) is None, library


def test_its_results_are_those_of_the_references(
    older: tuple[str, Path, dict[str, str]],
) -> None:
    files = [str(TESTS / file) for file in BATTERIES]
    marks = "not slow and not gpu and not claim and not multi"
    told = run(
        older, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *files
    )
    assert re.search(r"\d\d+ passed", told) or told.rstrip().endswith("[100%]")


def test_it_trains_and_serves(older: tuple[str, Path, dict[str, str]]) -> None:
    _, place, variables = older
    words = " ".join(f"word{number % 97} of {number * 31 % 101}" for number in range(30000))
    (place / "text.txt").write_text(words)
    run(
        older,
        *(SHOAL, "train", "--machine", "laptop", "--model", "shoal-0.3m", "--ranks", "2"),
        *("--data", "text.txt", "--set", "seq_len=64", "--set", "global_batch=4", "--dir", "run"),
        *("--set", "threads=1", "--steps", "4", "-q"),
    )
    steps = map(json.loads, (place / "run" / "events.jsonl").read_text().splitlines())
    losses = [step["loss"] for step in steps if step["kind"] == "step"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    server = subprocess.Popen(
        [SHOAL, "serve", "run/export", "--port", "0", "-q"],
        cwd=place,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
    )
    with server:
        try:
            url = server.stdout.readline().strip()
            body = {"model": "run", "prompt": "word1 of", "max_tokens": 6, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                served = json.load(answer)["choices"][0]["text"]
        finally:
            server.terminate()
    plain = {k: v for k, v in os.environ.items() if k != "SHOAL_HOME"}
    here = [SHOAL, "model", "generate", "run/export", "--prompt", "word1 of", "--tokens", "6"]
    done = subprocess.run(
        [*here, "--temperature", "0"], cwd=place, env=plain, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert served.strip()
    assert served.strip() in done.stdout
