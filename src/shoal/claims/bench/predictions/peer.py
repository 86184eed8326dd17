"""NVIDIA's AIConfigurator, asked for measured closed loops in an environment of its own.

Source: Xu et al., AIConfigurator: Lightning-Fast Configuration Optimization for Multi-Framework
LLM Serving, 2026; release 0.12.0.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.claims.bench.peer_process import PeerProcess
from shoal.core import children
from shoal.core.errors import ConfigError, ServeError
from shoal.core.files import locked, shoal_home
from shoal.core.meter.jsonl import JsonlSink
from shoal.cost.published.silicon import SiliconRun
from shoal.cost.step_cost.accelerated import ServingSplit

NAME, VERSION = "AIConfigurator", "0.12.0"
_PINS = (f"aiconfigurator=={VERSION}", f"aiconfigurator-core=={VERSION}")
_DRIVER = Path(__file__).parent / "drivers" / "of_aiconfigurator.py"
# The first answer of a device reads its tables.
_START_S, _ANSWER_S, _INSTALL_S = 300.0, 300.0, 1800.0
# Shape -> its model in the package, which would fetch the files of any other from a network.
_MODELS = {
    "DeepSeek-R1": "deepseek-ai/DeepSeek-R1",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "DeepSeek-V3.1": "deepseek-ai/DeepSeek-V3",
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3.5-397B-A17B": "Qwen/Qwen3.5-397B-A17B",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
_FORMATS = {"bf16": "bfloat16", "mxfp4": "w4a8_mxfp4_mxfp8"}


def environment() -> Path:
    """The interpreter of the environment below Shoal's home, which is made the first time.

    Raises:
        ConfigError: it cannot be made, as without a network.
    """
    place = shoal_home() / "peers" / f"aiconfigurator-{VERSION}"
    python, made = place / "bin" / "python", place / "made"
    with locked(place.with_name(f"{place.name}.lock"), lambda: None, error=ConfigError):
        if not (made.exists() and python.exists()):
            _run([sys.executable, "-m", "venv", "--clear", str(place)])
            _run([str(python), "-m", "pip", "install", "--quiet", *_PINS])
            made.touch()
    return python


def _run(words: Sequence[str]) -> None:
    process = children.start_command(
        words,
        env=children.environment(without=("PYTHONPATH", "PYTHONHOME")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = process.communicate(timeout=_INSTALL_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        said = f"it took longer than {_INSTALL_S:.0f} s"
    finally:
        children.kill([process])
    if process.returncode:
        errors = [line for line in said.strip().splitlines() if "notice" not in line]
        raise ConfigError(
            f"{NAME} {VERSION} cannot be installed: {' '.join(errors[-1:])}; check pip's access "
            "to a package index, or give --python with an interpreter that has it "
            f"({_install('PYTHON')}); --rows training needs neither"
        )


def _install(python: object) -> str:
    return f"{python} -m pip install {' '.join(_PINS)}"


def question(run: SiliconRun) -> dict[str, Any]:
    """What ``cli_estimate`` is asked of a run: what Shoal priced, in the peer's words."""
    each = run.clients.number / (run.splits[0].replicas * run.splits[0].pp)
    asked: dict[str, Any] = {
        "model_path": _MODELS.get(run.model, run.model),
        "system_name": run.device,
        "backend_name": run.engine,
        "isl": run.clients.prompt,
        "osl": run.clients.output,
        # Its tables, and its formulas where they lack an operator: more rows are answered.
        "database_mode": "HYBRID",
    }
    if len(run.splits) == 1:
        asked |= {"mode": "agg", "batch_size": math.ceil(each), **_degrees(run.splits[0])}
        if run.engine == "sglang":  # its default budget of prompts in a step; isl, of others
            asked |= {"ctx_tokens": max(run.clients.prompt, 8192)}
    else:
        decoders, prefillers = run.servers
        asked |= {
            "mode": "disagg",
            "decode_num_workers": decoders,
            "decode_batch_size": math.ceil(each / decoders),
            "prefill_num_workers": prefillers,
            "prefill_batch_size": 1,
            **_degrees(run.splits[0], "decode_"),
            **_degrees(run.splits[1], "prefill_"),
        }
    own, known = run.formats, dict(_FORMATS)
    if run.model.startswith("MiniMax"):
        # Its times of these experts with scales of blocks are far from what was measured.
        known["fp8_block"] = "fp8"
    if run.device.startswith("h"):
        known["mxfp4"] = "w4a16_mxfp4"  # no products of these formats before Blackwell
    formats = {"gemm": own.dense, "moe": own.experts}
    if own.dense in ("fp8", "nvfp4") or own.experts == "mxfp4":
        formats["kvcache"] = own.kv
    asked |= {f"{what}_quant_mode": known.get(name, name) for what, name in formats.items()}
    return asked


