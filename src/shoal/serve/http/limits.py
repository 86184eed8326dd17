"""What the HTTP server takes at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.core.errors import ServeError, require


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of the options of a request.

    Args:
        body_bytes: largest body, B.
        header_bytes: largest header block, request line included, B.
        headers: most header fields.
        json_depth: deepest nesting of a body.
        json_containers: most lists and objects in a body.
        json_strings: most strings in a body, names of fields included.
        choices: largest ``n``.
        batch: most answers of one request, prompts times ``n``.
        documents: most documents that are ranked at once.
        logprobs: most log probabilities a token.
        logprob_values: most log probabilities of all answers of one request.
        stops: most stop strings.
        stop_chars: longest stop string, characters.
        biases: most tokens with a bias.
        messages: most messages of a chat.
        tools: most functions that an answer may call.
        grammar_bytes: largest form of an answer, schemas of its tools included, B.
        grammar_s: s in which it must be compiled.
        connections: open at once; fewer where the limit on descriptors is lower.
        open_requests: answers under way or waiting; more are refused with 429.
        read_s: s in which a request must have arrived.
        write_s: s for which a client may not read before its request is aborted.
    """

    body_bytes: int = 4 * 2**20
    header_bytes: int = 16 * 2**10
    headers: int = 100
    json_depth: int = 64
    json_containers: int = 20_000
    json_strings: int = 50_000
    choices: int = 16
    batch: int = 64
    documents: int = 256
    logprobs: int = 20
    logprob_values: int = 1_000_000
    stops: int = 16
    stop_chars: int = 256
    biases: int = 300
    messages: int = 2048
    tools: int = 128
    grammar_bytes: int = 64 * 2**10
    grammar_s: float = 0.5
    connections: int = 8192
    open_requests: int = 1024
    read_s: float = 30.0
    write_s: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(
                value > 0, f"limits.{item.name}", value, expected="more than 0", error=ServeError
            )
