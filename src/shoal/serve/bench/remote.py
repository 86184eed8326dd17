"""Replay a workload against any server that speaks OpenAI's completions.

Each request is sent when its time has come, however long others take, and streams. What a server
does wrong ends the one request, under a name: it is ``refused`` (a status), ``failed`` (an error
in the stream), ``broken`` (no stream of events, or one that breaks off), ``hung`` (it took longer
than it may) or ``empty`` (no token came).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from shoal.core.config import Value
from shoal.core.errors import ServeError, require
from shoal.core.parts import Choice, table
from shoal.core.tables import ShownAsTables, Table, table_of
from shoal.cost.serving.simulator import ServedRequest, summary
from shoal.ir import Arrival, ServeJob
from shoal.serve.bench.latencies import measured_of, quantity_rows, samples_of
from shoal.serve.cluster.resume import DONE
from shoal.serve.cluster.upstream import ServerLostError, Tcp, UpstreamResponse, ask

# Nothing that a server sends may be longer, B: an event, and a page that is no stream.
_EVENT_BYTES = 2**20
_PAGE_BYTES = 2**16
_SHOWN = 200
_ASK_S = 30.0
# Most tokens of a request, where the server does not say.
_MAX_POSITION = 4096

# Short words that most vocabularies have as one token each.
_TEXT = """
the of and to in is was he for it with as his on be at by had not are but from or have an they
which one you were her all she there would their we him been has when who will more no if out so
said what up its about into than them can only other new some could time
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True)
class RemoteServer:
    """A server and the form of its requests.

    Args:
        url: its address, with or without ``/v1``.
        model: what requests call the model.
        key: what it wants in ``Authorization: Bearer``.
        chat: ask ``chat/completions``.
        text: send words in the place of token ids; a chat always does.
        ignore_eos: request outputs of exactly the trace's lengths, an extension of OpenAI's API
            that most engines support.
        timeout_s: s after which a request counts as hung.
    """

    url: str
    model: str = ""
    key: str | None = None
    chat: bool = False
    text: bool = False
    ignore_eos: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        require(
            good,
            "url",
            self.url,
            expected="an address such as http://127.0.0.1:8000",
            error=ServeError,
        )
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, expected="more than 0")
        require(
            self.key is None or (self.key.isascii() and self.key.isprintable()),
            "the API key",
            "***",
            expected="printable ASCII characters",
            error=ServeError,
        )

    @property
    def server(self) -> Tcp:
        """Where it listens."""
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        return Tcp(parts.hostname or "", parts.port or (443 if tls else 80), tls)

    def target(self, path: str) -> str:
        """Path of a request to an endpoint below ``/v1``."""
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{path}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    def body(self, arrival: Arrival) -> bytes:
        """The request of an arrival."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        words = " ".join(_WORDS[token % len(_WORDS)] for token in arrival.prompt)
        if self.chat:
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words if self.text else list(arrival.prompt)
        return json.dumps(body).encode()


@dataclass(frozen=True)
class RemoteModel:
    """What a server says about a model.

    Args:
        max_position: most tokens of a request; None if it does not say.
    """

    name: str
    max_position: int | None


@dataclass
class ReplayedRequest:
    """What became of one request, in s since the start.

    Args:
        served: as a simulator would report it; not finished if it failed.
        sent: when it was sent, which is after its time where this process is too slow.
        times: when each piece of the answer came.
        failure: the name of what went wrong; None if nothing did.
        reason: the same in words.
    """

    served: ServedRequest
    sent: float = math.nan
    times: list[float] = field(default_factory=list)
    failure: str | None = None
    reason: str = ""

    @property
    def gaps(self) -> list[float]:
        """Between pieces, s."""
        return [later - one for one, later in zip(self.times, self.times[1:], strict=False)]


class RemoteReport(Value, ShownAsTables):
    """A workload as a server elsewhere served it.

    Args:
        url: of the server.
        model: what it calls the model.
        workload: what was sent.
        requests: how many.
        measured: quantities by name.
        failures: how many failed, by what went wrong.
        reasons: the first of each in words.
        samples: latencies of all requests that finished, s.
    """

    url: str
    model: str
    workload: Choice
    requests: int
    measured: dict[str, float]
    failures: dict[str, int]
    reasons: dict[str, str]
    samples: dict[str, list[float]]

    def tables(self) -> Iterable[Table | str]:
        """Quantities, and what failed."""
        yield table_of("", ("", "measured"), quantity_rows(self.measured), " r")
        for name, count in self.failures.items():
            yield f"{count} {name}, the first: {self.reasons[name]}"


class _WrongError(Exception):
    """A server did something wrong."""

    def __init__(self, failure: str, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


def served_model(remote: RemoteServer) -> RemoteModel:
    """The name of the requested model: ``remote.model``, or the first that the server lists.

    Raises:
        ServeError: it lists no models, or not this one.
    """
    return asyncio.run(_served_model(remote))


async def _served_model(remote: RemoteServer) -> RemoteModel:
    where = remote.target("models")
    try:
        async with (
            asyncio.timeout(_ASK_S),
            ask(remote.server, "GET", where, headers=remote.headers) as answered,
        ):
            data = await _page(answered)
            if answered.status != 200:
                raise ServeError(f"{remote.url}: GET {where}: status {answered.status}: {data}")
        listed = {str(one["id"]): one.get("max_model_len") for one in json.loads(data)["data"]}
    except TimeoutError:
        raise ServeError(f"{remote.url}: GET {where}: no answer within {_ASK_S:g} s") from None
    except ServerLostError as cause:
        raise ServeError(f"{remote.url}: {cause}; is a server running there?") from cause
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ServeError(
            f"{remote.url}: GET {where}: expected OpenAI's list of models: {cause!r}"
        ) from cause
    name = remote.model or next(iter(listed), "")
    require(
        name in listed,
        "model",
        name,
        expected=f"one that {remote.url} serves: {', '.join(list(listed)[:8]) or 'it has none'}",
        error=ServeError,
    )
    longest = listed[name]
    return RemoteModel(name, longest if isinstance(longest, int) and longest > 1 else None)


async def _page(answered: UpstreamResponse) -> str:
    """The text of a short body."""
    data = bytearray()
    async for piece in answered.pieces:
        data += piece
        if len(data) > _PAGE_BYTES:
            break
    return data.decode(errors="replace")


def replay_remote(
    remote: RemoteServer,
    arrivals: Sequence[Arrival],
    *,
    progress: Callable[[float, float, str], None] | None = None,
) -> list[ReplayedRequest]:
    """Send ``arrivals`` in real time.

    Args:
        remote: where to.
        arrivals: what comes, in the order of time.
        progress: called with (done, total, text).

    Returns:
        What became of each, in the same order.
    """
    return asyncio.run(_replay(remote, arrivals, progress))


def measure_remote(
    remote: RemoteServer,
    job: ServeJob,
    *,
    requests: int | None = None,
    vocab: int = 1000,
    targets: tuple[float, float] | None = None,
    progress: Callable[[float, float, str], None] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> RemoteReport:
    """Send a job's workload to a server in real time, and measure what clients waited for.

    Args:
        remote: where to.
        job: its workload, ``max_position`` and seed are used.
        requests: so many of the workload; None for all.
        vocab: token ids are below it.
        targets: most s to the first token and per further token, for goodput.
        progress: called with (done, total, text).
        on_start: called with what is sent, in words.

    Raises:
        ServeError: no such server or model, or no request was answered.
    """
    known = served_model(remote)
    remote = replace(remote, model=known.name)
    longest = job.max_position or known.max_position or _MAX_POSITION
    arrivals = (
        table("workload")
        .build(job.workload, where="workload")
        .arrivals(count=requests, vocab_size=vocab, max_position=longest, seed=job.seed)
    )
    if on_start is not None:
        on_start(
            f"{len(arrivals)} requests of {job.workload.name} to {known.name} at {remote.url}, "
            f"each of at most {longest:,} tokens"
        )
    result = replay_remote(remote, arrivals, progress=progress)
    served = [one.served for one in result]
    gaps = [gap for one in result for gap in one.gaps]
    failures = Counter(one.failure for one in result if one.failure is not None)
    reasons = {one.failure: one.reason for one in reversed(result) if one.failure is not None}
    if len(result) == failures.total():
        name, reason = next(iter(reasons.items()), ("empty", "the workload has no requests"))
        raise ServeError(
            f"{remote.url}: none of {len(result)} requests was answered; the first {name}: {reason}"
        )
    lags = [max(0.0, one.sent - one.served.arrival) for one in result]
    return RemoteReport(
        url=remote.url,
        model=known.name,
        workload=job.workload,
        requests=len(result),
        measured={
            **measured_of(served, gaps, targets=targets),
            "lag_p99_s": summary("lag", lags)["lag_p99_s"],
        },
        failures=dict(failures),
        reasons=reasons,
        samples=samples_of(served, gaps),
    )


async def _replay(
    remote: RemoteServer,
    arrivals: Sequence[Arrival],
    progress: Callable[[float, float, str], None] | None,
) -> list[ReplayedRequest]:
    bodies = [remote.body(arrival) for arrival in arrivals]
    results = [
        ReplayedRequest(ServedRequest(str(number), arrival.at, len(arrival.prompt)))
        for number, arrival in enumerate(arrivals)
    ]
    began = time.perf_counter()
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        await _request(remote, bodies[number], results[number], began)
        done += 1
        if progress is not None:
            progress(done, len(arrivals), "")

    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - began)))
            group.create_task(one(number))
    return results


async def _request(
    remote: RemoteServer, body: bytes, replayed: ReplayedRequest, began: float
) -> None:
    """Send one request and note what comes."""
    served = replayed.served
    path = remote.target("chat/completions" if remote.chat else "completions")
    try:
        replayed.sent = time.perf_counter() - began
        async with (
            asyncio.timeout(remote.timeout_s),
            ask(remote.server, "POST", path, headers=remote.headers, body=body) as answered,
        ):
            if answered.status != 200:
                page = (await _page(answered))[:_SHOWN]
                raise _WrongError("refused", f"status {answered.status}: {page}")
            async for data in _events(answered):
                now = time.perf_counter() - began
                _take(data, replayed, now)
        if not replayed.times:
            raise _WrongError("empty", "the stream ended without a token")
        served.first, served.finish = replayed.times[0], replayed.times[-1]
        served.n_output = served.n_output or len(replayed.times)
    except _WrongError as cause:
        replayed.failure, replayed.reason = cause.failure, str(cause)
    except TimeoutError:
        replayed.failure = "hung"
        replayed.reason = f"not ended within {remote.timeout_s:g} s"
    except (ServerLostError, UnicodeDecodeError) as cause:
        replayed.failure, replayed.reason = "broken", str(cause)


def _take(data: bytes, replayed: ReplayedRequest, now: float) -> None:
    """Note what an event says."""
    try:
        event = json.loads(data)
        if not isinstance(event, dict):
            raise TypeError(type(event).__name__)
        if event.get("error"):
            raise _WrongError("failed", json.dumps(event["error"])[:_SHOWN])
        usage = event.get("usage")
        if usage:
            replayed.served.n_output = int(usage["completion_tokens"])
            replayed.served.n_prompt = int(usage["prompt_tokens"])
        if any(_says(choice) for choice in event.get("choices") or ()):
            replayed.times.append(now)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
        text = data[:_SHOWN].decode(errors="replace")
        raise _WrongError(
            "broken", f"an event that is none of OpenAI's ({cause!r}): {text}"
        ) from cause


def _says(choice: Mapping[str, Any]) -> bool:
    """Whether a piece carries a token, even one without a text of its own."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    result = any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    return result or (choice.get("finish_reason") is None and delta.get("role") is None)


async def _events(answered: UpstreamResponse) -> AsyncGenerator[bytes, None]:
    """The data of all events up to the last.

    Raises:
        _WrongError: it is no stream of events, or ends in the middle.
        ServerLostError: the connection breaks.
    """
    held = bytearray()
    async for piece in answered.pieces:
        held += piece
        *lines, rest = held.split(b"\n")
        held = bytearray(rest)
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if name != b"data":
                continue  # a comment, or another field of an event
            data = bytes(value.removeprefix(b" "))
            if data == DONE:
                return
            yield data
        if len(held) > _EVENT_BYTES:
            raise _WrongError("broken", f"an event of more than {_EVENT_BYTES} B")
    raise _WrongError("broken", "the stream ended without [DONE]")
