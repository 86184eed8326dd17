"""[7] Universal Checkpointing: does a run go on in any split, at no cost to saving?

Four layouts of four real processes train a small model on the source of Python's standard library,
with a vocabulary that two ranks cannot share evenly, grouped queries and a tied embedding. Each
dumps what its ranks hold. The dumps are put together and

- compared with weights and moments that were gathered in memory, bit for bit;
- resumed in every layout, and on one process, beside the run that never stopped.

The cost: saves with what conversion needs beside saves without it, in turns, on a file system in
memory where there is one, so that only the path is timed and no disk; and the peak of a process
that takes rank files apart.

The baseline puts fragments behind each other without regard to fused parts, gathers everything on
one rank to save it, and reads all files before it takes them apart.

Source: Lian et al., Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale
Distributed Training, 2024.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part
from shoal.core.scratch import SHARED_MEMORY, scratch_directory

if TYPE_CHECKING:
    from shoal.checkpoint.universal.spec import UniversalSpec

__all__ = ["UniversalCheckpointClaim"]

_RANKS = "shoal.claims.experiments.universal_checkpoint_ranks"
_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4-zero1": {"parallel": {"dp": 4}, "shard": "zero1"},
    "dp2-tp2": {"parallel": {"dp": 2, "tp": 2}},
    "pp2-tp2": {"parallel": {"pp": 2, "tp": 2}},
    "dp2-pp2-zero3": {"parallel": {"dp": 2, "pp": 2}, "shard": "zero3"},
}


@part
class UniversalCheckpointClaim(BaseClaim):
    """Sixteen pairs of layouts, time of saves, memory of taking files apart.

    Args:
        steps: before the dump.
        after: steps after it.
        rounds: saves of each kind.
        large: width of the model whose saves are timed.
    """

    steps: Annotated[int, Ge(1)] = 100
    after: Annotated[int, Ge(1)] = 50
    rounds: Annotated[int, Ge(1)] = 40
    large: Annotated[int, MultipleOf(64), Ge(64), Le(4096)] = 256

    rows: ClassVar[tuple[int, ...]] = (7,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        if quick:
            context.progress("cutting and putting together", 0.1)
            return ClaimSamples(
                metrics={"wrong_elements": _cut_and_join(context.work_dir, as_baseline)}
            )
        context.progress("training in four layouts", 0.05)
        truth, losses = context.remember("sources", lambda: self._sources(context))
        context.progress("putting together", 0.3)
        places, wrong = _consolidated(truth, as_baseline)
        context.progress("resuming in every layout", 0.35)
        resumed = self._resumed(context, places, as_baseline)
        apart = {
            pair: max(abs(a - b) for a, b in zip(found, losses[pair.split(" -> ")[0]], strict=True))
            for pair, found in resumed.items()
        }
        same = {pair: d for pair, d in apart.items() if len(set(pair.split(" -> "))) == 1}
        context.progress("timing saves", 0.75)
        seconds, memory, skipped = self._cost(context, as_baseline)
        metrics = {
            "wrong_elements": PairedSamples(method=tuple(float(n) for n in wrong.values())),
            "loss_difference": PairedSamples(method=tuple(apart.values())),
            "same_layout_difference": PairedSamples(method=tuple(same.values())),
            "save_time": PairedSamples(
                method=tuple(seconds["with"]), baseline=tuple(seconds["without"])
            ),
        }
        if memory:
            metrics["extract_memory"] = PairedSamples(
                method=(memory["peak"],), baseline=(memory["largest"],)
            )
        details: dict[str, JsonValue] = {
            "pairs": dict(apart),
            "wrong": dict(wrong),
            "losses": {name: [found[0], found[-1]] for name, found in losses.items()},
            "memory": dict(memory),
        }
        return ClaimSamples(metrics=metrics, details=details, skipped=skipped)

    def _sources(self, context: ExperimentContext) -> tuple[Path, dict[str, list[float]]]:
        from shoal.parallel.comm.processes import run_processes

        root = context.work_dir / "sources"
        root.mkdir()
        given = {
            "jobs": {name: _job(layout) for name, layout in _LAYOUTS.items()},
            "config": _config(64, 4),
            "root": str(root),
            "steps": self.steps,
            "after": self.after,
        }
        ranks = run_processes(f"{_RANKS}:sources", 4, given, timeout_s=400.0)
        return root, ranks[0]

    def _resumed(
        self, context: ExperimentContext, places: dict[str, Path], as_baseline: bool
    ) -> dict[str, list[float]]:
        from shoal.parallel.comm.processes import run_processes

        # What was put together wrongly shows in one pair.
        targets = {"dp4-zero1": _LAYOUTS["dp4-zero1"]} if as_baseline else _LAYOUTS
        chosen = {"dp2-tp2": places["dp2-tp2"]} if as_baseline else places
        given: dict[str, Any] = {"config": _config(64, 4), "after": self.after}
        pairs = [
            (f"{name} -> {target}", str(place), _job(layout))
            for name, place in chosen.items()
            for target, layout in ({name: _LAYOUTS[name]} | targets).items()
        ]
        result: dict[str, list[float]] = {}
        ranks = run_processes(f"{_RANKS}:resume", 4, {**given, "pairs": pairs}, timeout_s=400.0)
        result |= ranks[0]
        alone = [
            (f"{name} -> one process", str(place), _job({"parallel": {"dp": 1}}))
            for name, place in chosen.items()
        ]
        result |= run_processes(f"{_RANKS}:resume", 1, {**given, "pairs": alone}, timeout_s=400.0)[
            0
        ]
        return result

    def _cost(
        self, context: ExperimentContext, as_baseline: bool
    ) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
        from shoal.parallel.comm.processes import run_processes

        with _scratch() as root:
            given = {
                "job": _job(_LAYOUTS["dp2-tp2"]),
                "config": _config(self.large, 6),
                "root": str(root / "saves"),
                "rounds": min(self.rounds, 5) if as_baseline else self.rounds,
                "gathered": as_baseline,
            }
            ranks = run_processes(f"{_RANKS}:time_saves", 4, given, timeout_s=400.0)
            seconds = {
                kind: [max(all_) for all_ in zip(*(rank[kind] for rank in ranks), strict=True)]
                for kind in ("with", "without")
            }
            if not os.access("/proc/self/clear_refs", os.W_OK):
                reason = "the peak of a process cannot be set back on this system"
                return seconds, {}, {"extract_memory": reason}
            context.progress("memory of taking files apart", 0.95)
            memory: dict[str, float] = run_processes(
                f"{_RANKS}:extract_memory",
                1,
                {
                    "place": str(root / "saves"),
                    "folder": str(root / "fragments"),
                    "at_once": as_baseline,
                },
            )[0]
        return seconds, memory, {}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory in memory, where the system has such a file system."""
    in_memory = os.access(SHARED_MEMORY, os.W_OK)
    with scratch_directory("claim", SHARED_MEMORY if in_memory else None) as folder:
        yield folder


