"""Moments of the serving engine at which techniques act, and the order in which they do.

The loop (:mod:`~shoal.serve.engine.loop`), the runner (:mod:`~shoal.serve.engine.runner`) and the
adjuster of scores (:mod:`~shoal.serve.engine.adjust`) are fixed. A technique that needs a moment
of a request or of a step is a :class:`EngineHook` in a file of its own. One object may act in the
loop and in the runner; where these are different processes, each has an object of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

from shoal.core.hooks import Hook, Hooks
from shoal.ir import Chunk, Output, Request, Step, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.cache.attention import RequestContext
    from shoal.serve.cache.paged import PagedCache
    from shoal.serve.engine.loop import Engine

ORDER = (
    # In the client, alone: what engines have died of is refused before it is sent to one.
    "crashes",
    # First in the loop: reports that requests began before isolation reports that they failed.
    "counters",
    # Behind counters, which count a step as it was planned; lending shortens it to what has memory.
    "lending",
    # Never beside lending: an instance of one phase has all of its blocks in its own cache.
    "fetching",
    # Adds to a step what lending would drop; ends all requests of a failure that lending and
    # fetching do not recover from.
    "isolation",
    # Independent of isolation: transfers end for the requests that it aborts, too.
    "host_copies",
    # Independent of host copies: counts the passes of a runner that calls no hook below.
    "diffusion",
    # Refuses requests; those below change what they take in.
    "speculation",
    # Extends the salt of a request that was not refused.
    "streams",
    # Extends it, too; only the order of words in the salt depends on which is first.
    "shares",
    # May unmerge the adapter in the weights for a request, so behind all that may refuse it.
    "adapters",
    # Independent of adapters: these say whose rows are, pooling says which rows are needed.
    "pooling",
    # Independent of pooling, whose rows come before its own.
    "prompt_logprobs",
    # Replays a pass that none of the three above has marked.
    "recording",
    # Changes the scores of a pass, replayed or computed.
    "penalties",
    # Has the last word: what the form forbids stays forbidden, whatever penalties make of it.
    "grammar",
    # Behind it come hooks of other packages, in the order of registration.
)
"""Kinds of hooks, each with its relation to the one before. At every moment the hooks that act are
called in this order."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hook)


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step that was executed.

    Args:
        step: as it was executed, or as it was planned where several steps are under way.
        started: s, when it was planned, or when the step before it was over.
        now: s, when its result was there.
    """

    step: Step
    result: StepResult
    started: float
    now: float


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over the tokens of a step.

    Args:
        chunks: single tokens first and longest context first.
        contexts: what each chunk sees, once rows are laid out.
        last: of each chunk the row of its last token.
        rows: of the step's tokens, those whose hidden states are needed: first those that are
            followed by a new token, then what hooks append.
        needed: the same as a tensor; None for all rows in their order.
        plain: whether a recording of the model alone gives the same.
        version: of the weights, on which recordings depend.
    """

    chunks: Sequence[Chunk]
    contexts: Sequence[RequestContext] = ()
    last: Sequence[int] = ()
    rows: list[int] = field(default_factory=list)
    needed: Tensor | None = None
    plain: bool = True
    version: int = 0


