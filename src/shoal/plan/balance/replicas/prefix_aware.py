"""A prompt goes where the longest beginning of it was before, unless that replica is busy.

What a replica has in its cache need not be computed again; what it has to do makes a request
wait. Both are weighed in blocks of a prompt::

    gain(replica) = blocks of the prompt that it has seen - open_blocks * its open requests

The greatest gain wins, then the fewest open requests, then the replica that was chosen least.

Sources: Srivatsa et al., Preble, 2024 (weighing reuse of a prefix against load, in the same
unit); Zheng et al., SGLang, 2024 (a router that sends prompts to matching prefixes).

Differs: the table is of hashes with a bound on its size, not a tree of all prompts; load is
the number of open requests, since the length of an answer is not known before it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from annotated_types import Gt

from shoal.core.parts import part
from shoal.plan.balance.replicas.prefixes import Prefixes, chain


@part
class PrefixAware:
    """Send prompts with a common prefix to the same replica, unless it has much more load.

    Args:
        block: characters, or tokens, of a block; shorter prefixes are not distinguished.
        most_blocks: largest number of blocks of a prompt to compare.
        entries: largest number of blocks to remember.
        open_blocks: matching blocks that outweigh one more open request.
    """

    block: Annotated[int, Gt(0)] = 64
    most_blocks: Annotated[int, Gt(0)] = 512
    entries: Annotated[int, Gt(0)] = 65_536
    open_blocks: Annotated[float, Gt(0)] = 4.0

    def build(self) -> PrefixAwareBalancer:
        return PrefixAwareBalancer(self)


class PrefixAwareBalancer:
    """The balancer that :class:`PrefixAware` builds."""

    def __init__(self, options: PrefixAware) -> None:
        self._options = options
        self._prefixes = Prefixes(options.entries)
        self._chosen: Counter[int] = Counter()

    def choose(
        self, prompt: str | Sequence[int], loads: Mapping[int, int], *, salt: str = ""
    ) -> int:
        options = self._options
        blocks = chain(prompt, options.block, options.most_blocks, salt=salt)
        seen = self._prefixes.matches(blocks, list(loads))

        def worth(replica: int) -> tuple[float, int, int, int]:
            load = loads[replica]
            gain = seen[replica] - options.open_blocks * load
            return gain, -load, -self._chosen[replica], -replica

        best = max(loads, key=worth)
        self._prefixes.add(blocks, best)
        self._chosen[best] += 1
        return best

    def forget(self, replica: int) -> None:
        self._prefixes.forget(replica)
