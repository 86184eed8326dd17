"""[7] Universal Checkpointing: does a run go on in any split, at no cost to saving?

Four layouts of four real processes, with a vocabulary that two ranks cannot share evenly, grouped
queries and a tied embedding. Dumps are put together, compared with what was gathered in memory bit
for bit, and resumed in every layout and on one process. Saves with what conversion needs, beside
saves without, on a file system in memory; and the peak of taking rank files apart. The A/A run
ignores fused parts, gathers everything to save it, and reads all files first.

Source: Lian et al., Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale
Distributed Training, 2024.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import part
from shoal.core.scratch import SHARED_MEMORY, scratch_directory

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.universal.spec import UniversalSpec
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig

_RANKS = "shoal.claims.experiments.universal_checkpoint_ranks"
_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4-zero1": {"parallel": {"dp": 4}, "shard": "zero1"},
    "dp2-tp2": {"parallel": {"dp": 2, "tp": 2}},
    "pp2-tp2": {"parallel": {"pp": 2, "tp": 2}},
    "dp2-pp2-zero3": {"parallel": {"dp": 2, "pp": 2}, "shard": "zero3"},
}


@part
class UniversalCheckpointClaim(BaseClaim, row=7, needs=("torch",)):
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

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        if run.quick:
            run.progress("cutting and putting together", 0.1)
            run.put("wrong_elements", _cut_and_join(run.work_dir, run.as_baseline))
            return
        run.progress("training in four layouts", 0.05)
        truth, losses = run.remember("sources", lambda: self._sources(run.work_dir))
        run.progress("putting together", 0.3)
        places, wrong = _consolidated(truth, run.as_baseline)
        run.put("wrong_elements", wrong)
        run.progress("resuming in every layout", 0.35)
        apart, same = [], []
        for pair, found in self._resumed(places, run.as_baseline).items():
            source, target = pair.split(" -> ")
            apart.append(max(abs(a - b) for a, b in zip(found, losses[source], strict=True)))
            if source == target:
                same.append(apart[-1])
        run.put("loss_difference", apart)
        run.put("same_layout_difference", same)
        run.progress("timing saves", 0.75)
        self._cost(run)

    def _sources(self, folder: Path) -> tuple[Path, dict[str, list[float]]]:
        root = folder / "sources"
        root.mkdir()
        jobs = {name: _job(layout) for name, layout in _LAYOUTS.items()}
        ranks = on_ranks(
            f"{_RANKS}:sources", 4, timeout_s=400.0, jobs=jobs, config=_config(64, 4),
            root=str(root), steps=self.steps, after=self.after,
        )  # fmt: skip
        return root, ranks[0]

    def _resumed(self, places: dict[str, Path], as_baseline: bool) -> dict[str, list[float]]:
        # What was put together wrongly shows in one pair.
        targets = {"dp4-zero1": _LAYOUTS["dp4-zero1"]} if as_baseline else _LAYOUTS
        chosen = {"dp2-tp2": places["dp2-tp2"]} if as_baseline else places
        pairs = [
            (f"{name} -> {target}", str(place), _job(layout))
            for name, place in chosen.items()
            for target, layout in ({name: _LAYOUTS[name]} | targets).items()
        ]
        alone = [
            (f"{name} -> one process", str(place), _job({"parallel": {"dp": 1}}))
            for name, place in chosen.items()
        ]
        result: dict[str, list[float]] = {}
        for world, some in ((4, pairs), (1, alone)):
            result |= on_ranks(
                f"{_RANKS}:resume", world, timeout_s=400.0, pairs=some, config=_config(64, 4),
                after=self.after,
            )[0]  # fmt: skip
        return result

    def _cost(self, run: ClaimRun) -> None:
        """Seconds of saves, and memory of taking files apart."""
        with _scratch() as root:
            ranks = on_ranks(
                f"{_RANKS}:time_saves", 4, timeout_s=400.0, job=_job(_LAYOUTS["dp2-tp2"]),
                config=_config(self.large, 6), root=str(root / "saves"),
                rounds=min(self.rounds, 5) if run.as_baseline else self.rounds,
                gathered=run.as_baseline,
            )  # fmt: skip
            run.put("save_time", slowest(ranks, "with"), slowest(ranks, "without"))
            if not os.access("/proc/self/clear_refs", os.W_OK):
                why = "the peak of a process cannot be set back on this system"
                run.skip(why, "extract_memory")
                return
            run.progress("memory of taking files apart", 0.95)
            memory = on_ranks(
                f"{_RANKS}:extract_memory", 1, place=str(root / "saves"),
                folder=str(root / "fragments"), at_once=run.as_baseline,
            )[0]  # fmt: skip
            run.put("extract_memory", memory["peak"], memory["largest"])


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory in memory, where the system has such a file system."""
    in_memory = os.access(SHARED_MEMORY, os.W_OK)
    with scratch_directory("claim", SHARED_MEMORY if in_memory else None) as folder:
        yield folder


