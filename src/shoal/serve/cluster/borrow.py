"""What the engine of one instance does where several lend each other memory.

Full blocks are copied to lenders beside the steps, a step begins when its blocks have memory, and
when a lender is gone the requests that had something there are computed again.

Source: Lin et al., Infinite-LLM, 2024, section 4.2 (rManager).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from shoal.core.errors import ServeError
from shoal.ir import Request, Step
from shoal.plan.batching.cache.borrowing import Borrower
from shoal.plan.batching.cache.distributed import BlockLoan, DistributedBlocks
from shoal.plan.batching.cache.loans import InstanceStatus
from shoal.plan.batching.common import Queues
from shoal.serve.cluster.distattn import DistRunner
from shoal.serve.cluster.lending import LenderClient, LenderLostError
from shoal.serve.engine.hooks import EngineHook, ExecutedStep
from shoal.serve.engine.loop import Engine


class _Copies:
    """Copies of blocks to lenders, one after the other in a thread of their own."""

    def __init__(self, runner: DistRunner) -> None:
        self._runner = runner
        self.creditors: dict[int, LenderClient] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-lend")
        self._under_way: list[tuple[Future[int], list[BlockLoan]]] = []
        self.moved_bytes = 0

    def begin(self, lends: list[BlockLoan]) -> None:
        """Start to copy; those to one lender go together."""
        for instance in sorted({lend.instance for lend in lends}):
            some = [lend for lend in lends if lend.instance == instance]
            blocks, targets = [one.block for one in some], [one.target for one in some]
            put = self.creditors[instance].put
            future = self._pool.submit(put, self._runner.cache, blocks, targets)
            self._under_way.append((future, some))

    def over(self, *, wait: bool = False) -> list[BlockLoan]:
        """Copies that have arrived.

        Raises:
            LenderLostError: one that cannot arrive; those before it are returned first.
        """
        loans: list[BlockLoan] = []
        while self._under_way and (self._under_way[0][0].done() or (wait and not loans)):
            future, lends = self._under_way[0]
            if loans and future.exception() is not None:
                break  # the next call raises it: what has arrived is not forgotten
            del self._under_way[0]
            self.moved_bytes += future.result()
            loans += lends
        return loans

    def drop(self, instance: int) -> list[BlockLoan]:
        """Wait for what is under way; the others' copies, when those to an instance are lost."""
        loans: list[BlockLoan] = []
        for future, lends in self._under_way:
            try:
                self.moved_bytes += future.result()
                loans += lends
            except ServeError:
                continue  # to this instance, or to one whose loss is reported next
        self._under_way = []
        gone = self.creditors.pop(instance, None)
        if gone is not None:
            gone.close()
        return [lend for lend in loans if lend.instance != instance]

    def close(self) -> None:
        """Finish what is under way, and leave all lenders."""
        self._pool.shutdown(wait=True)
        for lender in self.creditors.values():
            lender.close()

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._under_way)


