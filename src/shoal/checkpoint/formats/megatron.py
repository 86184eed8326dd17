"""Megatron-style directories: a file for each tensor-, pipeline- and expert-parallel rank.

::

    latest_checkpointed_iteration.txt
    iter_0000100/mp_rank_00/model_optim_rng.pt            with tp alone
    iter_0000100/mp_rank_00_001_000/model_optim_rng.pt    tp, then pp, then ep

Read through the universal form. The optimizer's state is read where the file says which parameter
each entry belongs to, as those written here do; Megatron numbers them by groups that it does not
store, so of its own files the weights are read and that is said.

Source: Shoeybi et al., Megatron-LM, 2019; the names are those of Megatron Core 0.8 and later.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.checkpoint.formats import pickles
from shoal.checkpoint.formats.huggingface import model_of
from shoal.checkpoint.formats.megatron_names import config_of, from_megatron, to_megatron
from shoal.checkpoint.formats.ranks import FileOf, RankFormat
from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.generate import local_of, read_local, stage_names
from shoal.checkpoint.universal.protocols import FP32, Coord, Fragment, RankFile, RankLayout, Scalar
from shoal.checkpoint.universal.spec import UniversalSpec, default_spec
from shoal.core.config import parse
from shoal.core.errors import CheckpointError, require
from shoal.core.files import write_atomic, write_dir_atomic
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.model.config import ModelConfig

_LATEST = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")


class MegatronDumps:
    """The rank files of one iteration.

    Args:
        path: an ``iter_...`` directory, or one whose latest file names it.

    Raises:
        CheckpointError: there are none, or they are of a model that is not built here.
        CorruptError: a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = _folder(path)
        self._files: dict[Coord, Path] = {}
        for folder in sorted(self.path.iterdir()):
            match = _RANK.match(folder.name)
            if match:
                tp, pp, ep = (int(number or 0) for number in match.groups())
                self._files[Coord(pp, ep, tp)] = folder / _FILE
        if not self._files:
            raise CheckpointError(
                f"{self.path}: no mp_rank_XX directory; it is no checkpoint of Megatron"
            )
        first = _rank_file(next(iter(self._files.values())))
        args = first.get("args")
        sizes = {
            axis: int(getattr(args, f"{word}_model_parallel_size", 0) or 0)
            for axis, word in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"))
        }
        seen = {axis: 1 + max(getattr(at, axis) for at in self._files) for axis in sizes}
        self.layout = RankLayout(**{axis: sizes[axis] or seen[axis] for axis in sizes})
        own = pickles.own_description(first.get("shoal"), self.path)
        self.meta: dict[str, Any] = dict(own.get("meta", {}))
        self.meta.setdefault("step", int(first.get("iteration") or 0))
        self.config = self._config(first, args)
        self.meta.setdefault("model", self.config.model_dump(mode="json"))
        if "optimizer" in first and "shoal_names" not in first["optimizer"]:
            self.meta["left_out"] = (
                "the optimizer's state, whose entries Megatron does not name; the weights are whole"
            )

    def files(self) -> Sequence[RankFile]:
        """Every rank's file.

        Raises:
            CheckpointError: one is missing.
        """
        layout = self.layout
        files: list[RankFile] = []
        for pp in range(layout.pp):
            for ep in range(layout.ep):
                for tp in range(layout.tp):
                    at = Coord(pp, ep, tp)
                    if at not in self._files or not self._files[at].is_file():
                        raise CheckpointError(
                            f"{self.path / _rank_name(at, layout) / _FILE}: this rank's file is "
                            f"missing; the mesh is {layout}, so there are "
                            f"{layout.pp * layout.ep * layout.tp}; copy it too"
                        )
                    files.append(FileOf(self._files[at], functools.partial(self._read, at=at)))
        return files

    def spec(self) -> UniversalSpec | None:
        """That of the model."""
        return default_spec(self.config)

    def paths(self) -> list[Path]:
        """Every rank's file that there is."""
        return sorted(self._files.values())

    def _config(self, first: Mapping[str, Any], args: Any) -> ModelConfig:
        from shoal.model.config import ModelConfig

        if isinstance(self.meta.get("model"), dict):
            return parse(ModelConfig, self.meta["model"], where=f"{self.path}: model")
        padded = int(getattr(args, "padded_vocab_size", 0) or 0)
        if args is None or not padded:
            raise CheckpointError(
                f"{self.path}: has no args that describe its model, so its parameters cannot be "
                "put together"
            )
        return config_of(args, padded, str(self.path))

    def _read(self, path: Path, at: Coord) -> Iterator[Fragment | Scalar]:
        content = _rank_file(path)
        if self.config.num_layers % self.layout.pp:
            raise CheckpointError(
                f"{path}: {self.config.num_layers} layers and {self.layout.pp} stages; stages of "
                "different length are not read"
            )
        first = at.pp * (self.config.num_layers // self.layout.pp)
        where = str(path)
        for name, tensor in from_megatron(content["model"], first, self.config, where).items():
            yield Fragment(name, FP32, at, tuple(tensor.shape), 0, tensor.reshape(-1))
        optimizer = content.get("optimizer") or {}
        if "shoal_names" not in optimizer:
            return
        states = optimizer["optimizer"]["state"]
        names = list(optimizer["shoal_names"])
        keys = sorted({key for state in states.values() for key in state})
        for key in keys:
            split = {names[n]: state[key] for n, state in states.items() if key in state}
            for name, tensor in from_megatron(split, first, self.config, where).items():
                yield Fragment(name, key, at, tuple(tensor.shape), 0, tensor.reshape(-1))
        for name, numbers in optimizer.get("shoal_numbers", {}).items():
            for key, number in numbers.items():
                yield Scalar(name, key, float(number))


@part
class MegatronFormat(RankFormat):
    """Files of tensor-, pipeline- and expert-parallel ranks, as Megatron Core names them.

    Args:
        multiple: the vocabulary is padded to a multiple of this for each tp rank.
    """

    multiple: Annotated[int, Ge(1)] = 128

    def marked(self, path: Path) -> bool:
        return any((place / _FILE).is_file() for place in _folder(path).glob("mp_rank_*"))

    def dumps(self, path: Path) -> MegatronDumps:
        return MegatronDumps(path)

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """A file for every rank of ``mesh``; the dp ranks hold copies, of which none is written."""
        import torch

        require(
            mesh.dp == 1, "mesh: dp", mesh.dp, expected="1: Megatron writes one copy of the model"
        )
        config = model_of(contents)
        require(
            not config.architecture.name,
            "architecture",
            config.architecture.name,
            expected="a model of its family's own, which is all that Megatron's names say",
            error=CheckpointError,
        )
        if config.num_layers % mesh.pp:
            raise CheckpointError(
                f"mesh: pp={mesh.pp}: {config.num_layers} layers cannot be shared evenly by so "
                "many stages; choose a divisor"
            )
        spec = _padded(default_spec(config), self.multiple)
        names = [n.removeprefix(MODEL) for n in contents.names() if n.startswith(MODEL)]
        iteration = f"iter_{contents.step:07d}"
        args = _arguments(config, mesh, self.multiple)
        with write_dir_atomic(out, error=CheckpointError) as place:
            for pp, held in enumerate(stage_names(names, config.num_layers, mesh.pp, config.tied)):
                first = pp * (config.num_layers // mesh.pp)
                for ep in range(mesh.ep):
                    for tp in range(mesh.tp):
                        at = Coord(pp, ep, tp)
                        folder = place / iteration / _rank_name(at, mesh)
                        folder.mkdir(parents=True)
                        content = _content(contents, spec, held, mesh, at, first, config)
                        torch.save({"args": args, **content}, folder / _FILE)
            write_atomic(place / _LATEST, str(contents.step))


def _content(
    contents: Contents,
    spec: UniversalSpec,
    names: Sequence[str],
    mesh: RankLayout,
    at: Coord,
    first: int,
    config: ModelConfig,
) -> dict[str, Any]:
    """What the file of one rank holds besides the arguments."""
    moments: dict[str, dict[str, str]] = {}
    numbers: dict[str, dict[str, float]] = {}
    for entry in contents.names():
        own, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
        if not entry.startswith(OPTIMIZER) or own not in names:
            continue
        if contents.shape(entry):
            moments.setdefault(key, {})[own] = entry
        else:
            numbers.setdefault(own, {})[key] = float(contents.tensor(entry))
    # Of a shared embedding the last stage has a copy under the output layer's name.
    copied = config.tied and mesh.pp > 1 and at.pp == mesh.pp - 1

    def local(stored: Mapping[str, str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, entry in stored.items():
            part = local_of(spec, name, contents.shape(entry), mesh, at)
            shown = "output.weight" if copied and name == "embed.weight" else name
            tensors[shown] = read_local(contents, entry, part)
        return to_megatron(tensors, first, config)

    model = local({name: MODEL + name for name in names})
    order = list(model)
    states: dict[int, dict[str, Tensor]] = {}
    for key, stored in moments.items():
        for name, value in local(stored).items():
            states.setdefault(order.index(name), {})[key] = value
    meta = {**contents.meta, "step": contents.step}
    return {
        "checkpoint_version": 3.0,
        "iteration": contents.step,
        "model": model,
        "optimizer": {
            "optimizer": {"state": states, "param_groups": [{"params": list(range(len(order)))}]},
            "shoal_names": order,
            "shoal_numbers": numbers,
        },
        "shoal": json.dumps({"meta": meta}),
    }


def _padded(spec: UniversalSpec, multiple: int) -> UniversalSpec:
    """The same patterns, with the vocabulary padded as Megatron does."""
    plain = spec.plain()
    for entry in plain:
        if isinstance(entry["rule"], dict) and entry["rule"].get("size"):
            entry["rule"]["multiple"] = multiple
    return UniversalSpec.parse(plain)


def _arguments(config: ModelConfig, mesh: RankLayout, multiple: int) -> argparse.Namespace:
    unit = multiple * mesh.tp
    return argparse.Namespace(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        expert_model_parallel_size=mesh.ep,
        num_layers=config.num_layers,
        hidden_size=config.hidden,
        ffn_hidden_size=config.ffn_hidden,
        num_attention_heads=config.num_heads,
        group_query_attention=config.num_kv_heads != config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        max_position_embeddings=config.max_position,
        rotary_base=config.rope_theta,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        qk_layernorm=config.qk_norm,
        add_qkv_bias=config.attention_bias,
        untie_embeddings_and_output_weights=not config.tied,
        num_experts=config.num_experts or None,
        moe_router_topk=config.top_k,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size + (-config.vocab_size % unit if mesh.tp > 1 else 0),
        make_vocab_size_divisible_by=multiple,
    )


def _folder(path: Path) -> Path:
    latest = path / _LATEST
    if latest.is_file() and latest.stat().st_size < 64:
        text = latest.read_text(errors="replace").strip()
        folder = path / (f"iter_{int(text):07d}" if text.isdecimal() else text)
        if folder.is_dir() and folder.parent == path:
            return folder
        raise CheckpointError(f"{latest}: names {text!r}, and there is no such iteration beside it")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give an iter_... directory")
    return path


def _rank_name(at: Coord, layout: RankLayout) -> str:
    name = f"mp_rank_{at.tp:02d}"
    if layout.pp > 1 or layout.ep > 1:
        name += f"_{at.pp:03d}"
    return name + (f"_{at.ep:03d}" if layout.ep > 1 else "")


def _rank_file(path: Path) -> dict[str, Any]:
    content = pickles.load(path)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(
            f"{path}: has no mapping model; files of virtual pipelines and of other versions of "
            "Megatron are not read"
        )
    if "language_model" in content["model"]:
        raise CheckpointError(
            f"{path}: saved by a Megatron before its core; save it again with Megatron Core"
        )
    return content