def _config(width: int, layers: int) -> ModelConfig:
    """Grouped queries, 257 tokens, a tied embedding: nothing divides as it would like to."""
    return llama(width, layers, 4, kv_heads=2, vocab=257, ffn=width * 5 // 2, length=128, tied=True)


def _job(layout: dict[str, Any]) -> TrainJob:
    return train_job(
        steps=1000, seq_len=64, global_batch=8, microbatch=2,
        optimizer={"name": "adamw", "lr": 1e-3}, **layout,
    )  # fmt: skip


def _naive(spec: UniversalSpec) -> UniversalSpec:
    """The same without fused parts: their fragments are put behind each other."""
    from shoal.checkpoint.universal.spec import UniversalSpec

    plain = spec.plain()
    for entry in plain:
        if isinstance(entry["rule"], dict) and entry["rule"]["name"] == "fused":
            entry["rule"] = "fragment"
    return UniversalSpec.parse(plain)


def _together(dumps: Path, truth: Mapping[str, Tensor], as_baseline: bool) -> tuple[Path, int]:
    """Put dumps together; the universal checkpoint, and how many elements are not the truth."""
    from shoal.checkpoint.formats.deepspeed import DeepSpeedDumps
    from shoal.checkpoint.universal.atomic import UniversalCheckpoint
    from shoal.checkpoint.universal.convert import consolidate

    source = DeepSpeedDumps(dumps)
    spec = source.spec()
    assert spec is not None
    out = dumps.with_name(f"{dumps.name}.{'naive' if as_baseline else 'universal'}")
    place = consolidate(source, out, spec=_naive(spec) if as_baseline else spec)
    checkpoint = UniversalCheckpoint(place)
    return place, sum(int((checkpoint.tensor(key) != x).sum()) for key, x in truth.items())


def _consolidated(root: Path, as_baseline: bool) -> tuple[dict[str, Path], list[int]]:
    """Universal checkpoint of each layout, and how many of its elements are not the truth."""
    from safetensors.torch import load_file

    places, wrong = {}, []
    for name in _LAYOUTS:
        truth = load_file(root / f"{name}.truth.safetensors")
        places[name], differ = _together(root / name, truth, as_baseline)
        wrong.append(differ)
    return places, wrong


def _cut_and_join(folder: Path, as_baseline: bool) -> list[int]:
    """Whole states, written for several meshes and put together again: elements that differ."""
    import torch

    from shoal.checkpoint.formats import FORMATS
    from shoal.checkpoint.formats.transfer import open_any
    from shoal.checkpoint.store import Store
    from shoal.checkpoint.universal.protocols import RankLayout
    from shoal.core.random import generator
    from shoal.parallel.tensor.slices import whole_shapes

    kind = "naive" if as_baseline else "universal"
    config = _config(64, 2)
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
        wrong.append(_together(place, state, as_baseline)[1])
    return wrong
