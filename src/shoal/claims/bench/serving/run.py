"""The table: every engine in every case, in turns forth and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.claims.bench.serving.peers import PeerEngine, known, resting
from shoal.claims.bench.serving.values import (
    CASES,
    GOALS,
    EngineResult,
    Form,
    ServingCase,
    ServingTable,
)
from shoal.core.errors import ConfigError, ServeError, require
from shoal.core.random import generator
from shoal.core.scratch import scratch_directory
from shoal.core.tables import Table, table_of
from shoal.model.config import ModelConfig

SHAPE = ModelConfig(
    name="random-206m",
    vocab_size=8192,
    hidden=1024,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden=2816,
    max_position=2048,
    # Wide enough that the best tokens lie apart, and engines can be compared by their tokens.
    initializer_range=0.05,
)
"""205.6 M parameters: what the table is about when no model is given."""

COLUMNS = (
    "case",
    "weights",
    "engine",
    "tokens/s",
    "Shoal is",
    "90 % interval",
    "wanted",
    "same first tokens",
)
"""Of :func:`rows`."""

_KV_TOKENS, _MAX_RUNNING, _MAX_POSITION = 16_384, 64, 2048
_SAME = 4
_REFERENCE = "transformers"


def random_directory(place: Path, config: ModelConfig = SHAPE, seed: int = 0) -> Path:
    """A Hugging Face directory with random weights in bf16, written once."""
    import torch

    from shoal.model import huggingface
    from shoal.train import zoo

    target = place / config.name
    if not target.is_dir():
        huggingface.write(target, zoo.random(config, seed).to(torch.bfloat16))
    return target


def lengths(case: ServingCase, seed: int) -> tuple[list[int], list[int]]:
    """Tokens of the prompts and of the answers of a case; the same in every round."""
    if not case.spread:
        return [case.prompt] * case.requests, [case.new] * case.requests
    random = generator(seed, purpose="peers lengths")

    def drawn(median: int) -> list[int]:
        values = median * np.exp(case.spread * random.standard_normal(case.requests))
        return [int(value) for value in np.clip(values, 8, 6 * median)]

    return drawn(case.prompt), drawn(case.new)


def bench(
    model: Path,
    *,
    environments: Path | None = None,
    only: Sequence[str] = (),
    cases: Sequence[ServingCase] = CASES,
    rounds: int = 6,
    threads: int = 2,
    seed: int = 0,
    progress: Callable[[str, float, float], None] | None = None,
) -> ServingTable:
    """Run the table.

    Args:
        model: a Hugging Face directory.
        environments: where the peers' environments are.
        only: engines beside Shoal; empty for all that are there.
        cases: rows.
        rounds: timed rounds of each row, forth and back in turns; one more warms up.
        threads: of every engine.
        seed: of prompts and lengths.
        progress: called with (what, done, total).

    Raises:
        ConfigError: an unknown engine, or less than one round.
        ServeError: Shoal itself fails.
    """
    from shoal.claims.run import commit_of_code
    from shoal.machine.fingerprint import fingerprint

    require(rounds >= 1, "rounds", rounds, expected="1 or more")
    peers, missing = known(environments)
    for name in only:
        if name not in peers and name not in missing:
            raise ConfigError(f"engine = {name!r}: expected one of {', '.join([*peers, *missing])}")
    wanted = [peer for name, peer in peers.items() if not only or name in only or name == "shoal"]
    config = _vocabulary(model)
    entries: list[EngineResult] = []
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    work = [(case, form) for case in cases for form in case.forms]
    done = 0
    with scratch_directory("peers") as scratch:
        for form in dict.fromkeys(form for _, form in work):
            engines: list[PeerEngine] = []
            with resting(engines):
                for peer in wanted:
                    if form in peer.lacks:
                        missing[f"{peer.name}, {form}"] = peer.lacks[form]
                        continue
                    options: dict[str, Any] = {
                        "model": str(model),
                        "form": form,
                        "threads": threads,
                        "kv_tokens": _KV_TOKENS,
                        "max_running": _MAX_RUNNING,
                        "max_position": min(_MAX_POSITION, config.max_position),
                        "scratch": str(scratch),
                    }
                    if progress is not None:
                        progress(f"loading {peer.name}, {form}", done, len(work))
                    try:
                        engines.append(PeerEngine(peer, options))
                    except ServeError as cause:
                        if peer.needed:
                            raise
                        missing[f"{peer.name}, {form}"] = str(cause)
                        continue
                    versions[peer.name] = engines[-1].version
                    settings[f"{peer.name}, {form}"] = engines[-1].settings
                for case in (case for case, needed in work if needed == form):
                    if progress is not None:
                        progress(f"{case.name}, {form}", done, len(work))
                    result, failed = _case(case, form, engines, config.vocab_size, rounds, seed)
                    entries += result
                    for engine, reason in failed.items():
                        missing[f"{engine}, {form}"] = f"{case.name}: {reason}"
                    engines = [one for one in engines if one.peer.name not in failed]
                    done += 1
    return ServingTable(
        model=f"{config.name}: {config.shape().num_layers} layers, width {config.hidden}",
        threads=threads,
        versions=versions,
        settings=settings,
        missing=missing,
        entries=tuple(entries),
        machine=dict(fingerprint()),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=commit_of_code()[0],
    )


def _vocabulary(model: Path) -> ModelConfig:
    from shoal.model import huggingface

    return huggingface.read_config(model)


def _case(
    case: ServingCase, form: Form, engines: Sequence[PeerEngine], vocab: int, rounds: int, seed: int
) -> tuple[list[EngineResult], dict[str, str]]:
    """All engines in one case, and those that failed. Every batch has new prompts."""
    prompts_of, new = lengths(case, seed)
    seconds: dict[str, list[float]] = {engine.peer.name: [] for engine in engines}
    answers: dict[str, list[list[int]]] = {engine.peer.name: [] for engine in engines}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        random = generator(seed, purpose=f"peers {case.name} {form}", index=turn)
        measured, shorter = (
            [random.integers(0, vocab, n).tolist() for n in prompts_of] for _ in range(2)
        )
        for engine in engines[:: 1 if turn % 2 else -1]:
            name = engine.peer.name
            if name in failed:
                continue
            try:
                taken, tokens = _batch(engine, case, measured, shorter, new)
            except ServeError as cause:
                if name == "shoal":
                    raise
                failed[name] = str(cause)
                continue
            if turn:
                seconds[name].append(taken)
                answers[name] += tokens
    reference = None if _REFERENCE in failed else answers.get(_REFERENCE)
    counted = sum(new) if case.what == "decode" or case.new > 1 else sum(prompts_of)
    return [
        EngineResult(
            case=case.name,
            form=form,
            engine=name,
            seconds=tuple(seconds[name]),
            tokens=counted,
            agreement=_same_first(answers[name], answers["shoal"]),
            equal=None if reference is None else _equal(answers[name], reference),
            weights=engine.weights,
        )
        for engine in engines
        if (name := engine.peer.name) not in failed
    ], failed


def _same_first(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of answers whose first tokens are the same."""
    pairs = zip(answers, others, strict=True)
    return float(np.mean([row[:_SAME] == other[:_SAME] for row, other in pairs]))


