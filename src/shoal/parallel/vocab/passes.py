"""Embedding and output layer split by vocabulary over the ranks of a pipeline.

The passes of one rank, called in the order of a :class:`~shoal.ir.schedule.Schedule`: ``EF``
and ``EB`` of the embedding's shard, ``S`` and ``T`` of the output layer's. The first stage takes
its input and gives its gradient, the last stage gives its output and takes its gradient::

    EF  ef      F of the first stage  take_embedded      B or I of the first stage  give_gradient
    S   s       F of the last stage   give_hidden        B or I of the last stage   take_gradient
    T   t       EB  eb                                   end of the step            finish

Ranks talk by messages alone. A pass waits only for passes that :meth:`Schedule.before` names, so
a valid schedule never deadlocks, however the passes of different ranks interleave; collectives,
which need one order on all ranks, would. Every rank knows the tokens, so only rows that mean
something travel: an embedded token comes from the one rank that owns it, and tokens that count
nothing take no part in the output layer.

Bytes of one micro-batch, summed over the ranks (p ranks, N tokens of which C count, D hidden,
b bytes of the computing type, x of the exact one; o tokens are owned by the first stage's rank,
t counted targets by the last stage's):

============  =====================================  =============================
tag           one barrier                            two barriers
============  =====================================  =============================
vocab_embed   (N - o) D b                            the same
vocab_hidden  (p - 1) C D b                          the same
vocab_stats   2 p (p - 1) C x + (C - t) x            the same
vocab_dx      (p - 1) C D b + (C - t) D b            (p - 1) C D b
vocab_dembed  (N - o) D b                            the same
============  =====================================  =============================

What a rank keeps between its passes of a micro-batch: the hidden states [C, D] and the
exponentials of its logits [C, V / p] from S to T, which the gradient of its rows needs; with one
barrier the last stage's rank also p messages [C, D] until the backward pass. Nothing of size
[C, V] is ever in one place.

The large matrix is read and written as seldom as can be: the exponentials stay relative to the
rank's own largest logit, and what turns them into probabilities, one scalar a token, is applied
to the small factors and results of the products [C, D]; so are the targets' ones.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.core.errors import DataError, PlanError, require
from shoal.ir.schedule import Schedule
from shoal.model.config import ModelConfig
from shoal.model.loss import IGNORE
from shoal.parallel.protocols import Comm, Pending
from shoal.parallel.vocab.order import arrived, check_order

# Logits that are in the exact type at a time; they should fit a cache.
_EXACT_ELEMENTS = 2**18


def padded_vocab(vocab_size: int, ranks: int) -> int:
    """``vocab_size`` rounded up to a multiple of twice the ranks."""
    return -(-vocab_size // (2 * ranks)) * 2 * ranks


def shard_rows(vocab_size: int, ranks: int, rank: int) -> range:
    """Rows of the vocabulary that ``rank`` owns; rows of padding have no owner.

    All ranks own an even number, equal but for the last ones.
    """
    each = padded_vocab(vocab_size, ranks) // ranks
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


class _Rows(nn.Module):
    """Some rows of a matrix."""

    def __init__(self, rows: int, width: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width, device=device))


class _Here:
    """A message that need not come."""

    def wait(self) -> None:
        """Nothing is under way."""


_HERE = _Here()

# The number under which batches of an evaluation go.
_FORWARD = -1


@dataclass
class _Lookup:
    """A micro-batch between EF and the first stage's forward pass."""

    out: Tensor  # [N, D]
    parts: list[tuple[Tensor, Tensor, Pending]]  # places, rows, receive


@dataclass
class _Flight:
    """A micro-batch between S and the end of its head's work."""

    counted: Tensor | None  # [C] places of the tokens that count; None where all do
    length: int
    targets: Tensor  # [C]
    x: Tensor  # [C, D]
    factor: float | Tensor | None
    exponentials: Tensor | None = None  # [C, R], relative to the largest logit of a row
    own: Tensor | None = None  # [2, C]
    # On the last stage's rank: target logits by place, and what the ranks send of dX.
    hits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stats: dict[int, Tensor] = field(default_factory=dict)
    stats_under_way: list[Pending] = field(default_factory=list)
    total: tuple[Tensor, Tensor] | None = None
    dx: dict[int, Tensor] = field(default_factory=dict)
    dx_under_way: list[Pending] = field(default_factory=list)


