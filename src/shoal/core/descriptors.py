"""File descriptors of this process: how many it may have, and how many are free."""

from __future__ import annotations

import resource
from pathlib import Path

# A soft limit above this is of no use, and some programs walk over all descriptors.
_MOST = 65_536


def raise_descriptor_limit() -> int:
    """Raise the soft limit towards the hard one, at most to 65,536, and return it.

    Shells allow 1,024 by default, which a thousand connections use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def free_descriptors() -> int:
    """Descriptors that can still be opened under the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST if soft == resource.RLIM_INFINITY else soft
    return max(0, allowed - _num_open())


def _num_open() -> int:
    for place in (Path("/proc/self/fd"), Path("/dev/fd")):
        if place.is_dir():
            return sum(1 for _ in place.iterdir()) - 1  # the listing itself has one
    return 0