def _equal(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = zip(answers, others, strict=True)
    return float(np.mean([a == b for row, other in pairs for a, b in zip(row, other, strict=True)]))


def _batch(
    engine: PeerEngine,
    case: ServingCase,
    prompts: list[list[int]],
    others: list[list[int]],
    new: list[int],
) -> tuple[float, list[list[int]]]:
    """Seconds that count, and tokens."""
    if case.what == "whole":
        return engine.generate(prompts, new)
    # Prompts of the same lengths, with their first tokens, are what does not count.
    begun, _ = engine.generate(others, [1] * len(new))
    taken, tokens = engine.generate(prompts, [n + 1 for n in new])
    return taken - begun, tokens


def tables(table: ServingTable) -> Iterable[Table | str]:
    """The table, versions of the engines, and why others are missing."""
    yield table_of(f"{table.model}; {table.threads} threads each", COLUMNS, rows(table))
    yield ", ".join(f"{name} {version}" for name, version in table.versions.items())
    yield from notes(table)


def rows(table: ServingTable) -> list[tuple[str, ...]]:
    """Cells of the table: case, weights, engine, tokens/s, ratio, interval, wanted, agreement."""
    rows = []
    for entry in table.entries:
        key = (entry.case, entry.form, entry.engine)
        ratio, wanted = table.ratio(*key), GOALS.get(key)
        cells = ["", "", "", ""]
        if entry.engine != "shoal" and ratio is not None:
            cells = [f"{ratio.value:.2f}x", f"{ratio.low:.2f} .. {ratio.high:.2f}", "", ""]
            if wanted is not None:
                cells[2] = f">= {wanted:g}x: {'yes' if ratio.value >= wanted else 'NO'}"
            cells[3] = f"{100 * entry.agreement:.0f} %"
        weights = f"{entry.form} as {entry.weights}" if entry.weights else entry.form
        rows.append((entry.case, weights, entry.engine, f"{entry.rate.value:,.0f}", *cells))
    return rows


def notes(table: ServingTable) -> list[str]:
    """What belongs under the rows: equal tokens, settings, and what is left out and why."""
    shares: dict[str, list[float]] = {}
    for entry in table.entries:
        if entry.equal is not None and entry.engine != _REFERENCE:
            shares.setdefault(entry.engine, []).append(entry.equal)
    said = ", ".join(f"{name} {100 * np.mean(each):.0f} %" for name, each in shares.items())
    return [
        *([f"tokens equal to those of {_REFERENCE}, mean of the cases: {said}"] if said else []),
        *(f"{name}: {settings}" for name, settings in table.settings.items()),
        *(f"{name}: left out: {why}" for name, why in table.missing.items()),
    ]
