"""Every part that a serving plan proposes wins somewhere, and no other part proposes itself.

The table "Where each serving part wins" of ``docs/rooms/plan.md`` is this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.core.parts import table
from shoal.ir import ServeJob, ServePlan
from shoal.machine.described import load
from shoal.plan.serving.disagg import plan_goodput
from shoal.plan.serving.goodput import Slo
from shoal.plan.serving.plans import competing, plan_serve

DOCS = Path(__file__).parents[2] / "docs/rooms/plan.md"
KINDS = ("scheduler", "kv", "preempt", "phase", "speculative", "kv_format", "decode")
GPU = {"max_running": 256, "max_step_tokens": 8192}
CROWDED = {"kv_tokens": 4096, "max_position": 2048}
FALCON = {"k": 2}


class Wins(NamedTuple):
    """Where parts win.

    Args:
        machine: where.
        model: what is served.
        workload: what arrives.
        job: what else the job says.
        why: in words, for the documentation.
        has: the drafter that the user has.
    """

    machine: str
    model: str
    workload: dict[str, Any]
    job: dict[str, Any]
    why: str
    has: str = ""


CHAT = {"name": "chat", "requests": 12}
WINS: dict[str, Wins] = {
    "scheduler.fcfs": Wins("H100", "Qwen3-8B", CHAT, GPU, "nothing else is asked for"),
    "scheduler.fair": Wins(
        "RTX-4090", "Qwen3-8B", {**CHAT, "requests": 30}, {**GPU, **CROWDED},
        "the cache is crowded, and short answers need not wait for long ones",
    ),
    "scheduler.prefill_first": Wins(
        "laptop", "shoal-16m", {"name": "multiturn", "requests": 16, "rate": 1, "scale": 2},
        {"max_position": 1024}, "few requests at once: the first token comes sooner",
    ),
    "kv.paged": Wins(
        "H100", "Qwen3-8B", {"name": "shared_prefix", "requests": 12}, GPU,
        "prompts that begin alike are computed once",
    ),
    "kv.blockgroups": Wins(
        "RTX-4090", "Qwen3-8B", {**CHAT, "requests": 30}, {**GPU, **CROWDED},
        "caches are swapped often, by fewer copies",
    ),
    "kv.distributed": Wins(
        "2x1xRTX-4090@ETH25", "Llama-3.1-8B", {**CHAT, "requests": 16},
        {"max_running": 64, "max_step_tokens": 8192, "max_position": 49152},
        "requests may be longer than a device's cache, and a network lies between the devices",
    ),
    "preempt.recompute": Wins(
        "H100", "Qwen3-0.6B", {"name": "code", "requests": 20},
        {**GPU, "kv_tokens": 2048, "max_position": 1024},
        "requests are preempted, and a small model computes short prompts again at once",
    ),
    "preempt.swap": Wins(
        "RTX-4090", "Qwen3-8B", {**CHAT, "requests": 30}, {**GPU, **CROWDED},
        "many are preempted, and the link to the host is fast",
    ),
    "phase.prefill": Wins(
        "2xH100", "Qwen3-8B", {"name": "summary"}, {**GPU, "max_position": 16384},
        "within ttft 1 s and tpot 12 ms: no prompt holds up those who generate",
    ),
    "phase.decode": Wins(
        "2xH100", "Qwen3-8B", {"name": "summary"}, {**GPU, "max_position": 16384},
        "within ttft 1 s and tpot 12 ms: no prompt holds up those who generate",
    ),
    "speculative.ngram": Wins(
        "H100", "Qwen3-8B", {"name": "code", "requests": 12}, {**GPU, "max_position": 2048},
        "answers repeat parts of their prompts, and there is no draft model",
    ),
    **{
        f"speculative.{name}": Wins(
            "H100", "Qwen3-8B", CHAT, {**GPU, "max_position": 4096}, "you have one", has=name
        )
        for name in ("medusa", "falcon", "ppd", "dovetail", "draft_model")
    },
}  # fmt: skip

NEVER: dict[str, str] = {
    "scheduler.static": "a baseline: no request joins a running batch",
    "scheduler.temporal_fusion": "room for the longest answer is kept from the start, and what it "
    "saves on the host is not priced",
    "kv.contiguous": "a baseline: as fast as `paged` at best",
    "kv.slots": "as `contiguous`; that a slot is read in one piece is not priced",
    "preempt.auto": "`recompute` and `swap` are both tried",
    "speculative.easyspec": "what it saves beside `draft_model` is measured, not priced",
    "kv_format.plain": "the cache as it is",
    "kv_format.int8": "it changes answers",
    "kv_format.bfp": "it changes answers",
    "decode.autoregressive": "the answers as they are",
    "decode.diffusion": "a model of its own kind",
    "decode.hogwild": "it changes answers",
}


def drafter(name: str, place: Path) -> Path:
    """A drafter of this kind that is often right, as far as a plan reads it."""
    if name == "draft_model":
        (place / "config.json").write_text(
            json.dumps({"num_attention_heads": 16, "hidden_size": 1024, "num_hidden_layers": 28})
        )
        (place / "model.safetensors").write_bytes(bytes(100_000))
        return place
    result = {
        "name": name,
        "target": "0" * 64,
        "vocab_size": 151936,
        "hidden": 4096,
        "options": FALCON if name == "falcon" else {},
        "calibration": [[0.6, 0.1, 0.05], [0.4, 0.1, 0.05], [0.25, 0.08, 0.04]],
    }
    (place / "drafter.json").write_text(json.dumps(result))
    return place


def job_of(one: Wins) -> ServeJob:
    return ServeJob.model_validate({"model": one.model, "workload": one.workload, **one.job})


MADE: dict[str, list[ServePlan]] = {}


def plans(one: Wins, place: Path) -> list[ServePlan]:
    """The plans of a scenario, best first; several parts win in the same one."""
    key = repr(one._replace(why=""))
    if key not in MADE:
        job, machine = job_of(one), load(one.machine)
        has = [str(drafter(one.has, place))] if one.has else []
        MADE[key] = competing(job, plan_serve(job, machine), drafters=has)
    return MADE[key]


@pytest.mark.slow
@pytest.mark.parametrize("part", [name for name in WINS if not name.startswith("phase.")])
def test_wins(part: str, tmp_path: Path) -> None:
    ranked = plans(WINS[part], tmp_path)
    kind, _, name = part.partition(".")
    first = ranked[0]
    assert first.fits
    chosen = getattr(first.job, kind)
    assert chosen is not None
    assert chosen.name == name
    without = [one for one in ranked if getattr(one.job, kind) != chosen]
    if part not in ("scheduler.fcfs", "kv.paged", "preempt.recompute"):  # which were asked for
        assert without, "it wins against nobody"
    # Answers are those of the job as it was asked for.
    for one in ranked:
        for key in ("kv_format", "weights", "decode", "precision"):
            assert getattr(one.job, key) == getattr(first.job, key)


@pytest.mark.slow
def test_phases_win() -> None:
    one = WINS["phase.prefill"]
    assert one == WINS["phase.decode"]
    targets = Slo(ttft=1.0, tpot=0.012)
    report = plan_goodput(job_of(one), load(one.machine), targets, tolerance=5.0)
    assert report.best.setting.both is None
    other = report.best_of(apart=False)
    assert other is not None
    assert report.best.goodput > 1.05 * other.goodput


def test_every_part_wins_somewhere_or_says_why_not() -> None:
    every = {f"{kind}.{name}": table(kind).load(name) for kind in KINDS for name in table(kind)}
    offering = {name for name, part in every.items() if hasattr(part, "candidates")}
    assert offering == set(WINS)
    assert set(every) - offering == set(NEVER)


def test_the_documentation_has_the_same_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for part, one in WINS.items():
        assert (
            f"| `{part}` | {one.machine} | {one.model} | {one.workload['name']} | {one.why} |"
            in text
        )
    for part, why in NEVER.items():
        assert f"| `{part}` | {why} |" in text


def test_parts_that_do_not_go_with_each_other_do_not_compete(tmp_path: Path) -> None:
    ranked = plans(WINS["kv.distributed"], tmp_path)
    lent = [one for one in ranked if one.job.kv.name == "distributed"]
    assert lent
    assert all(one.job.speculative is None for one in lent)
    assert {one.job.preempt.name for one in lent} == {"recompute"}