class VocabShard(nn.Module):
    """One rank's rows of embedding and output matrix, and the passes over them.

    Parameters are ``embed.weight`` [R, D] and, unless tied, ``output.weight`` [R, D], with the
    rows of :attr:`rows`; both are zero until the caller fills them. Gradients are added to
    ``grad`` by ``t`` and ``eb``; :meth:`finish` ends a step.

    Args:
        dtype: type to compute in; softmax and loss are taken in fp32 or fp64.

    Raises:
        PlanError: the schedule does not split the vocabulary, is for other ranks, or has ranks
            that go through the micro-batches in different orders.
    """

    def __init__(
        self,
        config: ModelConfig,
        comm: Comm,
        schedule: Schedule,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_order(schedule, comm.world)
        self.config = config
        self.comm = comm
        self.schedule = schedule
        self.dtype = dtype
        self.exact = torch.promote_types(dtype, torch.float32)
        self.rows = shard_rows(config.vocab_size, comm.world, comm.rank)
        self.embed = _Rows(len(self.rows), config.hidden, device)
        self.output = None if config.tied else _Rows(len(self.rows), config.hidden, device)
        self._lookups: dict[int, _Lookup] = {}
        self._flights: dict[int, _Flight] = {}
        self._tokens: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor] = {}
        self._dembed: dict[int, Tensor] = {}
        # Messages sent, which are kept until they have surely arrived.
        self._sent: dict[tuple[str, int], list[tuple[Tensor, Pending]]] = {}
        self._arrived = arrived(schedule, comm.rank)

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's rows of the output matrix [R, D]."""
        return self.embed.weight if self.output is None else self.output.weight

    @torch.no_grad()
    def ef(self, mb: int, tokens: Tensor) -> None:
        """Look up the tokens that this rank owns and send them to the first stage's rank.

        Args:
            mb: the micro-batch.
            tokens: int64, any shape, N elements; the same on all ranks.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        tokens_N = self._in_vocabulary(tokens, "token", "")
        first = self._first(mb)
        here = self._owned(tokens_N, self.comm.rank)
        own = self.embed.weight[tokens_N[here] - self.rows.start].to(self.dtype)
        self._tokens[mb] = tokens_N
        if self.comm.rank != first:
            self._send(own, first, "vocab_embed", mb)
            return
        out = own.new_empty(len(tokens_N), self.config.hidden)
        out[here] = own
        parts = []
        for rank in self._others():
            places = self._owned(tokens_N, rank)
            rows = out.new_empty(len(places), out.shape[1])
            parts.append((places, rows, self._receive(rows, rank, "vocab_embed")))
        self._lookups[mb] = _Lookup(out, parts)

    @torch.no_grad()
    def take_embedded(self, mb: int) -> Tensor:
        """The embedded tokens [N, D]: for the first stage's forward pass, once."""
        value = self._lookups.pop(mb)
        for places, rows, arriving in value.parts:
            arriving.wait()
            value.out[places] = rows
        return value.out

    @torch.no_grad()
    def give_hidden(self, mb: int, x_ND: Tensor, targets: Tensor) -> None:
        """Send the last stage's output to every rank's S pass; called by its forward pass."""
        counted, _ = self._counted(targets)
        flat = x_ND.detach().reshape(-1, self.config.hidden).to(self.dtype)
        require(
            len(flat) == targets.numel(),
            f"vocabulary passes of micro-batch {mb}, rows of the hidden states",
            len(flat),
            expected=f"{targets.numel()}, one for each target",
            error=PlanError,
        )
        x_CD = flat.contiguous() if counted is None else flat[counted]
        self._hidden[mb] = x_CD
        for other in self._others():
            self._send(x_CD, other, "vocab_hidden", mb)

    @torch.no_grad()
    def s(self, mb: int, targets: Tensor, factor: float | Tensor | None) -> None:
        """This rank's logits, as far as they go without the other ranks'.

        Args:
            mb: the micro-batch.
            targets: next tokens, int64, N elements; -100 counts nothing; the same on all ranks.
            factor: what gradients are multiplied by, 1 / counted tokens of the step; None for a
                loss without gradients, which has no T.

        Raises:
            DataError: a target is neither in the vocabulary nor -100.
        """
        last, rank = self._last(mb), self.comm.rank
        weight = self.output_weight
        counted, targets_C = self._counted(targets)
        if rank == last:
            x_CD = self._hidden.pop(mb)
        else:
            x_CD = torch.empty(
                len(targets_C), self.config.hidden, dtype=self.dtype, device=weight.device
            )
            self._receive(x_CD, last, "vocab_hidden").wait()
        flight = _Flight(counted, targets.numel(), targets_C, x_CD, factor)
        self._flights[mb] = flight
        logits_CR = x_CD @ weight.to(self.dtype).T
        here = self._owned(targets_C, rank)
        flight.own, hit = self._exponentials(logits_CR, here, targets_C[here] - self.rows.start)
        self._exchange_stats(flight, mb, last, here, hit)
        if factor is None:
            return
        flight.exponentials = logits_CR
        if self.schedule.vocab_barriers == 1:
            self._half_gradient(flight, mb, last, targets_C[here])

    @torch.no_grad()
    def t(self, mb: int) -> None:
        """The gradient of this rank's rows; with two barriers also that of the hidden states."""
        flight = self._flights[mb]
        exponentials_CR = flight.exponentials
        if exponentials_CR is None or flight.factor is None:
            raise PlanError(
                f"vocabulary pass T of micro-batch {mb}: it needs S with a factor before it, once"
            )
        rank, last = self.comm.rank, self._last(mb)
        top, total = self._totals(flight)
        assert flight.own is not None
        share_C1 = self._share(flight.own, top, total).unsqueeze(1)
        here = self._owned(flight.targets, rank)
        rows = flight.targets[here] - self.rows.start
        weight = self.output_weight
        if self.schedule.vocab_barriers == 2:
            compute = weight.to(self.dtype)
            dx_CD = (exponentials_CR @ compute).mul_(share_C1.to(self.dtype))
            dx_CD[here] -= compute[rows]
            if rank != last:
                self._send(dx_CD, last, "vocab_dx", mb)
            else:
                flight.dx[rank] = dx_CD
                for other in self._others():
                    flight.dx[other] = torch.empty_like(dx_CD)
                    flight.dx_under_way.append(self._receive(flight.dx[other], other, "vocab_dx"))
        x_CD = flight.x.to(self.exact)
        scaled_CD = (x_CD * (share_C1 * flight.factor)).to(self.dtype)
        _accumulate_product(weight, exponentials_CR, scaled_CD)
        assert weight.grad is not None
        hits = (x_CD[here] * flight.factor).neg_()
        weight.grad.index_add_(0, rows, hits.to(weight.dtype))
        # All S passes are done, so all statistics have been asked for.
        self._release("vocab_stats", mb)
        if self.schedule.vocab_barriers == 1:
            self._release("vocab_dx", mb)
        flight.exponentials = None
        if rank != last or not flight.dx:
            del self._flights[mb]

    def _loss(self, flight: _Flight) -> Tensor:
        """The sum of the token losses, in nats; on the last stage's rank, after S."""
        top, total = self._totals(flight)
        loss = total.log().sum()
        # Of two large numbers first the difference: it is exact.
        for places, logits in flight.hits:
            loss += (top[places] - logits).sum()
        return loss

    @torch.no_grad()
    def take_gradient(self, mb: int) -> tuple[Tensor, Tensor]:
        """The loss sum and the scaled gradient of the hidden states; on the last stage's rank.

        Called once, by the first backward pass.

        Returns:
            The sum of the token losses, not scaled, a scalar; and [N, D] in the computing type.
        """
        flight = self._flights[mb]
        loss = self._loss(flight)
        assert flight.factor is not None
        top, total = self._totals(flight)
        for arriving in flight.dx_under_way:
            arriving.wait()
        dx_CD = torch.zeros_like(flight.x, dtype=self.exact)
        number = len(flight.targets)
        for rank in range(self.comm.world):
            got = flight.dx.pop(rank)
            if self.schedule.vocab_barriers == 2:
                dx_CD += got
                continue
            share = self._share(flight.stats[rank], top, total)
            dx_CD.addcmul_(got[:number].to(self.exact), share.unsqueeze(1))
            places = self._owned(flight.targets, rank)
            dx_CD[places] -= got[number:].to(self.exact)
        out = dx_CD.mul_(flight.factor).to(self.dtype)
        if flight.counted is not None:
            whole = out.new_zeros(flight.length, out.shape[1])
            whole[flight.counted] = out
            out = whole
        # Every rank has asked for the hidden states in its S pass.
        self._release("vocab_hidden", mb)
        if flight.exponentials is None:
            del self._flights[mb]
        return loss, out

    @torch.no_grad()
    def give_gradient(self, mb: int, dx_ND: Tensor) -> None:
        """Send the gradient of the embedded tokens to every rank's EB pass.

        Called by the first stage's backward pass.
        """
        flat = dx_ND.detach().reshape(-1, self.config.hidden).to(self.dtype)
        tokens_N = self._tokens[mb]
        for other in self._others():
            self._send(flat[self._owned(tokens_N, other)], other, "vocab_dembed", mb)
        self._dembed[mb] = flat[self._owned(tokens_N, self.comm.rank)]

    @torch.no_grad()
    def eb(self, mb: int) -> None:
        """Add the gradient of the embedding's rows."""
        tokens_N = self._tokens.pop(mb)
        first, rank, weight = self._first(mb), self.comm.rank, self.embed.weight
        here = self._owned(tokens_N, rank)
        if rank == first:
            own = self._dembed.pop(mb)
        else:
            own = torch.empty(len(here), self.config.hidden, dtype=self.dtype, device=weight.device)
            self._receive(own, first, "vocab_dembed").wait()
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens_N[here] - self.rows.start, own.to(weight.dtype))
        # This backward pass has reached the first stage: all that it was made of has arrived.
        for tag in ("vocab_embed", "vocab_dx"):
            self._release(tag, mb)
        for other_mb in self._arrived.get(mb, ()):
            self._release("vocab_dembed", other_mb)

    @torch.no_grad()
    def forward_embed(self, tokens: Tensor) -> Tensor | None:
        """Embedded tokens [N, D] on the first stage's rank, for a loss without gradients.

        All ranks call this and :meth:`forward_loss` in turn, for the same batches.
        """
        self.ef(_FORWARD, tokens)
        here = self.comm.rank == self._first(_FORWARD)
        return self.take_embedded(_FORWARD) if here else None

    @torch.no_grad()
    def forward_loss(self, x_ND: Tensor | None, targets: Tensor) -> Tensor:
        """The loss sum of a batch on the last stage's rank, given its hidden states; else 0."""
        if x_ND is not None:
            self.give_hidden(_FORWARD, x_ND, targets)
        self.s(_FORWARD, targets, None)
        self._tokens.pop(_FORWARD, None)
        flight = self._flights.pop(_FORWARD)
        if x_ND is not None:
            loss = self._loss(flight)
        else:
            loss = torch.zeros((), dtype=self.exact, device=targets.device)
        for tag in ("vocab_embed", "vocab_hidden", "vocab_stats"):
            self._release(tag, _FORWARD)
        return loss

    def finish(self) -> None:
        """Return when everything sent has arrived; ends a step, or an evaluation's batches.

        Raises:
            PlanError: passes of a micro-batch are missing.
        """
        for tag, mb in list(self._sent):
            self._release(tag, mb)
        left = sorted({*self._flights, *self._lookups, *self._tokens, *self._hidden})
        if left:
            raise PlanError(
                f"vocabulary passes of micro-batches {', '.join(map(str, left))} are missing at "
                "the end of the step; run every pass of the schedule"
            )

    def _exponentials(
        self, logits_CR: Tensor, hit_rows: Tensor, hit_columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn logits into their exponentials relative to the largest of a row, in place.

        Returns:
            [2, C]: largest logit, and sum of the exponentials; and the logits of the targets
            that this rank owns.
        """
        count, width = logits_CR.shape
        stats = torch.empty(2, count, dtype=self.exact, device=logits_CR.device)
        hit = logits_CR[hit_rows, hit_columns].to(self.exact)
        if not width:
            stats[0] = float("-inf")
            stats[1] = 0.0
            return stats, hit
        rows = max(1, _EXACT_ELEMENTS // width)
        for begin in range(0, count, rows):
            part = logits_CR[begin : begin + rows]
            exact = part.to(self.exact)
            top = exact.amax(1)
            exact = exact.sub_(top.unsqueeze(1)).exp_()
            stats[0, begin : begin + rows] = top
            stats[1, begin : begin + rows] = exact.sum(1)
            if exact.dtype != part.dtype:
                part.copy_(exact)
        return stats, hit

    def _exchange_stats(
        self, flight: _Flight, mb: int, last: int, here: Tensor, hit: Tensor
    ) -> None:
        """Start of the barrier: every rank's statistics go to every rank, targets to the last."""
        rank, own = self.comm.rank, flight.own
        assert own is not None
        count = own.shape[1]
        flight.stats[rank] = own
        if rank == last:
            flight.hits.append((here, hit))
        for other in self._others():
            if flight.factor is not None or other == last:
                message = own.reshape(-1)
                if other == last:
                    message = torch.cat([message, hit])
                self._send(message, other, "vocab_stats", mb)
            if flight.factor is None and rank != last:
                continue
            places = self._owned(flight.targets, other) if rank == last else here[:0]
            got = own.new_empty(2 * count + len(places))
            flight.stats_under_way.append(self._receive(got, other, "vocab_stats"))
            flight.stats[other] = got[: 2 * count].view(2, count)
            if rank == last:
                flight.hits.append((places, got[2 * count :]))

    def _half_gradient(self, flight: _Flight, mb: int, last: int, hits: Tensor) -> None:
        """One barrier: dX but for one scalar a token, which is known when all ranks are done."""
        weight = self.output_weight.to(self.dtype)
        assert flight.exponentials is not None
        made = torch.cat([flight.exponentials @ weight, weight[hits - self.rows.start]])
        rank = self.comm.rank
        if rank != last:
            self._send(made, last, "vocab_dx", mb)
            return
        flight.dx[rank] = made
        count = len(flight.targets)
        for other in self._others():
            places = self._owned(flight.targets, other)
            got = made.new_empty(count + len(places), made.shape[1])
            flight.dx[other] = got
            flight.dx_under_way.append(self._receive(got, other, "vocab_dx"))

    def _totals(self, flight: _Flight) -> tuple[Tensor, Tensor]:
        """Largest logit and sum of the exponentials over the whole vocabulary, each [C]."""
        if flight.total is None:
            for arriving in flight.stats_under_way:
                arriving.wait()
            flight.stats_under_way.clear()
            stats = torch.stack([flight.stats[rank] for rank in range(self.comm.world)])
            top = stats[:, 0].amax(0)
            flight.total = top, (stats[:, 1] * (stats[:, 0] - top).exp()).sum(0)
        return flight.total

    @staticmethod
    def _share(stats_2C: Tensor, top: Tensor, total: Tensor) -> Tensor:
        """What turns a rank's exponentials into probabilities, [C]."""
        return (stats_2C[0] - top).exp() / total

    def _counted(self, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """Places of the targets that count, None where all do; and those targets [C]."""
        targets_N = self._in_vocabulary(targets, "target", f", or {IGNORE} to count nothing")
        counted = targets_N != IGNORE
        if bool(counted.all()):
            return None, targets_N
        places = counted.nonzero().squeeze(1)
        return places, targets_N[places]

    def _first(self, mb: int) -> int:
        return self.schedule.place[self.schedule.route(mb)[0]]

    def _last(self, mb: int) -> int:
        return self.schedule.place[self.schedule.route(mb)[-1]]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.comm.world) if rank != self.comm.rank]

    def _owned(self, ids: Tensor, rank: int) -> Tensor:
        """Places of the ids that ``rank`` owns, ascending."""
        rows = shard_rows(self.config.vocab_size, self.comm.world, rank)
        return ((ids >= rows.start) & (ids < rows.stop)).nonzero().squeeze(1)

    def _in_vocabulary(self, ids: Tensor, what: str, more: str) -> Tensor:
        ids = ids.reshape(-1)
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if more:
            wrong &= ids != IGNORE
        if bool(wrong.any()):
            raise DataError(
                f"{what} = {int(ids[wrong][0])}: expected 0 to {self.config.vocab_size - 1}, the "
                f"vocabulary of model {self.config.name}{more}; use the model's own tokenizer"
            )
        return ids

    def _send(self, x: Tensor, target: int, tag: str, mb: int) -> None:
        if x.numel():
            x = x.contiguous()
            pending = self.comm.send(x, target, tag=tag)
            self._sent.setdefault((tag, mb), []).append((x, pending))

    def _receive(self, out: Tensor, source: int, tag: str) -> Pending:
        # Both ends know how long a message is, and an empty one is not sent.
        return self.comm.receive(out, source, tag=tag) if out.numel() else _HERE

    def _release(self, tag: str, mb: int) -> None:
        for _, pending in self._sent.pop((tag, mb), ()):
            pending.wait()


def _accumulate_product(weight: nn.Parameter, left_CR: Tensor, right_CD: Tensor) -> None:
    """Add ``left.T @ right`` [R, D] to the gradient, without a copy of its size if types agree."""
    if weight.grad is None:
        weight.grad = (left_CR.T @ right_CD).to(weight.dtype)
    elif weight.dtype == left_CR.dtype:
        weight.grad.addmm_(left_CR.T, right_CD)
    else:
        weight.grad.add_((left_CR.T @ right_CD).to(weight.dtype))
