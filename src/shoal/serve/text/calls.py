"""The signs around a call of a function in the text of an answer, as Hermes and Qwen write it."""

from __future__ import annotations

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
