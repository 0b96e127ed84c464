"""A refusal or a failure, as clients of either edge see it."""

from __future__ import annotations

from typing import Any

import orjson

from halfmoon.schemas.numbers import MS_NS

#: HTTP status of a client that left before its answer (nginx's number); it appears in metrics only.
CLIENT_GONE = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal or failure as the client sees it, on either edge."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_ns: int = 0,
    ) -> None:
        #: A client's words may be in it, and be no Unicode.
        self.message = message.encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.status = status
        self.kind = _TYPES.get(status, "server_error")
        self.param = param
        self.code = code
        #: When to try again; 0: unknown.
        self.retry_after_ns = retry_after_ns
        #: More fields of the error object (a rejection's prediction).
        self.extra: dict[str, Any] = {}

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return orjson.dumps({"error": error})

    def retry_headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds (at least 1) and `retry-after-ms`; empty when no time is known.

        `x-should-retry`, which OpenAI's clients obey, is false for a 429 without a time: a retry would get the same.
        """
        if not self.retry_after_ns:
            return {"x-should-retry": "false"} if self.status == 429 else {}
        milliseconds = max(1, -(-self.retry_after_ns // MS_NS))
        return {
            "retry-after": str(-(-milliseconds // 1000)),
            "retry-after-ms": str(milliseconds),
            "x-should-retry": "true",
        }
