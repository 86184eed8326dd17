"""Work on what strangers wrote, in a process that can be killed.

A grammar or a template is small, and what comes of it may take minutes or gigabytes. A process of
its own has a limit of memory, which it sets itself, and one of time, which is kept here: it is
killed, and the next question gets another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core import children
from shoal.serve.engine.frames import PRIVATE, Decoder, encode

_READ_BYTES = 2**16
_START_S = 30.0


class ConfinedProcess:
    """A process that answers questions one by one.

    Args:
        module: what it runs: :func:`answer_all`.
        seconds: most s of an answer.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self._module, self.seconds = module, seconds
        self._lock = asyncio.Lock()
        self._decoder = Decoder()
        self.process: asyncio.subprocess.Process | None = None

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question, once those before it are answered.

        Raises:
            TimeoutError: it took too long; the process was killed.
            EOFError: the process ended, as it does where it needs too much memory.
        """
        async with self._lock:
            try:
                if self.process is None:
                    await self._start()
                async with asyncio.timeout(self.seconds):
                    return await self._ask(question)
            except OSError as cause:
                await self._end()
                if isinstance(cause, TimeoutError):
                    raise
                raise EOFError(str(cause)) from cause
            except BaseException:  # the client left; what the process says next is dropped
                await self._end()
                raise

    async def stop(self) -> None:
        """End the process."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # Both pipes at their ends, so that nothing of it is left open.
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        await process.stdout.read()
        await process.wait()

    async def _start(self) -> None:
        self._decoder = Decoder()
        self.process = await asyncio.create_subprocess_exec(
            *children.command(self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd=children.ROOT,
            # Threads of libraries take address space, and nothing is computed there.
            env=children.environment(
                {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, without=PRIVATE
            ),
        )
        async with asyncio.timeout(_START_S):
            await self._receive()

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(encode(message))
        await self.process.stdin.drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        while data := await self.process.stdout.read(_READ_BYTES):
            for message in self._decoder.feed(data):
                return message
        raise EOFError(f"{self._module} ended")


def answer_all(
    answer: Callable[[Mapping[str, Any]], dict[str, Any]],
    first: Mapping[str, Any],
    *,
    memory_bytes: int,
) -> int:
    """What such a process does: answer questions from its standard input until that ends.

    Args:
        answer: to a question.
        first: a question to answer at once, so that nothing is imported later.
        memory_bytes: most address space.

    Returns:
        The exit status.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = Decoder()
    _write(answer(first))
    while data := os.read(0, _READ_BYTES):
        for question in decoder.feed(data):
            _write(answer(question))
    return 0


def _write(message: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()
