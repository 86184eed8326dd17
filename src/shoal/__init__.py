"""Shoal: predict what a large-model job will cost, run it, keep score.

``shoal.plan(...)``, ``shoal.train(...)``, ``shoal.serve(...)`` and the other functions do what the
command line does. Importing the package loads no torch; rooms are imported when they are used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.core.version import __version__ as __version__

if TYPE_CHECKING:
    from shoal.api import Plans as Plans
    from shoal.api import bench_attention as bench_attention
    from shoal.api import bench_decode as bench_decode
    from shoal.api import bench_job as bench_job
    from shoal.api import bench_kernels as bench_kernels
    from shoal.api import bench_peers as bench_peers
    from shoal.api import bench_serve as bench_serve
    from shoal.api import bench_tune as bench_tune
    from shoal.api import bench_url as bench_url
    from shoal.api import check as check
    from shoal.api import explain as explain
    from shoal.api import import_log as import_log
    from shoal.api import load as load
    from shoal.api import plan as plan
    from shoal.api import probe as probe
    from shoal.api import probe_decode as probe_decode
    from shoal.api import probe_gemm as probe_gemm
    from shoal.api import probe_gpu as probe_gpu
    from shoal.api import run as run
    from shoal.api import score as score
    from shoal.api import serve as serve
    from shoal.api import train as train
    from shoal.api.llm import LLM as LLM
    from shoal.api.sampling import SamplingOptions as SamplingParams
    from shoal.train.simple import Trainer as Trainer

__all__ = [
    "LLM",
    "Plans",
    "SamplingParams",
    "Trainer",
    "__version__",
    "bench_attention",
    "bench_decode",
    "bench_job",
    "bench_kernels",
    "bench_peers",
    "bench_serve",
    "bench_tune",
    "bench_url",
    "check",
    "explain",
    "import_log",
    "load",
    "plan",
    "probe",
    "probe_decode",
    "probe_gemm",
    "probe_gpu",
    "run",
    "score",
    "serve",
    "train",
]

_LAZY = {
    "LLM": "shoal.api.llm:LLM",
    "SamplingParams": "shoal.api.sampling:SamplingOptions",
    "Trainer": "shoal.train.simple:Trainer",
    **{
        name: f"shoal.api:{name}"
        for name in __all__
        if name not in ("LLM", "SamplingParams", "Trainer", "__version__", "plan", "serve", "train")
    },
}
# Rooms that are called as functions, too.
_CALLED = ("plan", "serve", "train")


class _CalledRoom(ModuleType):
    """A room whose call is the function of its name in :mod:`shoal.api`."""

    def __call__(self, *args: Any, **values: Any) -> Any:
        function = getattr(importlib.import_module("shoal.api"), self.__name__.rpartition(".")[2])
        return function(*args, **values)

    @property
    def __wrapped__(self) -> Any:
        """Whose signature ``inspect`` and notebooks show."""
        return getattr(importlib.import_module("shoal.api"), self.__name__.rpartition(".")[2])

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What ``help()`` shows first: the call, its parameters, and then the room."""
        import inspect
        import re

        function = self.__wrapped__
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
        call = f"{self.__name__}{signature}"
        return f"{call}\n\n{inspect.getdoc(function)}\n\n{self.__dict__.get('__doc__') or ''}"


class _Package(ModuleType):
    """The package: importing a room makes it an attribute, here one that can be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED and type(value) is ModuleType:
            value.__class__ = _CalledRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name in _CALLED:
        return importlib.import_module(f"shoal.{name}")
    if name in _LAZY:
        module, _, own = _LAZY[name].partition(":")
        return getattr(importlib.import_module(module), own)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
