"""A trained drafter's files, and whether they are for the model that is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal.core.errors import ModelError, require
from shoal.ir import Machine, Request, ServeJob, ServeWork
from shoal.model.drafters import files

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.drafters.files import DrafterConfig


class TrainedSpeculator:
    """Base of the parts that read a drafter which was trained for the served model."""

    kind: ClassVar[str]
    path: str

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Of every drafter of this kind that there is."""
        for directory in _of_kind(cls.kind, work):
            yield cls(path=directory)  # type: ignore[call-arg]

    def config(self) -> DrafterConfig:
        """What the drafter's directory says of it; see :func:`config_of`."""
        return config_of(self.kind, Path(self.path))

    def stored(self, job: ServeJob) -> tuple[DrafterConfig, dict[str, Tensor]]:
        """What lies in the drafter's directory; see :func:`stored`."""
        return stored(self.kind, Path(self.path), job)

    def first(self, option: str, there: int, which: str) -> int:
        """How many of what is there an option asks for; 0 asks for all.

        Raises:
            ConfigError: more than there are; says which these are.
        """
        asked: int = getattr(self, option)
        require(
            asked <= there,
            f"speculative.{self.kind}.{option}",
            asked,
            expected=f"at most {there}, {which}",
        )
        return asked or there


@dataclass
class KeptGuess:
    """Of one request: what its drafter keeps of its last token, which has this place in it."""

    request: Request
    place: int = -1
    value: Any = None


def config_of(name: str, directory: Path) -> DrafterConfig:
    """What a drafter's directory says of it; needs no torch.

    Raises:
        ModelError: there is none, or it is of another kind.
    """
    return _checked(files.read_config(directory), name, directory)


def _of_kind(name: str, work: ServeWork) -> Iterator[str]:
    """The directories among a plan's drafters that hold one of this kind."""
    if not work.one_rank:
        return
    for directory in work.drafters:
        path = Path(directory)
        if (path / files.CONFIG).is_file() and files.read_config(path).name == name:
            yield directory


def stored(name: str, directory: Path, job: ServeJob) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """What lies in a drafter's directory.

    Raises:
        ModelError: it is of another kind, or for another model or tokenizer than the job's.
    """
    result = files.read(directory)
    _checked(result.config, name, directory)
    model = Path(job.model)
    files.check_target(
        result.config,
        target=files.fingerprint(model),
        tokenizer=files.tokenizer_hash(model),
        where=str(directory),
    )
    return result.config, result.state


def _checked(config: DrafterConfig, name: str, directory: Path) -> DrafterConfig:
    if config.name != name:
        raise ModelError(
            f"{directory}: a drafter of kind {config.name}, and speculative is {name}; give "
            f"speculative: {{name: {config.name}, path: {directory}}}"
        )
    return config
