"""The Hugging Face hub: models and data sets by their ids, as directories on this machine.

Ids are ``org/name`` or ``hf://org/name``, with ``@revision`` behind them to pin one, and of data
sets ``hf://datasets/org/name``, with a file or a pattern behind it. The library
``huggingface_hub`` keeps what it fetches, and knows ``HF_HOME``, ``HF_TOKEN`` and ``HF_ENDPOINT``.
With ``HF_HUB_OFFLINE`` or ``SHOAL_OFFLINE`` nothing is asked of the network. Weights are fetched
as safetensors and the rest as JSON and templates: nothing that is fetched can execute.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.core.config import Value
from shoal.core.errors import DataError, MissingExtraError, ModelError, ShoalError

_SCHEME = "hf://"
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>.+))?"
)
_OFFLINE = ("SHOAL_OFFLINE", "HF_HUB_OFFLINE")
# Names of files that are here, and never on the hub.
_FILES = (".yaml", ".yml", ".json", ".gguf")

MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HINT = "the name of a shape without a slash, for random weights"
# Files in folders, and the same weights in another layout.
_TWICE = ("*/*", "consolidated*")
_ENDINGS = ("", ".gz", ".bz2", ".xz", ".zst")
_DATA = tuple(f".{kind}{end}" for kind in ("jsonl", "ndjson", "parquet", "txt") for end in _ENDINGS)
_SHIPPED = tuple(f"*{ending}" for ending in _DATA[:-5])


_ADAPTER_FILES = ("adapter_config.json", "*.safetensors")

J = TypeVar("J", bound=Value)


class HubId(NamedTuple):
    """A model or a data set of the hub.

    Args:
        repo: ``org/name``.
        revision: branch, tag or commit; None for the newest.
        file: of a data set, the file or pattern that is meant; empty for all.
        words: as the user gave it.
    """

    repo: str
    revision: str | None
    file: str
    words: str


def model_id(words: str) -> HubId | None:
    """The model of the hub that is meant; None for one of this machine, or a shipped shape's name.

    ``org/name`` is a path where that exists, or where a directory ``org`` does.

    Raises:
        ModelError: an address of the hub that is none of a model.
    """
    if words.startswith(_SCHEME):
        match = _ID.fullmatch(words.removeprefix(_SCHEME))
        if match is None or match["file"]:
            raise ModelError(f"model = {words!r}: expected hf://org/name or hf://org/name@revision")
    else:
        match = _ID.fullmatch(words)
        if match is None or match["file"] or words.endswith(_FILES):
            return None
        if Path(words).exists() or Path(words).parent.is_dir():
            return None
    return HubId(match["repo"], match["revision"], "", words)


def repo_of(directory: Path) -> str | None:
    """The id of the model whose snapshot lies in a directory; None of any other directory."""
    kind, *repo = directory.parent.parent.name.split("--")
    if kind != "models" or len(repo) != 2 or directory.parent.name != "snapshots":
        return None
    return "/".join(repo)


def local_model(words: str, *, hint: str = "") -> str:
    """The directory of a model of the hub, fetched if it is not here yet; what is none as it is.

    Args:
        words: an id or an address of the hub, or anything else.
        hint: what else could be given, for errors.

    Raises:
        ModelError: it cannot be fetched; says what was tried and what to give.
        MissingExtraError: huggingface_hub is not installed.
    """
    wanted = model_id(words)
    if wanted is None:
        return words
    where = f"model = {words!r}"
    instead = f"give the path of a model directory here{f', or {hint}' if hint else ''}"
    path = _fetched(wanted, "model", MODEL_FILES, _TWICE, where, ModelError, instead)
    if not any(path.glob("*.safetensors")) or not (path / "config.json").is_file():
        raise ModelError(
            f"{where}: no such directory here, and the hub has no config.json with weights in "
            "safetensors there; other formats of weights are not fetched; give a model that has "
            "them, or convert it to a directory here"
        )
    return str(path)


def local_adapter(words: str) -> str:
    """The directory of an adapter of the hub, fetched if it is not here yet; else an own path.

    Raises:
        ModelError: it cannot be fetched, or there is no adapter.
        MissingExtraError: huggingface_hub is not installed.
    """
    wanted = model_id(words)
    if wanted is None:
        return words
    where, instead = f"adapter = {words!r}", "give the path of an adapter's directory here"
    path = _fetched(wanted, "model", _ADAPTER_FILES, _TWICE, where, ModelError, instead)
    if not (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{where}: no such directory here, and the hub has no adapter_config.json there; give "
            "an adapter in PEFT's format"
        )
    return str(path)


def fetched(job: J) -> J:
    """The job with its model and its adapters, if those are of the hub, on this machine.

    Args:
        job: of any kind.

    Raises:
        ModelError: one cannot be fetched.
        MissingExtraError: huggingface_hub is not installed.
    """
    given: dict[str, Any] = {"model": getattr(job, "model", "")}
    local: dict[str, Any] = {"model": local_model(given["model"], hint=_HINT)}
    if adapters := getattr(job, "adapters", None):
        given["adapters"] = adapters
        local["adapters"] = {name: local_adapter(place) for name, place in adapters.items()}
    return job if local == given else job.model_copy(update=local)


def is_data(words: str) -> bool:
    """Whether this is the address of a data set of the hub."""
    return words.startswith(f"{_SCHEME}datasets/")


def local_data(words: str) -> tuple[str, str]:
    """The directory of a data set of the hub, and the pattern of the files that are meant.

    Raises:
        DataError: it cannot be fetched; says what was tried and what to give.
        MissingExtraError: huggingface_hub is not installed.
    """
    match = _ID.fullmatch(words.removeprefix(f"{_SCHEME}datasets/"))
    file = (match and match["file"]) or ""
    if match is None or (file and not file.endswith(_DATA)):
        raise DataError(
            f"data = {words!r}: expected hf://datasets/org/name, with @revision or not, and behind "
            "it no file or one (or a pattern) that ends with .jsonl, .parquet or .txt"
        )
    wanted = HubId(match["repo"], match["revision"], file, words)
    patterns = (file,) if file else _SHIPPED
    instead = "give the path of a file here"
    path = _fetched(wanted, "dataset", patterns, (), f"data = {words!r}", DataError, instead)
    names = [str(one.relative_to(path)) for one in sorted(path.rglob("*")) if one.is_file()]
    if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
        raise DataError(
            f"data = {words!r}: the hub has no file there that matches {' or '.join(patterns)}; "
            "name one of its files, or give a file here"
        )
    return str(path), file or "*"


def offline() -> str:
    """The variable that forbids the network; empty if none does."""
    yes = ("1", "true", "yes", "on")
    return next((name for name in _OFFLINE if os.environ.get(name, "").lower() in yes), "")


def _fetched(
    wanted: HubId,
    kind: str,
    allow: Sequence[str],
    ignore: Sequence[str],
    where: str,
    error: type[ShoalError],
    instead: str,
) -> Path:
    """The directory with a snapshot of a repository; ``instead`` ends errors."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise MissingExtraError("huggingface_hub", "run", "reading from the hub") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    forbidden = offline()
    try:
        path = snapshot_download(
            wanted.repo,
            repo_type=kind,
            revision=wanted.revision,
            allow_patterns=list(allow),
            ignore_patterns=list(ignore) or None,
            local_files_only=bool(forbidden),
        )
    except errors.GatedRepoError as cause:
        raise error(
            f"{where}: no such directory here, and the hub gives it only to those who were granted "
            f"access; ask for it at {constants.ENDPOINT}/{wanted.repo} and set HF_TOKEN, or "
            f"{instead}"
        ) from cause
    except errors.RepositoryNotFoundError as cause:
        raise error(
            f"{where}: no such directory here, and {constants.ENDPOINT} has no such {kind} or "
            f"shows it only with a token (HF_TOKEN); correct the id, or {instead}"
        ) from cause
    except errors.RevisionNotFoundError as cause:
        raise error(
            f"{where}: no such directory here, and {wanted.repo} has no revision "
            f"{wanted.revision!r}; name a branch, a tag or a commit, or leave @revision out"
        ) from cause
    except errors.HFValidationError as cause:
        raise error(
            f"{where}: no such directory here, and no id of the hub ({cause}); {instead}"
        ) from cause
    except Exception as cause:  # the library's clients raise errors of their own, too
        if forbidden:
            raise error(
                f"{where}: no such directory here, {forbidden} is set, and "
                f"{constants.HF_HUB_CACHE} has not all of it; unset the variable, fetch it with "
                f"'hf download {wanted.repo}', or {instead}"
            ) from cause
        reason = str(cause).strip().partition("\n")[0][:200]
        raise error(
            f"{where}: no such directory here, and {wanted.repo} cannot be fetched from "
            f"{constants.ENDPOINT} ({type(cause).__name__}: {reason}); connect to the network, "
            f"or {instead}"
        ) from cause
    return Path(path)
