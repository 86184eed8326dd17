"""How many threads PyTorch's operators have, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give the operators of this process ``count`` threads inside, and as many as before after.

    Args:
        count: threads; 0 leaves them as they are.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
