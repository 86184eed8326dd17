"""Kernels of a GPU, recorded once and then launched by one call.

As :mod:`shoal.kernel.tape` does it for a CPU.

Source: CUDA graphs; NVIDIA, CUDA C++ Programming Guide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RecordedGraph:
    """A CUDA graph, and the tensor that it writes.

    Args:
        graph: captured.
        result: what the recorded function returned.
        kept: whatever has memory that the kernels use.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor, kept: object) -> None:
        self._graph, self._kept = graph, kept
        self.result = result

    def play(self) -> bool:
        """Launch the kernels; they are not waited for. Always true."""
        self._graph.replay()
        return True


@functools.cache
def _pool() -> Any:
    """Memory that all graphs of this process share: they run one after the other."""
    return torch.cuda.graph_pool_handle()


def record(compute: Callable[[], Tensor]) -> tuple[Tensor, RecordedGraph | str]:
    """Compute something on the GPU, and record which kernels were launched.

    Args:
        compute: gives the same whenever it is called; reads and writes tensors that stay where
            they are, and only those and its own.

    Returns:
        What it returned, and the graph, or why there is none.
    """
    # On a stream of its own first: libraries make their workspaces, which cannot be recorded.
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            computed = compute()
    except RuntimeError as cause:
        torch.cuda.set_sync_debug_mode(before)
        here.wait_stream(side)
        return compute(), f"it waits for the GPU ({_first_line(cause)})"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    here.wait_stream(side)
    computed.record_stream(here)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=_pool()):
            result = compute()
    except RuntimeError as cause:
        return computed, f"a CUDA graph cannot have it ({_first_line(cause)})"
    return computed, RecordedGraph(graph, result, compute)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