class EngineHook(Hook):
    """A technique's part of the engine. Every moment does nothing unless it is overridden.

    Attributes:
        engine: the engine that it is registered with.
    """

    after: ClassVar[str] = ORDER[-1]
    engine: Engine

    # Of a request, in the loop.

    def check(self, request: Request) -> None:
        """A request arrives. May set its ``adapter`` and extend its ``salt``.

        Raises:
            ServeError: it is refused; no later hook sees it.
        """

    def admitted(self, request: Request) -> None:
        """The scheduler has queued a request."""

    def ended(self, request_id: str) -> None:
        """A request is finished, aborted or failed; also called for ids that were never queued."""

    # Of a step, in the loop.

    def before_plan(self) -> None:
        """The scheduler is about to plan a step."""

    def planned(self, step: Step) -> Step:
        """The step to execute instead of this one; an empty step executes nothing.

        Where several steps are under way, its chunks must stay.
        """
        return step

    def executed(self, done: ExecutedStep) -> None:
        """The result is there and the scheduler has not committed it; requests may be aborted."""

    def committed(self, done: ExecutedStep, outputs: Sequence[Output]) -> None:
        """The scheduler has committed a step and given ``outputs``; the finished have not ended."""

    def failed(self, cause: Exception) -> bool:
        """A step raised: whether the engine can go on. The first hook that says so is the last.

        Raises:
            Exception: the engine cannot go on; no later hook is asked.
        """
        return False

    # Of the engine.

    def guard(self) -> AbstractContextManager[object]:
        """Held while the books of requests and blocks are read or changed; may be nested."""
        return nullcontext()

    def facts(self) -> Mapping[str, Any]:
        """What clients may ask of this engine, sent once it is ready; asked at registration."""
        return {}

    def answers(self) -> Mapping[str, Callable[..., Any]]:
        """Questions that are answered between two steps, each with the function that answers it."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Gauges of now, and counters since the start."""
        return {}

    def close(self) -> None:
        """The engine or the runner ends."""

    # Of the computation of a step, in the runner.

    def transfer(self, step: Step) -> None:
        """Begin the transfers of a step, and wait for those that it waits for."""

    def transferred(self) -> frozenset[int]:
        """Transfers that have ended since the last call."""
        return frozenset()

    def before_pass(self, work: ForwardPass) -> None:
        """A pass over ``work.chunks`` begins; may say it is not ``plain``, and its ``version``."""

    def replay(self, work: ForwardPass) -> Tensor | None:
        """Scores [R, V] of a whole pass; None where it must be computed. The first one counts."""
        return None

    def lay_out(self, work: ForwardPass) -> None:
        """Rows are laid out; may append to ``work.rows``."""

    def around(self, work: ForwardPass) -> AbstractContextManager[object]:
        """Entered while the model computes; ``work.needed`` is known."""
        return nullcontext()

    def computed(self, work: ForwardPass, hidden_RD: Tensor, result: StepResult) -> StepResult:
        """The result with what follows from hidden states of the needed rows."""
        return result

    def wanted(self, requests: Sequence[Request]) -> Sequence[int]:
        """Rows, one a request, whose scores are given to :meth:`adjust`."""
        return ()

    def adjust(
        self, scores_RV: Tensor, rows: Sequence[int], requests: Sequence[Request]
    ) -> Mapping[str, str]:
        """Change ``rows`` of the scores in place; why requests cannot go on, by their id.

        Args:
            scores_RV: in fp32 at least; one row a request.
            rows: those that this hook wants.
            requests: of all rows.
        """
        return {}

    def beside(self, cache: PagedCache) -> EngineHook | None:
        """The hook of a runner that computes in the same way on another cache; None for none."""
        return self


class ClientHook(Hook):
    """A technique's part of the engine's client, in the process that speaks HTTP."""

    after: ClassVar[str] = ORDER[-1]

    def opening(self, request: Request) -> None:
        """A request is about to be sent.

        Raises:
            ServeError: it is refused.
        """

    def answered(self, request: Request) -> None:
        """The last output of a request is there."""

    def lost(self, requests: Sequence[Request], restarts: int) -> None:
        """The engine has died with these requests open, after so many restarts."""


class EngineHooks(Hooks[_H]):
    """Hooks in the order of :data:`ORDER`.

    Raises:
        ConfigError: see :meth:`add`.
    """

    def __init__(self, hooks: Iterable[_H] = ()) -> None:
        super().__init__(ORDER)
        self._acting: dict[str, tuple[Any, ...]] = {}
        for hook in hooks:
            self.add(hook)

    def add(self, hook: _H) -> None:
        super().add(hook)
        self._acting.clear()

    def at(self, moment: Callable[Concatenate[_H, _P], _T]) -> tuple[Callable[_P, _T], ...]:
        """What hooks do at a moment, such as ``EngineHook.planned``; none that does nothing."""
        name = moment.__name__
        value = self._acting.get(name)
        if value is None:
            value = self._acting[name] = tuple(
                getattr(hook, name) for hook in self if getattr(type(hook), name) is not moment
            )
        return value

    def __call__(
        self, moment: Callable[Concatenate[_H, _P], object], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        """Let all hooks act at a moment."""
        for act in self.at(moment):
            act(*args, **kwargs)

    def within(
        self,
        moment: Callable[Concatenate[_H, _P], AbstractContextManager[object]],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> AbstractContextManager[object]:
        """Within what all hooks put around something."""
        acting = self.at(moment)
        if len(acting) <= 1:
            return acting[0](*args, **kwargs) if acting else nullcontext()
        with ExitStack() as stack:
            for act in acting:
                stack.enter_context(act(*args, **kwargs))
            return stack.pop_all()

    def gather(self, moment: Callable[[_H], Mapping[str, _T]]) -> dict[str, _T]:
        """What all hooks return at a moment, together."""
        return {key: value for tell in self.at(moment) for key, value in tell().items()}


def beside(hooks: Iterable[EngineHook], cache: PagedCache) -> list[EngineHook]:
    """The hooks of a runner that computes in the same way on another cache."""
    results = [hook.beside(cache) for hook in hooks]
    return [hook for hook in results if hook is not None]
