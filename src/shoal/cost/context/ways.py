"""Which way of sharing a sequence is cheapest here, and when it saves memory.

Torch-free arithmetic on the closed forms of :mod:`shoal.cost.context.traffic`.

Source: Li et al., Sequence Parallelism, 2021, tables 1 and 2 (memory rules); Wang et al.,
TokenRing, 2024 (two directions, hops); Jacobs et al., DeepSpeed-Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.context.traffic import (
    ContextTraffic,
    ring_traffic,
    tokenring_traffic,
    ulysses_traffic,
    usp_traffic,
)
from shoal.ir.machine import Link

Split = Literal["sequence", "tensor"]
Links = Literal["switch", "mesh", "ring"]
Duplex = Literal["full", "half"]

# Copies of a parameter in mixed-free Adam training: weight, gradient and two moments.
_STATES = 4


class SplitMemory(NamedTuple):
    """Elements that one rank holds for one layer.

    Args:
        states: weights, gradients and optimizer state.
        activations: what the forward pass saves, for the whole batch.
    """

    states: float
    activations: float

    @property
    def total(self) -> float:
        """Both."""
        return self.states + self.activations


def mlp_memory(split: Split, *, batch: int, length: int, hidden: int, world: int) -> SplitMemory:
    """Elements of a two-matrix MLP of width 4 H, by the paper's table 1.

    Tensor parallelism divides the matrices and keeps the input whole; sequence parallelism
    does the opposite, so it is the smaller one where B L > 32 H, at any number of ranks.
    """
    _check_split(split)
    states = _STATES * 8.0 * hidden**2
    tokens = float(batch * length * hidden)
    if split == "tensor":
        return SplitMemory(states / world, 4 * tokens / world + tokens)
    return SplitMemory(states, 5 * tokens / world)


def attention_memory(
    split: Split,
    *,
    batch: int,
    length: int,
    hidden: int,
    heads: int,
    head_dim: int,
    world: int,
    projected: int | None = None,
) -> SplitMemory:
    """Elements of multi-head attention that keeps its rows of scores, by the paper's table 2.

    Sequence parallelism is the smaller one where B L > 16 A Z (A heads of size Z).

    Args:
        split: who divides what.
        batch: sequences B.
        length: tokens of a sequence L.
        hidden: width H.
        heads: A.
        head_dim: Z.
        world: ranks N.
        projected: rows to which keys and values are projected (Linformer), with ``sequence``;
            scores are then linear in the length.
    """
    _check_split(split)
    require(
        projected is None or split == "sequence",
        "projected",
        projected,
        expected="none with tensor parallelism",
        error=PlanError,
    )
    states = _STATES * 4.0 * heads * head_dim * hidden
    mixed = 4.0 * batch * length * heads * head_dim / world
    scores = float(batch * heads * length) / world * (length if projected is None else projected)
    tokens = float(batch * length * hidden)
    if split == "tensor":
        return SplitMemory(states / world, mixed + scores + tokens)
    if projected is not None:
        # Projections of a rank's share of the sequence, and the keys and values that result.
        states += _STATES * 2.0 * projected * length / world
        mixed += 2.0 * batch * projected * heads * head_dim
    return SplitMemory(states, mixed + scores + tokens / world)


def layer_memory(
    split: Split,
    *,
    batch: int,
    length: int,
    hidden: int,
    heads: int,
    head_dim: int,
    world: int,
    projected: int | None = None,
) -> SplitMemory:
    """Elements of a whole layer of BERT without dropout: attention, MLP, and two norms.

    Beyond both tables it has what they leave out: the input of the nonlinearity, of width 4 H,
    and that of each norm, which tensor parallelism keeps whole. Biases and the parameters of
    norms are left out here too.

    Args:
        split: who divides what.
        batch: sequences B.
        length: tokens of a sequence L.
        hidden: width H.
        heads: A.
        head_dim: Z.
        world: ranks N.
        projected: as for :func:`attention_memory`.
    """
    attention = attention_memory(
        split,
        batch=batch,
        length=length,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        world=world,
        projected=projected,
    )
    mlp = mlp_memory(split, batch=batch, length=length, hidden=hidden, world=world)
    tokens = float(batch * length * hidden)
    norms = 2 * tokens / (world if split == "sequence" else 1)
    return SplitMemory(
        attention.states + mlp.states,
        attention.activations + mlp.activations + 4 * tokens / world + norms,
    )


def _check_split(split: Split) -> None:
    require(
        split in ("sequence", "tensor"),
        "split",
        split,
        expected="sequence or tensor",
        error=PlanError,
    )


def link_bytes(
    name: str,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    world: int,
    group: int = 1,
    links: Links = "switch",
    duplex: Duplex = "full",
    itemsize: int = 2,
) -> tuple[float, float]:
    """Bytes that the busiest link carries for one layer: forward pass, backward pass.

    - ``switch``: a rank has one link, over which all that it sends goes;
    - ``mesh``: every two ranks have a link;
    - ``ring``: neighbours have links, and a message loads each of its shorter way, onward
      where both are equal; so a return of tokenring over distance j loads the lesser of j
      and N - j. A group of usp is a line of neighbours, and its ring jumps to the next group.

    Args:
        name: of the part: tokenring, ulysses, usp, or any that moves keys and values.
        tokens: of one rank.
        heads: query heads of one rank.
        kv_heads: key/value heads of one rank.
        head_dim: width of a head.
        world: ranks N.
        group: ranks of a group of usp.
        links: how ranks are wired.
        duplex: whether a link carries both directions at once, or one at a time.
        itemsize: bytes of an element of the inputs.
    """
    if world == 1:
        return 0.0, 0.0
    members = {"ulysses": world, "usp": group}.get(name, 1)
    swap = ulysses_traffic(tokens, heads, kv_heads, head_dim, members)
    if name == "tokenring":
        around = tokenring_traffic(tokens, heads, kv_heads, head_dim, world)
    else:
        around = ring_traffic(
            tokens * members,
            heads // members,
            max(1, kv_heads // members),
            head_dim,
            world // members,
        )
    loads = []
    for some, others in ((swap.forward, around.forward), (swap.backward, around.backward)):
        swapped = float(some.num_bytes(itemsize))
        onward, back = map(float, others.by_direction(itemsize))
        each_swap, each_back = swapped / max(1, members - 1), back / (world - 1)
        if links == "switch":
            up = down = swapped + onward + back
        elif links == "mesh" and members > 1:
            # A pair either swaps heads or passes keys and values on; two groups do both ways.
            both = (2 if world == 2 * members else 1) * onward
            loads.append(max(each_swap, onward) if duplex == "full" else max(2 * each_swap, both))
            continue
        elif links == "mesh":
            # The link to the next rank also has the return to the rank N - 1 behind.
            up, down = onward + each_back, each_back
        else:
            over, under = _shorter_ways(world)
            up, down = onward * members + each_back * over, each_back * under
            if members > 1:
                middle = members**2 // 4  # messages over the middle of a line, each way
                over, under = (over, under) if members == world else (middle, middle)
                up, down = up + each_swap * over, down + each_swap * under
        if world == 2:
            down = up
        loads.append(max(up, down) if duplex == "full" else up + down)
    return loads[0], loads[1]


def _shorter_ways(world: int) -> tuple[int, int]:
    """Hops onward and back of one message to every other rank of a physical ring."""
    up, down = world // 2, (world - 1) // 2
    return up * (up + 1) // 2, down * (down + 1) // 2


class ContextOption(NamedTuple):
    """One way of sharing sequences.

    Args:
        name: of the part, and its options.
        possible: whether these heads allow it.
        forward_bytes: on the busiest link, forward pass of one layer.
        backward_bytes: the same of the backward pass.
        seconds: of one layer, both passes, on the wire.
        exposed_s: seconds not hidden behind computation, imbalance included.
        buffer_bytes: keys, values, scores and results that one rank holds besides its own.
        reasons: what speaks for and against it.
    """

    name: str
    options: dict[str, int | bool]
    possible: bool
    forward_bytes: float
    backward_bytes: float
    seconds: float
    exposed_s: float
    buffer_bytes: float
    reasons: tuple[str, ...]


def advise_context(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    world: int,
    link: Link,
    links: Links = "switch",
    duplex: Duplex = "full",
    itemsize: int = 2,
    causal: bool = True,
    flops_per_s: float | None = None,
) -> list[ContextOption]:
    """Every way of sharing one sequence, cheapest first; what is impossible comes last.

    Args:
        heads: query heads of one rank, a.
        kv_heads: key/value heads of one rank.
        head_dim: width of a head.
        tokens: length of the sequence; every rank has tokens / world.
        world: context-parallel ranks N.
        link: bandwidth of one direction and latency.
        links: how ranks are wired; see :func:`link_bytes`.
        duplex: whether a link carries both directions at once.
        itemsize: bytes of an element of the inputs.
        causal: half of the cells are seen, unevenly.
        flops_per_s: of one rank's attention kernel; without it nothing hides what is sent.

    Raises:
        PlanError: numbers that cannot be.
    """
    require(world >= 1, "cp", world, expected="at least 1", error=PlanError)
    require(
        kv_heads >= 1 and heads % kv_heads == 0,
        "heads",
        (heads, kv_heads),
        expected="query heads that are a multiple of the key/value heads",
        error=PlanError,
    )
    require(
        tokens % world == 0,
        "tokens",
        tokens,
        expected=f"a multiple of cp = {world}",
        error=PlanError,
    )
    require(
        links in ("switch", "mesh", "ring"),
        "links",
        links,
        expected="switch, mesh or ring",
        error=PlanError,
    )
    require(duplex in ("full", "half"), "duplex", duplex, expected="full or half", error=PlanError)
    share = tokens // world
    # Forward 4 and backward 10 FLOPs a cell and channel.
    cells = tokens * tokens / (2 if causal else 1) / world
    compute = 14.0 * cells * heads * head_dim / flops_per_s if flops_per_s else 0.0
    ranked, plain = [], 0.0
    for name, options, possible, result, buffer, reasons in _candidates(
        heads, kv_heads, head_dim, share, world, itemsize
    ):
        forward, backward = 0.0, 0.0
        if possible:
            forward, backward = link_bytes(
                name,
                tokens=share,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                world=world,
                group=options.get("ulysses", 1),
                links=links,
                duplex=duplex,
                itemsize=itemsize,
            )
        if name == "zigzag":
            plain = forward + backward
        elif name == "tokenring" and plain:
            reasons.append(f"{(forward + backward) / plain:.2f} times the load of zigzag's links")
            if links == "ring":
                hops = sum(_shorter_ways(world)) / (world - 1)
                reasons.append(f"returns take {hops:.1f} hops on average")
        seconds = (forward + backward) / link.bandwidth + result.messages * link.latency_s
        hidden = compute * (world - 1) / world if result.hidden else 0.0
        exposed = max(seconds - hidden, 0.0)
        if causal and name in ("ring", "rsa"):
            exposed += compute * (world - 1) / world
            reasons.append(
                f"its last rank has {(2 * world - 1) / world:.2f} times the mean causal work"
            )
        ranked.append(
            ContextOption(
                name,
                options,
                possible,
                forward,
                backward,
                seconds if possible else 0.0,
                exposed if possible else 0.0,
                buffer,
                tuple(reasons),
            )
        )
    # Equal on the wire: the smaller buffers, then the one that is listed first.
    return sorted(
        ranked,
        key=lambda each: (not each.possible, each.exposed_s, each.seconds, each.buffer_bytes),
    )


_Candidate = tuple[str, dict[str, int | bool], bool, ContextTraffic, float, list[str]]


def _candidates(
    heads: int, kv_heads: int, head_dim: int, share: int, world: int, itemsize: int
) -> Iterator[_Candidate]:
    width, kv_width = heads * head_dim, kv_heads * head_dim
    chunk = 2.0 * share * kv_width * itemsize
    ring = ring_traffic(share, heads, kv_heads, head_dim, world)
    yield "zigzag", {}, True, ring, 2 * chunk, ["balanced under a causal mask, any heads"]
    yield "ring", {}, True, ring, 2 * chunk, ["contiguous pieces"]
    yield (
        "rsa",
        {},
        True,
        ring,
        2 * chunk + float(heads * share * share * world * itemsize),
        ["keeps whole rows of scores, which grow with the square of the length"],
    )
    yield (
        "all_gather",
        {},
        True,
        ring,
        (world - 1) * chunk,
        ["one collective a layer; keys and values of whole sequences in memory"],
    )
    reasons = ["grouped queries: keys and values are the smaller load"]
    if 2 * kv_width >= width:
        reasons = ["two directions, if links carry both at once and no switch joins them"]
    result = share * (width * itemsize + heads * 4.0)
    yield (
        "tokenring",
        {},
        True,
        tokenring_traffic(share, heads, kv_heads, head_dim, world),
        2 * share * width * itemsize + 2 * result,
        reasons,
    )
    for group in (n for n in range(2, world + 1) if world % n == 0):
        name = "ulysses" if group == world else "usp"
        copied = kv_heads < group and group % kv_heads == 0
        possible = heads % group == 0 and (kv_heads % group == 0 or copied)
        options: dict[str, int | bool] = {} if group == world else {"ulysses": group}
        if not possible:
            why = [f"{heads} query and {kv_heads} key/value heads cannot be split {group} ways"]
            yield name, options, False, ring, 0.0, why
            continue
        why = [f"{heads // group} query heads a rank over {group} pieces of the sequence"]
        if copied:
            options["replicate_kv"] = True
            why.append(f"each key/value head goes to {group // kv_heads} ranks")
        outcome = (
            ulysses_traffic(share, heads, kv_heads, head_dim, world)
            if group == world
            else usp_traffic(share, heads, kv_heads, head_dim, world, group)
        )
        if not outcome.hidden:
            why.append("its exchanges are not hidden")
        kv_each = max(1, kv_heads // group)
        swapped = float(share * group * head_dim * itemsize * (heads // group + 2 * kv_each))
        yield name, options, True, outcome, 2 * swapped, why