def _config(width: int, layers: int) -> dict[str, Any]:
    """Grouped queries, 257 tokens, a tied embedding: nothing divides as it would like to."""
    return {
        "family": "llama",
        "vocab_size": 257,
        "hidden": width,
        "num_layers": layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": width // 4,
        "ffn_hidden": width * 5 // 2,
        "max_position": 128,
        "tied": True,
    }


def _job(layout: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "shoal-0.3m",
        "steps": 1000,
        "seq_len": 64,
        "global_batch": 8,
        "microbatch": 2,
        "precision": "fp32",
        "optimizer": {"name": "adamw", "lr": 1e-3},
        **layout,
    }


def _naive(spec: UniversalSpec) -> UniversalSpec:
    """The same without fused parts: their fragments are put behind each other."""
    from shoal.checkpoint.universal.spec import UniversalSpec

    plain = spec.plain()
    for entry in plain:
        if isinstance(entry["rule"], dict) and entry["rule"]["name"] == "fused":
            entry["rule"] = "fragment"
    return UniversalSpec.parse(plain)


def _consolidated(root: Path, as_baseline: bool) -> tuple[dict[str, Path], dict[str, int]]:
    """Universal checkpoint of each layout, and how many of its elements are not the truth."""
    from safetensors import safe_open

    from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
    from shoal.checkpoint.universal.atomic import UniversalCheckpoint
    from shoal.checkpoint.universal.convert import consolidate

    places: dict[str, Path] = {}
    wrong: dict[str, int] = {}
    for name in _LAYOUTS:
        source = DeepSpeedDumps(root / name)
        spec = source.spec()
        assert spec is not None
        out = root / f"{name}.{'naive' if as_baseline else 'universal'}"
        place = consolidate(source, out, spec=_naive(spec) if as_baseline else spec)
        checkpoint = UniversalCheckpoint(place)
        with safe_open(root / f"{name}.truth.safetensors", framework="pt") as truth:
            names = list(truth.keys())
            wrong[name] = sum(
                int((checkpoint.tensor(key) != truth.get_tensor(key)).sum()) for key in names
            )
        places[name] = place
    return places, wrong


def _cut_and_join(folder: Path, as_baseline: bool) -> PairedSamples:
    """Whole states, written for several meshes and put together again: elements that differ."""
    import torch

    from shoal.checkpoint.formats import FORMATS
    from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
    from shoal.checkpoint.formats.transfer import open_any
    from shoal.checkpoint.store import Store
    from shoal.checkpoint.universal.atomic import UniversalCheckpoint
    from shoal.checkpoint.universal.convert import consolidate
    from shoal.checkpoint.universal.protocols import RankLayout
    from shoal.core.random import generator
    from shoal.model.config import ModelConfig
    from shoal.parallel.tensor.slices import whole_shapes

    kind = "naive" if as_baseline else "universal"
    config = ModelConfig.model_validate(_config(64, 2))
    source = generator(0, purpose="claim universal_checkpoint")
    state = {}
    for name, shape in whole_shapes(config).items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg"):
            state[key] = torch.from_numpy(source.standard_normal(shape)).float()
    store = folder / f"store-{kind}"
    Store(store).save(1, state, {"model": config.model_dump(mode="json")})
    wrong = []
    for zero, mesh in ((1, "dp=4"), (1, "dp=2,tp=2"), (2, "tp=2,pp=2"), (3, "dp=2,tp=2")):
        place = folder / f"{kind}-{zero}-{mesh}"
        writer = FORMATS.build({"name": "deepspeed", "zero": zero})
        writer.write(place, open_any(store), mesh=RankLayout.parse(mesh))
        dumps = DeepSpeedDumps(place)
        spec = dumps.spec()
        assert spec is not None
        checkpoint = UniversalCheckpoint(
            consolidate(dumps, spec=_naive(spec) if as_baseline else spec)
        )
        wrong.append(sum(int((checkpoint.tensor(k) != v).sum()) for k, v in state.items()))
    return PairedSamples(method=tuple(map(float, wrong)))
