"""Answers on their way to a client that may read slowly, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.core.errors import ServeError
from shoal.serve.http.answer import ResponseDelta
from shoal.serve.http.errors import ApiError, as_api_error
from shoal.serve.http.writers import ResponseWriter

log = logging.getLogger("shoal.serve")

_T = TypeVar("_T")
# Items of several answers that wait for the connection together.
_MERGE_AHEAD = 32
# Events that are written without a look at the loop, which may know that the client has left:
# asyncio takes five writes to a connection that is lost before it complains.
_WRITE_AHEAD = 3


async def merge(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Items of several generators as they come; the first error ends them all."""
    queue: asyncio.Queue[tuple[_T] | Exception | None] = asyncio.Queue(_MERGE_AHEAD)

    async def pump(source: AsyncGenerator[_T, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    await queue.put((item,))
        except Exception as cause:
            await queue.put(cause)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if got is None:
                left -= 1
            elif isinstance(got, Exception):
                raise got
            else:
                yield got[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _leaves(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: it left first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_leaves(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def gather(
    run: AsyncGenerator[tuple[int, ResponseDelta], None], writer: ResponseWriter, number: int
) -> dict[str, Any]:
    """All answers of a job, whole."""
    texts: list[list[str]] = [[] for _ in range(number)]
    answers = [ResponseDelta() for _ in range(number)]
    async with contextlib.aclosing(run):
        async for index, piece in run:
            texts[index].append(piece.text)
            answers[index].tokens += piece.tokens
            answers[index].entries += piece.entries
            answers[index].finish = piece.finish
    for answer, pieces in zip(answers, texts, strict=True):
        answer.text = "".join(pieces)
    return writer.whole(answers)


def _event(value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    named = f"event: {value['type']}\n" if "type" in value else ""
    return f"{named}data: {data}\n\n".encode()


async def events(
    run: AsyncGenerator[tuple[int, ResponseDelta], None], writer: ResponseWriter
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a job.

    Raises:
        ServeError: before the first event; later errors are events themselves.
    """
    opened: set[int] = set()
    try:
        async with contextlib.aclosing(run):
            async for index, piece in run:
                if index not in opened:
                    opened.add(index)
                    for value in writer.opening(index):
                        yield _event(value)
                for value in writer.delta(index, piece):
                    yield _event(value)
        for value in writer.ending():
            yield _event(value)
    except Exception as cause:
        if not opened:
            raise
        yield _event(writer.failed(_as_event(cause)))
    if writer.done:
        yield writer.done


def _as_event(cause: Exception) -> ApiError:
    if isinstance(cause, ServeError):
        return as_api_error(cause)
    log.error("a stream failed", exc_info=cause)
    return ApiError(
        "internal error on this request; see its log",
        status=500,
        code="server_error",
    )


class EventStream(Response):
    """Server-sent events; what fails before the first of them is an ordinary error answer.

    Args:
        source: the events.
        ended: called when there are no more, or the client is gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], *, ended: Callable[[], None] | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._ended = ended or (lambda: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves."""
        try:
            with contextlib.suppress(ClientDisconnect):  # no client is left to receive anything
                await until_gone(receive, self._send_all(send))
        finally:
            self._ended()

    async def _send_all(self, send: Send) -> None:
        written = 0
        async with contextlib.aclosing(self._source):
            async for chunk in self._source:
                if not written:
                    start = {"status": self.status_code, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **start})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                written += 1
                if written % _WRITE_AHEAD == 0:
                    # Neither the source nor the connection waits while there is enough of both.
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
