"""The workers of one request: what each writes next, what moves where, and when they stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core.errors import ServeError, require
from shoal.ir import Output, Request, TokenInfo
from shoal.ir.serving import FinishReason
from shoal.serve.decode.hogwild.blocks import BlockStore, HogwildBlock
from shoal.serve.decode.hogwild.protocols import BlockSpace, HogwildLayout
from shoal.serve.decode.hogwild.views import Feed, HogwildView
from shoal.serve.decode.hogwild.words import WorkerReader, WorkerWords


@dataclass(slots=True, eq=False)
class HogwildWorker:
    """One writer.

    Args:
        name: what the others call it.
        request: its sampling, and the prompt with all it has written.
        prefix: begins each of its steps.
        reader: reads along.
        pending: tokens that are chosen, or given, and in no block yet.
        moves: the pending token ends a step, whose block goes to the history.
        since_probe: tokens since the last probe.
        said: tokens of this step to report.
        infos: log probabilities of that.
        finish: why it ended.
        reported: whether that has been reported.
    """

    name: str
    request: Request
    prefix: Sequence[int]
    reader: WorkerReader
    pending: list[int] = field(default_factory=list)
    moves: bool = False
    since_probe: int = 0
    said: list[int] = field(default_factory=list)
    infos: tuple[TokenInfo, ...] = ()
    finish: FinishReason | None = None
    reported: bool = False

    @property
    def left(self) -> int:
        return self.request.params.max_tokens - self.request.n_generated

    def given(self, tokens: Sequence[int]) -> None:
        """Write given tokens, as far as there is room."""
        tokens = tokens[: max(0, self.left - 1)]
        self.request.tokens += tokens
        self.pending += tokens
        self.said += tokens


@dataclass(frozen=True, slots=True)
class WorkerFeed:
    """A feed, and the workers whose next tokens follow from its last one."""

    feed: Feed
    workers: Sequence[HogwildWorker] = ()


class HogwildSession:
    """Workers over one space of blocks.

    Args:
        store: where their blocks are.
        layout: what each sees.
        words: between them.
        requests: one of each worker, with the same prompt.
        names: of the workers, which differ.
        probe_every: tokens of a worker between two probes; 0 for none.
        answer_tokens: tokens that are kept for an early answer.

    Raises:
        ServeError: the prompts differ, or they do not fit.
    """

    def __init__(
        self,
        store: BlockStore,
        layout: HogwildLayout,
        words: WorkerWords,
        requests: Sequence[Request],
        names: Sequence[str],
        *,
        probe_every: int = 0,
        answer_tokens: int = 0,
    ) -> None:
        self._store, self._layout, self._words = store, layout, words
        self._probe_every = probe_every
        self._kept = len(words.early_answer) + answer_tokens if words.early_answer else 0
        prefixes = words.prefixes or [()] * len(requests)
        self.workers = [
            HogwildWorker(name, request, prefix, WorkerReader(words))
            for name, request, prefix in zip(names, requests, prefixes, strict=True)
        ]
        require(
            len({*names}) == len(names),
            "workers",
            names,
            expected="names that differ: each has a block of its own",
            error=ServeError,
        )
        prompt = requests[0].tokens
        require(
            all(request.tokens == prompt for request in requests),
            f"request {requests[0].id}: workers",
            len(requests),
            expected="the same prompt for all",
            error=ServeError,
        )
        alone = len(requests) == 1
        heads = {} if alone else {name: words.headers.get(name, ()) for name in layout.headers}
        self._unread = [*prompt, *words.rules, *heads.pop("history", ())]
        self._headers = {name: list(tokens) for name, tokens in heads.items() if tokens}
        self._answered = self._answering = False
        self.room = min(self._needed(), len(requests) * store.longest, store.capacity)
        least = len(self._unread) + sum(map(len, self._headers.values()))
        least += sum(len(worker.prefix) + 1 for worker in self.workers)
        require(
            least <= min(store.longest, self.room),
            f"request {requests[0].id}: prompt, rules and headers",
            least,
            expected=f"at most {store.longest} tokens with one new token of each worker, the "
            f"positions of the model, and at most {store.capacity}, those of the cache",
            hint="ask with a shorter prompt, or for fewer workers",
            error=ServeError,
        )
        self.space: BlockSpace | None = None

    def _needed(self) -> int:
        """Slots that it may take: all texts, and prefixes of steps of four tokens."""
        fixed = len(self._unread) + sum(map(len, self._headers.values()))
        each = (
            worker.left + len(worker.prefix) * (2 + worker.left // 4) for worker in self.workers
        )
        return fixed + sum(each)

    @property
    def num_blocks(self) -> int:
        """Most blocks that it has at a time."""
        return 3 + 2 * len(self.workers)

    @property
    def running(self) -> list[HogwildWorker]:
        """Workers that have not ended."""
        return [worker for worker in self.workers if worker.finish is None]

    def begin(self) -> None:
        """Open its blocks."""
        store = self._store
        self.space = BlockSpace(
            prompt=store.open(None),
            own={worker.name: store.open(worker.name) for worker in self.workers},
            headers={name: store.open(None) for name in self._headers},
        )

    def view(self, worker: HogwildWorker) -> HogwildView:
        """What a worker sees now."""
        assert self.space is not None
        return HogwildView(tuple(self._layout.blocks(self.space, worker.name)), worker.name)

    def feeds(self, budget: int) -> list[WorkerFeed]:
        """What to compute next; the prompt takes at most ``budget`` tokens of it at a time."""
        if self._unread:
            request = self._prompt(max(1, budget))
            return request if self._unread else [*request, *self._written()]
        self._end_full()
        return [*self._ended_steps(), *self._written()]

    def _prompt(self, budget: int) -> list[WorkerFeed]:
        assert self.space is not None
        space = self.space
        tokens, self._unread = self._unread[:budget], self._unread[budget:]
        bare = [] if self._unread else [one for one in self.workers if not one.prefix]
        requests = [WorkerFeed(Feed(HogwildView((space.prompt,), None), tokens, bool(bare)), bare)]
        if not self._unread:
            before: tuple[HogwildBlock, ...] = (space.prompt,)
            for name, header in self._headers.items():
                before = (*before, space.headers[name])
                requests.append(WorkerFeed(Feed(HogwildView(before, None), header, False)))
            for worker in self.workers:
                worker.pending = list(worker.prefix)
        return requests

    def _ended_steps(self) -> list[WorkerFeed]:
        """Last tokens of steps; then their blocks stand in the history, and new ones are begun."""
        assert self.space is not None
        ended = sorted((one for one in self.running if one.moves), key=lambda one: one.name)
        ended_steps = []
        for worker in ended:
            yields = not worker.prefix and len(worker.pending) == 1
            feed = Feed(self.view(worker), worker.pending[:1], yields)
            ended_steps.append(WorkerFeed(feed, [worker] if yields else ()))
        for worker in ended:
            self.space.history.append(self.space.own[worker.name])
            self.space.own[worker.name] = self._store.open(worker.name)
            worker.pending = [*worker.prefix, *worker.pending[1:]]
            worker.moves = False
        return ended_steps

    def _end_full(self) -> None:
        """End the workers whose view, or the room of all, would be full."""
        coming = sum(len(one.pending) + len(one.prefix) for one in self.running)
        most = self._store.longest - coming
        if self._taken() <= min(self.room - coming, most):
            return  # no view is longer than all together
        full = self._taken() + coming > self.room
        for worker in self.running:
            if full or len(self.view(worker)) > most:
                worker.finish = "length"

    def _written(self) -> list[WorkerFeed]:
        """Pending tokens of all workers."""
        requests = []
        for worker in self.running:
            if worker.pending:
                requests.append(WorkerFeed(Feed(self.view(worker), worker.pending), [worker]))
                worker.pending = []
        return requests

    def _taken(self) -> int:
        assert self.space is not None
        space = self.space
        held = (space.prompt, *space.own.values(), *space.history, *space.headers.values())
        return sum(map(len, held))

    def take(self, worker: HogwildWorker, token: int, infos: tuple[TokenInfo, ...] = ()) -> None:
        """The next token of a worker."""
        request = worker.request
        request.tokens.append(token)
        worker.said, worker.infos = [token], infos
        worker.pending = [token]
        worker.since_probe += 1
        ended, answered = worker.reader.feed(token)
        if token in request.params.stop_ids:
            worker.finish = "stop"
        elif answered:
            self._answered = True  # the others' tokens of this step still count
        elif not worker.left:
            worker.finish = "length"
        elif self._probe_every and worker.since_probe >= self._probe_every and not self._answering:
            worker.since_probe = 0
            worker.given(self._words.probe)
        if worker.finish is None:
            worker.moves = ended and self._layout.moves

    def settle(self) -> list[Output]:
        """After a step: history joined to the prompt, the early answer, and what is to report."""
        assert self.space is not None
        for step in self.space.history:
            # What never moves again needs no positions of its own: fewer blocks are seen faster.
            self._store.join(self.space.prompt, step)
        self.space.history.clear()
        for worker in self.running if self._answered else ():
            worker.finish = "stop"
        self._answer_early()
        notes = []
        for worker in self.workers:
            if not worker.reported and (worker.said or worker.finish is not None):
                worker.reported = worker.finish is not None
                notes.append(
                    Output(worker.request.id, tuple(worker.said), worker.infos, worker.finish)
                )
            worker.said, worker.infos = [], ()
        return notes

    def _answer_early(self) -> None:
        """One worker answers when the tokens are nearly used up, if half of them were for work."""
        running = sorted(self.running, key=lambda one: one.name)
        if self._answering or not self._kept or not running:
            return
        if any(one.left <= self._kept <= one.request.params.max_tokens // 2 for one in running):
            self._answering = True
            running[0].given(self._words.early_answer)
            for other in running[1:]:
                other.finish = "length"

    def drop(self) -> None:
        """Close all blocks."""
        if self.space is None:
            return
        space = self.space
        for block in (space.prompt, *space.own.values(), *space.history, *space.headers.values()):
            self._store.close(block)
        self.space = None
