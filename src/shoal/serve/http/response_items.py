"""``/v1/responses``: an answer as items, whole or in typed events."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.serve.http.answer import ResponseDelta
from shoal.serve.http.errors import ApiError, error_body
from shoal.serve.http.logprobs import chat_logprobs
from shoal.serve.http.writers import GenerationJob
from shoal.serve.text.tools import ToolCallDelta, ToolCallReader

# Why the engine ended an answer -> its status, and that of what it had not finished.
_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}

_Event = dict[str, Any]


class ItemWriter:
    """Builds the items of the one answer of a job, and says in events what is new.

    Args:
        job: with one prompt and one answer.
        name: what the model is called.
        shown: fields of the request that the response repeats.
    """

    done = b""

    def __init__(self, job: GenerationJob, name: str, shown: Mapping[str, Any]) -> None:
        self._job, self._name, self._shown = job, name, shown
        self._reader = ToolCallReader() if job.ask.tools is not None else None
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item goes on
        self._status = "in_progress"
        self._logprobs: list[dict[str, Any]] = []  # whose text has not come
        self._number = 0

    def opening(self, index: int) -> list[_Event]:
        """The response, with nothing in it."""
        response = self._response()
        return [
            self._event(f"response.{kind}", response=response)
            for kind in ("created", "in_progress")
        ]

    def delta(self, index: int, piece: ResponseDelta) -> list[_Event]:
        """What is new of its items."""
        events: list[_Event] = []
        if self._job.ask.logprobs is not None:
            self._logprobs += chat_logprobs(piece.entries)["content"]
        text = piece.text
        calls: list[ToolCallDelta] = []
        if self._reader is not None:
            text, calls = self._reader.feed(text, last=piece.finish is not None)
        if text:
            events += self._say(text)
        for call in calls:
            events += self._call(call)
        if piece.finish is not None:
            if not self._items:  # an answer without a word is a message, too
                events += self._begin_message()
            self._status = _STATUS[piece.finish]
            events += self._close(self._status)
        return events

    def ending(self) -> list[_Event]:
        """The response, whole."""
        kind = self._status if self._status in ("completed", "incomplete") else "failed"
        return [self._event(f"response.{kind}", response=self._response())]

    def failed(self, error: ApiError) -> _Event:
        """The error as the event of this API, and in the one shape of errors."""
        words = {"code": error.code, "message": str(error), "param": error.param}
        return self._event("error", **words, **error_body(error))

    def whole(self, answers: Sequence[ResponseDelta]) -> dict[str, Any]:
        """The response."""
        self.delta(0, answers[0])
        return self._response()

    def _event(self, kind: str, **words: Any) -> _Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **words}

    def _of_item(self, kind: str, **words: Any) -> _Event:
        """An event of the last item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **words)

    def _item(self, kind: str) -> _Event:
        """The last item was added, or is done."""
        item = dict(self._items[-1])
        return self._event(
            f"response.output_item.{kind}", output_index=len(self._items) - 1, item=item
        )

    def _begin(self, item: dict[str, Any]) -> list[_Event]:
        events = self._close("completed")
        self._items.append({**item, "status": "in_progress"})
        self._open = True
        return [*events, self._item("added")]

    def _begin_message(self) -> list[_Event]:
        name = f"msg_{secrets.token_hex(12)}"
        events = self._begin({"type": "message", "id": name, "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events.append(self._of_item("content_part.added", content_index=0, part=dict(part)))
        self._items[-1]["content"] = [part]
        return events

    def _say(self, text: str) -> list[_Event]:
        """Go on with the message, or begin one."""
        talking = self._open and self._items[-1]["type"] == "message"
        events = [] if talking else self._begin_message()
        part = self._items[-1]["content"][0]
        new, self._logprobs = self._logprobs, []
        part["text"] += text
        part["logprobs"] += new
        say = {"content_index": 0, "delta": text, "logprobs": new}
        return [*events, self._of_item("output_text.delta", **say)]

    def _call(self, new: ToolCallDelta) -> list[_Event]:
        """Go on with a call, or begin one."""
        events = []
        if new.call is not None:
            call = {"call_id": new.call.id, "name": new.call.name, "arguments": ""}
            identity = f"fc_{secrets.token_hex(12)}"
            events = self._begin({"type": "function_call", "id": identity, **call})
        if new.arguments:
            self._items[-1]["arguments"] += new.arguments
            events.append(self._of_item("function_call_arguments.delta", delta=new.arguments))
        return events

    def _close(self, status: str) -> list[_Event]:
        """End the last item, if it goes on."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = "completed" if status == "completed" else "incomplete"
        if item["type"] == "function_call":
            words = {"name": item["name"], "arguments": item["arguments"]}
            return [self._of_item("function_call_arguments.done", **words), self._item("done")]
        part = item["content"][0]
        part["logprobs"] += self._logprobs
        self._logprobs = []
        said = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._of_item("output_text.done", content_index=0, **said),
            self._of_item("content_part.done", content_index=0, part=dict(part)),
            self._item("done"),
        ]

    def _response(self) -> dict[str, Any]:
        ended = self._status != "in_progress"
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self._name,
            "output": [dict(item) for item in self._items],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            **self._shown,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
