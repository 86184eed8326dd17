"""The one shape that every error of the HTTP server has, which is OpenAI's.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, for every status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from shoal.core.errors import ServeError
from shoal.corpora.chat.template import TemplateLimitError
from shoal.serve.engine.failure import (
    EngineDownError,
    RefusedError,
    RequestFailedError,
    SlowReaderError,
)

# Header of an answer to a request that an engine died with; its value names the death.
DIED = "x-shoal-engine-died"

# HTTP status -> type of the error, in OpenAI's words.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(ServeError):
    """An answer that is an error.

    Args:
        message: where, what was given, what is allowed, what to do.
        param: field of the request that is wrong.
        code: short name of the problem for programs.
        retry_after_s: s after which to try again.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, round(retry_after_s)))


def as_api_error(cause: ServeError) -> ApiError:
    """The error that a client receives for an error of the server's parts."""
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, EngineDownError):
        return ApiError(
            str(cause),
            status=503,
            code="engine_unavailable",
            retry_after_s=cause.retry_after_s,
            headers={DIED: cause.met} if cause.met else None,
        )
    if isinstance(cause, RefusedError):
        return ApiError(str(cause), code="request_refused")
    if isinstance(cause, RequestFailedError):
        return ApiError(str(cause), status=500, code="request_failed")
    if isinstance(cause, TemplateLimitError):
        return ApiError(str(cause), param="messages", code="chat_template_error")
    if isinstance(cause, SlowReaderError):
        return ApiError(str(cause), status=429, code="slow_reader")
    return ApiError(str(cause), status=500, code="server_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else TYPES[400])
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    """The answer that is this error."""
    return Response(
        json.dumps(error_body(error), ensure_ascii=False).encode("utf-8", "replace"),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
