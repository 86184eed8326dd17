"""Attention over blocks that one instance lends to another: who asks, and who answers.

A lender listens on a Unix socket that only its user can reach. After a handshake, in which both
must be of one model and one form of cache, a borrower reserves blocks, copies full blocks there,
says once which of them belong to which of its queries, and then sends the queries of every layer.
It gets back the records of :mod:`shoal.kernel.paged.partial`, and no key or value ever returns.

A frame is an operation, a layer, the number of bytes that follow, and those: JSON for words,
numbers as they lie in memory for tensors. Nothing that can execute is decoded, and a frame above
the cap ends the connection before anything is allocated.

Source: Lin et al., Infinite-LLM, 2024, sections 4.1 and 4.2.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.kernel.protocols import Ready
from shoal.plan.batching.cache.distributed import DistributedBlocks
from shoal.serve.cache.paged import PagedCache

_HEAD = struct.Struct("<BxHxxxxQ")
_WORDS, _ATTEND, _PUT = range(3)
MAX_FRAME_BYTES = 1 << 30


class LenderLostError(ServeError):
    """An instance that holds blocks of this one is gone.

    Args:
        instance: which.
        reason: how it was noticed.
    """

    def __init__(self, instance: int, reason: str) -> None:
        super().__init__(
            f"instance {instance}, which lends memory, is gone ({reason}); requests whose keys it "
            "held are computed again"
        )
        self.instance = instance


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they are."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class FrameStream:
    """Frames over a connected socket.

    Args:
        connection: both directions.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Bytes of queries and of records, without heads and words.
        self.bytes_out = self.bytes_in = 0

    def send(self, kind: int, layer: int, *parts: memoryview) -> None:
        """One frame of these bytes."""
        size = sum(part.nbytes for part in parts)
        self._socket.sendall(_HEAD.pack(kind, layer, size))
        for part in parts:
            self._socket.sendall(part)

    def say(self, words: Mapping[str, Any]) -> None:
        """One frame of words."""
        self.send(_WORDS, 0, memoryview(json.dumps(words).encode()))

    def head(self) -> tuple[int, int, int]:
        """Kind, layer and size of the next frame; EOFError at the end."""
        kind, layer, size = _HEAD.unpack(bytes(self.take(_HEAD.size)))
        if size > MAX_FRAME_BYTES:
            raise ServeError(
                f"frame of {size} B between instances: expected at most {MAX_FRAME_BYTES} B; one "
                "of the two is not Shoal"
            )
        return kind, layer, size

    def words(self, size: int) -> dict[str, Any]:
        """The words of a frame."""
        words = json.loads(bytes(self.take(size)))
        if not isinstance(words, dict):
            raise ServeError("frame between instances: expected a JSON object")
        return words

    def hear(self) -> dict[str, Any]:
        """The next frame, which has words."""
        kind, _, size = self.head()
        if kind != _WORDS:
            raise ServeError(f"frame {kind} between instances: expected words")
        return self.words(size)

    def take(self, size: int) -> bytearray:
        """So many bytes."""
        result = bytearray(size)
        self.fill(memoryview(result))
        return result

    def fill(self, view: memoryview) -> None:
        """As many bytes as there is room for; EOFError when there are no more."""
        done, size = 0, view.nbytes
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError("it closed its connection")
            done += count

    def close(self) -> None:
        """Close the socket, which ends its reader."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Lender:
    """Answers other instances, a thread for each connection.

    Args:
        form: what a borrower's model and cache must be like, as plain values.
        kv: the books of this instance; ``lock`` is held while they are read or written.
        cache: where the blocks lie.
        kernel: of ``paged_attention`` over a part of the context.
        heads: query heads.
        lock: of the books.
        path: of the Unix socket to listen on.
    """

    def __init__(
        self,
        form: Mapping[str, Any],
        kv: DistributedBlocks,
        cache: PagedCache,
        kernel: Ready,
        heads: int,
        lock: AbstractContextManager[object],
        path: str,
    ) -> None:
        self.form, self.kv, self.cache, self.kernel = form, kv, cache, kernel
        self.heads, self.lock = heads, lock
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True, name="shoal-lender").start()

    def close(self) -> None:
        """Take no more connections; those there are end with their borrowers."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            name = "shoal-lender-peer"
            threading.Thread(
                target=self._answer, args=(connection,), daemon=True, name=name
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        stream = FrameStream(connection)
        try:
            # Settings of a thread: one core for what is asked from outside.
            torch.set_num_threads(1)
            with torch.inference_mode():
                _Session(self, stream).run()
        except (EOFError, OSError):
            pass  # the borrower is gone; the parent of both decides about its blocks
        except (ServeError, ValueError, KeyError, TypeError) as cause:
            with contextlib.suppress(OSError):  # it may not wait for the reason
                stream.say({"error": str(cause)})
        finally:
            stream.close()


class _Session:
    """One connection of a borrower."""

    def __init__(self, lender: Lender, stream: FrameStream) -> None:
        self._lender, self._stream = lender, stream
        self._debtor = -1
        self._blocks = self._lengths = self._requests = torch.empty(0)
        cache = lender.cache
        store = cache.stores[0]
        self._dtype, self._width = cache.dtype, int(lender.form["head_dim"])
        self._layers = store.shape[0]

    def run(self) -> None:
        """Answer until the borrower is gone."""
        hello = self._stream.hear()
        wrong = {
            name: (hello["form"].get(name), value)
            for name, value in self._lender.form.items()
            if hello["form"].get(name) != value
        }
        if wrong:
            text = ", ".join(
                f"{name} {theirs!r} (here {ours!r})" for name, (theirs, ours) in wrong.items()
            )
            raise ServeError(f"a borrower has {text}: instances must be of one model and one cache")
        self._debtor = int(hello["instance"])
        self._stream.say({"ok": True})
        while True:
            kind, layer, size = self._stream.head()
            if kind == _ATTEND:
                self._attend(layer, size)
            elif kind == _PUT:
                self._put(size)
            else:
                self._words(self._stream.words(size))

    def _words(self, words: Mapping[str, Any]) -> None:
        kv = self._lender.kv
        if "reserve" in words:
            with self._lender.lock:
                blocks = kv.lend(self._debtor, int(words["reserve"]))
            self._stream.say({"blocks": blocks})
        elif "release" in words:
            with self._lender.lock:
                kv.take_back(self._debtor, words["release"])
        elif "tables" in words:
            self._plan(words["tables"], words["rows"])
        else:
            raise ServeError("words between instances: expected reserve, release or tables")

    def _plan(self, tables: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Which blocks are seen by the rows of the queries to come."""
        with self._lender.lock:
            good = all(self._lender.kv.lends(self._debtor, table) for table in tables)
        if not good:
            raise ServeError("attention over blocks that are not lent to who asks")
        width = max(len(table) for table in tables)
        self._blocks = torch.tensor(
            [[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32
        )
        self._requests = torch.tensor(rows)
        tokens = torch.tensor([len(table) for table in tables]) * self._lender.cache.block_size
        self._lengths = tokens[self._requests]

    def _attend(self, layer: int, size: int) -> None:
        shape = (len(self._requests), self._lender.heads, self._width)
        query = torch.empty(shape, dtype=self._dtype)
        if size != query.numel() * query.element_size() or layer >= self._layers:
            raise ServeError(f"queries of {size} B for layer {layer}: expected {list(shape)}")
        self._stream.fill(raw(query))
        sides = self._lender.cache.sides(layer)
        record = self._lender.kernel(query, *sides, self._blocks, self._lengths, self._requests)
        self._stream.send(_ATTEND, layer, raw(record))

    def _put(self, size: int) -> None:
        """Blocks, as many as there are numbers of them first."""
        count = int.from_bytes(self._stream.take(8), "little")
        one = sum(s[:, :, 0].numel() * s.element_size() for s in self._lender.cache.blocks)
        if size != 8 + count * (8 + one):
            raise ServeError(f"{count} blocks in {size} B: expected {8 + count * (8 + one)} B")
        places = torch.empty(count, dtype=torch.int64)
        self._stream.fill(raw(places))
        results = []
        for store in self._lender.cache.blocks:
            new = torch.empty((*store.shape[:2], count, store.shape[3]), dtype=store.dtype)
            self._stream.fill(raw(new))
            results.append(new)
        with self._lender.lock:
            if not self._lender.kv.lends(self._debtor, places.tolist()):
                raise ServeError("copies to blocks that are not lent to who sends them")
            for store, new in zip(self._lender.cache.blocks, results, strict=True):
                store.index_copy_(2, places, new)
        self._stream.say({"ok": True})


class LenderClient:
    """The borrower's connection to a lender. Every failure is a :class:`LenderLostError`.

    Args:
        own: number of the borrower.
        form: of the borrower's model and cache.
        timeout_s: s of silence in an answer after which it is lost.

    Raises:
        ServeError: it has another model or cache.
    """

    def __init__(
        self, instance: int, path: str, own: int, form: Mapping[str, Any], *, timeout_s: float
    ) -> None:
        self.instance = instance
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as cause:
            connection.close()
            raise LenderLostError(instance, str(cause)) from cause
        self.stream = FrameStream(connection)
        self._planned: object = None
        self._due = 0  # answers that were asked for and not fetched
        try:
            self._say({"instance": own, "form": form})
            self._hear()
        except ServeError:
            self.close()
            raise

    def reserve(self, blocks: int) -> list[int]:
        """As many blocks as it grants, up to so many."""
        self._say({"reserve": blocks})
        return list(self._hear()["blocks"])

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._say({"release": list(blocks)})

    def plan(self, tables: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Send which blocks are seen by which rows of the queries to come, unless it knows.

        Args:
            tables: of each request.
            rows: the request of each query.
        """
        wanted = (tables, rows)
        if wanted != self._planned:
            self._say({"tables": tables, "rows": rows})
            self._planned = wanted

    def ask(self, layer: int, q_NHd: Tensor) -> None:
        """Send the queries of a layer; the answer is fetched by :meth:`answer`."""
        self._settle()
        view = raw(q_NHd)
        try:
            self.stream.send(_ATTEND, layer, view)
        except OSError as cause:
            raise LenderLostError(self.instance, str(cause)) from cause
        self._due += 1
        self.stream.bytes_out += view.nbytes

    def answer(self, record: Tensor) -> None:
        """The record of the queries that were asked first, into ``record``."""
        view = raw(record)
        try:
            kind, _, size = self.stream.head()
            if kind == _WORDS:
                raise ServeError(str(self.stream.words(size).get("error")))
            if size != view.nbytes:
                raise ServeError(f"record of {size} B: expected {view.nbytes} B")
            self.stream.fill(view)
        except (EOFError, OSError, ServeError) as cause:
            raise LenderLostError(self.instance, str(cause)) from cause
        self._due -= 1
        self.stream.bytes_in += view.nbytes

    def put(self, cache: PagedCache, blocks: Sequence[int], targets: Sequence[int]) -> int:
        """Copy blocks of a cache to blocks of the lender; the bytes of keys and values."""
        here, there = torch.tensor(blocks), torch.tensor(targets)
        with torch.inference_mode():
            parts = [store.index_select(2, here) for store in cache.blocks]
        count = memoryview(len(blocks).to_bytes(8, "little"))
        try:
            self.stream.send(_PUT, 0, count, raw(there), *map(raw, parts))
        except OSError as cause:
            raise LenderLostError(self.instance, str(cause)) from cause
        self._hear()
        return sum(part.numel() * part.element_size() for part in parts)

    def close(self) -> None:
        """End the connection."""
        self.stream.close()

    def _say(self, words: Mapping[str, Any]) -> None:
        try:
            self.stream.say(words)
        except OSError as cause:
            raise LenderLostError(self.instance, str(cause)) from cause

    def _settle(self) -> None:
        """Read past answers that were not fetched: a step ended when another lender was lost."""
        try:
            for _ in range(self._due):
                _, _, size = self.stream.head()
                self.stream.take(size)
        except (EOFError, OSError, ServeError) as cause:
            raise LenderLostError(self.instance, str(cause)) from cause
        self._due = 0

    def _hear(self) -> dict[str, Any]:
        self._settle()
        try:
            words = self.stream.hear()
        except (EOFError, OSError) as cause:
            raise LenderLostError(self.instance, str(cause)) from cause
        if "error" in words:
            raise ServeError(f"lender {self.instance}: {words['error']}")
        return words