class LendingHook(EngineHook):
    """Lets an engine borrow memory from other instances.

    Args:
        engine: its scheduler, its runner and its books.
        lock: of the books, which lenders' threads read, too.

    Raises:
        ServeError: a scheduler whose requests cannot be computed again.
    """

    kind: ClassVar[str] = "lending"

    def __init__(self, engine: Engine, instance: int, lock: AbstractContextManager[object]) -> None:
        runner, kv, scheduler = engine.runner, engine.kv, engine.scheduler
        assert isinstance(runner, DistRunner) and isinstance(kv, DistributedBlocks)
        if not isinstance(scheduler, Queues):
            raise ServeError(
                f"scheduler = {type(scheduler).__name__}: expected fcfs, fair or "
                "prefill_first with a distributed cache"
            )
        self.instance, self._lock = instance, lock
        self._runner, self._kv = runner, kv
        self._borrower = Borrower(scheduler, kv, instance)
        self._copies = _Copies(runner)
        runner.creditors = {}
        # Tokens of all steps, those computed again too.
        self._computed = 0
        engine.register(self)

    def meet(self, paths: Mapping[int, str], form: Mapping[str, Any], *, timeout_s: float) -> None:
        """Connect to all lenders: one connection for queries, one for copies.

        Raises:
            ServeError: one has another model or cache.
        """
        for instance, path in paths.items():
            self._runner.creditors[instance], self._copies.creditors[instance] = (
                LenderClient(instance, path, self.instance, form, timeout_s=timeout_s) for _ in "ab"
            )

    def guard(self) -> AbstractContextManager[object]:
        """The lock of the books."""
        return self._lock

    def before_plan(self) -> None:
        """Accept finished copies, start others, and return unused blocks."""
        arrived = self._copies.over()
        with self._lock:
            for lend in arrived:
                self._kv.finish(lend)
            lends = [] if self._copies.busy else self._borrower.lends()
            returned = self._borrower.returns()
        self._copies.begin(lends)
        for instance, blocks in returned.items():
            lender = self._runner.creditors.get(instance)
            if lender is not None:
                lender.release(blocks)

    def planned(self, step: Step) -> Step:
        """As much of a step as has memory; if that is nothing, the newest request gives way."""
        fitting = self._borrower.fit(step, self._room)
        if step.chunks and not fitting:
            with self._lock:
                self._borrower.give_way()
        return fitting

    def executed(self, done: ExecutedStep) -> None:
        """Count tokens."""
        self._computed += done.step.num_tokens

    def failed(self, cause: Exception) -> bool:
        """Go on without a lender that is lost.

        Raises:
            Exception: of another kind; other instances compute the requests of this one again.
        """
        if not isinstance(cause, LenderLostError):
            raise cause
        self.lose(cause.instance)
        return True

    def close(self) -> None:
        """Finish what is under way, and leave all lenders."""
        self._copies.close()
        for lender in self._runner.creditors.values():
            lender.close()

    def settle(self) -> bool:
        """Between steps: finish copies and return unused blocks; True while copies are running."""
        try:
            self.before_plan()
        except LenderLostError as cause:
            self.lose(cause.instance)
        return self._copies.busy

    def borrow(self, creditor: int, blocks: int) -> None:
        """Reserve blocks at a lender, which may grant fewer."""
        lender = self._runner.creditors.get(creditor)
        if lender is None:
            return
        try:
            granted = lender.reserve(blocks)
        except LenderLostError:
            self.lose(creditor)
            return
        with self._lock:
            self._kv.credit(creditor, granted)

    def recall(self, creditor: int, blocks: int) -> None:
        """See :meth:`~shoal.plan.batching.cache.borrowing.Borrower.recall`."""
        with self._lock:
            self._borrower.recall(creditor, blocks)
        self.settle()

    def lose(self, instance: int) -> None:
        """An instance is gone: nothing is asked of it, and what it held is computed again."""
        finished = self._copies.drop(instance)
        lender = self._runner.creditors.pop(instance, None)
        if lender is not None:
            lender.close()
        with self._lock:
            for lend in finished:
                self._kv.finish(lend)
            self._borrower.lose(instance)

    def beat(self) -> InstanceStatus:
        """See :meth:`~shoal.plan.batching.cache.borrowing.Borrower.beat`."""
        with self._lock:
            return self._borrower.beat()

    def metrics(self) -> Mapping[str, float]:
        """What is lent, borrowed and moved."""
        own = self._kv.stats()
        return {
            **{name: own[name] for name in ("blocks_lent", "blocks_borrowed", "blocks_moved")},
            "tokens_computed_total": self._computed,
            "lend_bytes_total": self._copies.moved_bytes,
            "helped_tokens_total": self._runner.helped_tokens,
            "helped_bytes_total": self._runner.helped_bytes,
            "spared_bytes_total": self._runner.spared_bytes,
        }

    def _room(self, request: Request, stop: int) -> int:
        """Tokens of a request, up to ``stop``, that have memory once copies have made room."""
        while True:
            with self._lock:
                backed, lends = self._borrower.missing(request, stop)
            if backed >= stop:
                return stop
            self._copies.begin(lends)
            arrived = self._copies.over(wait=True)
            if not arrived:
                return backed
            with self._lock:
                for lend in arrived:
                    self._kv.finish(lend)
