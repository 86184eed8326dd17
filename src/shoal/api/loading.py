"""What lies in a directory or a file: a run, a model or a plan."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.config import parse
from shoal.core.errors import ConfigError, ModelError, StoreError
from shoal.core.hub import local_model
from shoal.core.meter import read_events
from shoal.ir import Plan, Report, kind_of
from shoal.plan.saved import read_plan
from shoal.train.layout import RunDir

if TYPE_CHECKING:
    from shoal.api.llm import LLM
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

_CONFIG = "config.json"


@dataclass(frozen=True)
class SavedRun:
    """The directory of a run of any kind of job, finished or not.

    Args:
        path: the directory.
    """

    path: Path

    @functools.cached_property
    def plan(self) -> Plan[Any]:
        """What was planned.

        Raises:
            ConfigError: the file cannot be read.
        """
        return read_plan(RunDir(self.path).plan)

    @property
    def report(self) -> Report[Any]:
        """Measurement beside prediction; of a run that has not finished, up to now.

        Raises:
            StoreError: nothing can be said yet, or the file is damaged.
        """
        kind, path = kind_of(self.plan), RunDir(self.path).report
        if not path.is_file():
            return kind.report(self.plan, self.path)
        try:
            raw = json.loads(path.read_bytes())
            return parse(kind.report_type, raw, where=str(path))
        except (OSError, ValueError, ConfigError) as cause:
            raise StoreError(
                f"{path}: not a report of this version ({cause}); remove it and resume the run, "
                "which writes it again"
            ) from cause

    @property
    def events(self) -> Iterator[dict[str, Any]]:
        """Everything that happened, in its order: each event has a ``kind`` and a ``time``.

        Raises:
            StoreError: the file cannot be read.
        """
        return read_events(RunDir(self.path).events)

    @property
    def model(self) -> Path:
        """Directory of the trained model.

        Raises:
            ModelError: there is none.
        """
        return model_directory(self.path)

    def llm(self, **fields: Any) -> LLM:
        """The trained model, ready to answer; see :class:`~shoal.api.llm.LLM`."""
        return SavedModel(self.model).llm(**fields)


@dataclass(frozen=True)
class SavedModel:
    """A Hugging Face model directory; no weights are read before they are used.

    Args:
        path: the directory.
    """

    path: Path

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The architecture and its sizes.

        Raises:
            ModelError: it cannot be read, or is of a family that is not known.
        """
        from shoal.model.huggingface import read_config

        return read_config(self.path)

    def module(self) -> Transformer:
        """The model with its weights, in the precision of its files.

        Raises:
            ModelError: it cannot be read.
        """
        from shoal.model.huggingface import read

        return read(self.path)

    def llm(self, **fields: Any) -> LLM:
        """The model, ready to answer; see :class:`~shoal.api.llm.LLM`."""
        from shoal.api.llm import LLM

        return LLM(self.path, **fields)


def load(path: str | os.PathLike[str]) -> SavedRun | SavedModel | Plan[Any]:
    """Open what was saved: a run, a model or a plan.

    Args:
        path: the directory of a run, a Hugging Face model directory, an id of the hub such as
            ``org/name``, or the file of a plan.

    Returns:
        A :class:`SavedRun`, a :class:`SavedModel`, or the plan.

    Raises:
        ConfigError: there is none of them.
        ModelError: the hub does not have it.
    """
    place = _path(path, "path")
    if place.is_file():
        return read_plan(place)
    if (place / _CONFIG).is_file():
        return SavedModel(place)
    if RunDir(place).plan.is_file():
        return SavedRun(place)
    given = f"a directory without {_CONFIG} and plan.yaml" if place.is_dir() else "nothing there"
    raise ConfigError(
        f"{place}: {given}: expected the directory of a run, a Hugging Face model directory, or "
        "the file of a plan"
    )


def model_directory(model: str | os.PathLike[str]) -> Path:
    """The model directory that ``model`` is, or that the run there has written.

    A model of the hub, by its id, is fetched if it is not here yet.

    Raises:
        ModelError: there is none.
    """
    place = _path(model, "model")
    if (place / _CONFIG).is_file():
        return place
    run = RunDir(place)
    if (run.export / _CONFIG).is_file():
        return run.export
    if run.plan.is_file():
        raise ModelError(
            f"{place}: a run without a model: it has not finished, does not train one, or has only "
            f"an adapter; resume it, or write one with: shoal model convert {place} OUT"
        )
    given = f"a directory without {_CONFIG}" if place.is_dir() else "no such directory"
    raise ModelError(
        f"model = {str(place)!r}: {given}: expected a Hugging Face model directory, the directory "
        "of a training run, or an id of the hub such as org/name"
    )


def _path(given: str | os.PathLike[str], name: str) -> Path:
    """A path that is no other type; of a model of the hub, that of its files here.

    Raises:
        ConfigError: it is of another type.
        ModelError: the hub does not have it.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{name} = {given!r:.80}: expected a path")
    return Path(local_model(given) if isinstance(given, str) else given)