def _degrees(split: ServingSplit, side: str = "") -> dict[str, int]:
    return {
        f"{side}tp_size": split.tp,
        f"{side}pp_size": split.pp,
        f"{side}attention_dp_size": split.replicas,
        f"{side}moe_tp_size": split.expert_tp,
        f"{side}moe_ep_size": split.experts_over,
    }


def answered(
    questions: Sequence[Mapping[str, Any]],
    python: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    notice: Callable[[str], None] = lambda text: None,
) -> tuple[str, list[dict[str, Any]]]:
    """The version that answered, and its answers; those given before are read from a file.

    Args:
        questions: of :func:`question`.
        python: interpreter of an environment that has AIConfigurator.
        progress: called with answers so far, and with their number.
        notice: called with what a user should know.

    Raises:
        ConfigError: no such interpreter, or it has no AIConfigurator.
        ServeError: its process ended; what was answered before is kept.
    """
    path = shoal_home() / "predictions" / "aiconfigurator.jsonl"
    try:
        process = PeerProcess(
            NAME, [str(python.absolute()), str(_DRIVER)], {children.SAFE_PATH: "1"}
        )
    except OSError as cause:
        raise ConfigError(
            f"--python {python}: cannot be run ({cause.strerror}); expected a Python interpreter "
            "of an environment that has AIConfigurator"
        ) from cause
    with process:
        first = process.ask(None, _START_S)
        if "ready" not in first:
            raise ConfigError(
                f"--python {python}: it has no AIConfigurator ({first.get('missing')}); install "
                f"it there ({_install(python)}), or omit --python"
            )
        version = str(first["ready"])
        kept = _kept(path, notice)
        # Those of one device and engine follow each other: it reads their tables once.
        by_key = {_key(version, asked): asked for asked in sorted(questions, key=_place)}
        with contextlib.closing(JsonlSink(path=path).open()) as file:
            for number, (key, asked) in enumerate(by_key.items()):
                if key not in kept:
                    try:
                        kept[key] = _checked(process.ask(dict(asked), _ANSWER_S))
                    except ServeError as cause:
                        raise ServeError(
                            f"{cause}; the {number} earlier answers are saved in {path}, and the "
                            "same command continues from there"
                        ) from cause
                    file.event({"key": key, "answer": kept[key]}, {})
                progress(number + 1, len(by_key))
    return version, [kept[_key(version, asked)] for asked in questions]


def _place(asked: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(asked[name]) for name in ("system_name", "backend_name", "model_path"))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it says why there is none or has all times."""
    if "error" in answer:
        return {"error": str(answer["error"])}
    times = {name: float(answer[name]) for name in ("ttft_ms", "tpot_ms", "seconds")}
    fine = all(0 < one < math.inf for one in times.values())
    return times if fine else {"error": "no positive time"}


def _key(version: str, asked: Mapping[str, Any]) -> str:
    return json.dumps([version, asked], sort_keys=True)


def _kept(path: Path, notice: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Answers of the file by their key, but for damaged lines."""
    kept: dict[str, dict[str, Any]] = {}
    damaged = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
            kept[str(one["key"])] = _checked(one["answer"])
        except (ValueError, TypeError, KeyError):
            damaged += bool(line.strip())
    if damaged:
        notice(f"{path}: {damaged} damaged lines are ignored and computed again")
    return kept
