"""Optional packages, imported where they are used, with the extra to install when absent."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from shoal.core.errors import MissingExtraError

EXTRAS = {
    "run": (
        "fastapi",
        "fsspec",
        "google_crc32c",
        "httpx2",
        "huggingface_hub",
        "llguidance",
        "openai",
        "prometheus_client",
        "pyarrow",
        "safetensors",
        "starlette",
        "tensorboard",
        "tokenizers",
        "torch",
        "uvicorn",
    ),
    "s3": ("s3fs",),
    "fields": (
        "clarabel",
        "cryptography",
        "dp_accounting",
        "duckdb",
        "faiss",
        "h5py",
        "lingua",
        "ot",
        "sklearn",
        "zstandard",
    ),
    "cluster": ("ray",),
    "flower": ("flwr",),
    "gym": ("gymnasium",),
    "graph": ("gensim", "pymetis", "torch_geometric"),
    "bench": (
        "accelerate",
        "datasketch",
        "drain3",
        "fastrp",
        "fim",
        "httptools",
        "kmedoids",
        "mlxtend",
        "mpi4py",
        "peft",
        "qdrant_client",
        "rank_bm25",
        "statsmodels",
        "transformers",
    ),
    "gpu": ("pynvml", "triton"),
    "traces": ("opentelemetry", "requests"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "notebook": ("ipykernel", "pandas"),
}
"""Extra of ``shoal-ml`` -> modules that it brings; a module of several is named with the first."""

_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def import_extra(module: str, *, extra: str, purpose: str) -> Any:
    """Import ``module`` of an optional package.

    Args:
        module: dotted name, such as ``ray``.
        extra: the extra of ``shoal-ml`` that brings it.
        purpose: what it is needed for, as the subject of a sentence.

    Raises:
        MissingExtraError: the package is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        package = module.partition(".")[0]
        if (cause.name or "").partition(".")[0] != package:
            raise  # the package is there, but broken: that is not for us to hide
        raise MissingExtraError(package, extra, purpose) from None


def require_extra(package: str, *, purpose: str) -> None:
    """Refuse to begin what an optional package is needed for later; nothing is imported.

    Args:
        package: a module of :data:`EXTRAS`, such as ``torch``.
        purpose: what it is needed for, as the subject of a sentence.

    Raises:
        MissingExtraError: the package is not installed; names the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, _EXTRA_OF[package], purpose)


def missing_extra(error: BaseException, purpose: str) -> MissingExtraError | None:
    """The error for users, of an import that failed for want of an optional package.

    Args:
        error: any error.
        purpose: what failed, as the subject of a sentence.

    Returns:
        None if it is another error.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    return None if extra is None else MissingExtraError(package, extra, purpose)
