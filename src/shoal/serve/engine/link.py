"""The connection to an engine's process: it is made, read, asked, watched and closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.core.errors import ServeError
from shoal.serve.engine.frames import Decoder, encode
from shoal.serve.engine.launch import EngineLog, EngineProcess
from shoal.serve.http.client_options import ClientOptions

_READ_BYTES = 2**18


@dataclass(frozen=True)
class ModelInfo:
    """What the engine says about its model.

    Args:
        vocab_size: token ids are below it.
        max_position: most tokens of a request, prompt and output.
        eos_ids: tokens that end a text.
        workers: most concurrent workers of a request, and those of one that does not say.
        streams: parallel streams of the model; a request may use fewer.
        shares: a request may take a share of the model.
    """

    vocab_size: int
    max_position: int
    eos_ids: frozenset[int]
    workers: int = 1
    streams: int = 1
    shares: bool = False

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> ModelInfo:
        """From what :func:`~shoal.serve.engine.process.describe` gives; the rest is left out."""
        result = {**message, "eos_ids": frozenset(message["eos_ids"])}
        names = [one.name for one in fields(cls) if one.name in result]
        return cls(**{name: result[name] for name in names})


class EngineLink:
    """A connected engine process.

    Args:
        launched: the process.
        words: what it prints.
        reader: of its messages.
        writer: of messages to it.

    Attributes:
        answered: whether it has answered a request.
    """

    def __init__(
        self,
        launched: EngineProcess,
        words: EngineLog,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.launched, self._words = launched, words
        self._reader, self._writer = reader, writer
        self._decoder = Decoder()
        self._asked: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._number = 0
        self.answered = False

    def send(self, kind: str, **words: Any) -> None:
        """Send a message."""
        self._writer.write(encode({"kind": kind, **words}))

    def ask(self, kind: str, **words: Any) -> asyncio.Future[Mapping[str, Any]]:
        """Send a message that is answered; the answer is cancelled when the engine dies."""
        self._number += 1
        answer = self._asked[self._number] = asyncio.get_running_loop().create_future()
        self.send(kind, number=self._number, **words)
        return answer

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded.

        Raises:
            ServeError: it cannot be, or the process has ended.
        """
        while data := await self._read():
            for message in self._decoder.feed(data):
                if message["kind"] == "failed":
                    raise ServeError(message["message"])
                return ModelInfo.of(message)
        self.launched.process.kill()
        await self._words.finish()
        raise ServeError(f"the engine died while it loaded{self._words.last}")

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionResetError:  # it has not even read what it is to load
            return b""

    async def run(self, route: Callable[[Mapping[str, Any]], None], options: ClientOptions) -> str:
        """Route what the engine sends until it is gone or hangs; what happened to it."""
        tasks = [
            asyncio.create_task(self._route(route), name="engine reader"),
            asyncio.create_task(self._watch(options), name="engine watch"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()

    async def _route(self, route: Callable[[Mapping[str, Any]], None]) -> str:
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._decoder.feed(data):
                    if message["kind"] == "failed":
                        return f"the engine failed: {message['message']}"
                    route(message)
                    answer = self._asked.pop(message.get("number", 0), None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except (OSError, ServeError) as cause:
            return f"the connection to the engine broke: {cause}"
        return "the engine died"

    async def _watch(self, options: ClientOptions) -> str:
        while True:
            asked_at = time.monotonic()
            done, _ = await asyncio.wait([self.ask("ping")], timeout=options.hang_s)
            if not done:
                return (
                    f"the engine hangs: no answer for {time.monotonic() - asked_at:.0f} s, "
                    "so it was killed"
                )
            await asyncio.sleep(options.ping_s)

    async def close(self) -> None:
        """End the process and all questions to it."""
        self._writer.close()
        for answer in self._asked.values():
            answer.cancel()
        self.launched.process.kill()
        await self._words.finish()
        await asyncio.to_thread(self.launched.discard)


async def connect(launched: EngineProcess, start_s: float) -> tuple[EngineLink, ModelInfo]:
    """A link to a process that has loaded its model.

    Raises:
        ServeError: it cannot, died, or took longer than ``start_s``; it was ended.
    """
    words = EngineLog(launched.process)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(start_s):
            reader, writer = await asyncio.open_unix_connection(
                sock=launched.socket, limit=_READ_BYTES
            )
            link = EngineLink(launched, words, reader, writer)
            return link, await link.ready()
    except BaseException as cause:
        if writer is not None:
            writer.close()
        launched.process.kill()
        await words.finish()
        await asyncio.to_thread(launched.discard)
        if isinstance(cause, TimeoutError):
            raise ServeError(
                f"the engine did not load its model within {start_s:g} s; "
                f"allow more with --start-timeout{words.last}"
            ) from None
        raise
