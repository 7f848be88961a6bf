"""The API's exceptions, and how everything else that goes wrong becomes one of them.

ApiError                        what a client is told, in OpenAI's shape
├── InvalidParameterError       400: a parameter is wrong, missing, unknown or not honoured
├── AuthenticationError         401: no API key, or one that is not accepted
├── PermissionDeniedError       403: a host, or a page, that this server does not answer for
├── NotFoundError               404: no such model or route
├── RequestTimeoutError         408: it took longer than this server allows, or to arrive, or an edge's server says so
├── RequestTooLargeError        413: the body is larger than this server reads
├── UnsupportedEncodingError    415: the body is compressed
├── TooManyRequestsError        429: the caller's rate, or the server's queue, is used up
├── UnavailableError            503: the model is loading, or the server is shutting down
├── ClientGoneError             499: nobody is left to answer; seen in logs only
└── InternalError               500: our fault; says nothing about the inside
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from app.responses import ErrorBody, ErrorInfo
from speculative.errors import (
    ContextLengthError,
    EngineError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStepError,
    InvalidRequestError,
    ServerTimeoutError,
)

logger = logging.getLogger("moaserve.app")

RETRY_AFTER_S = 5
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


class ApiError(Exception):
    """An answer other than success: ``status`` and the four fields of OpenAI's error object."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> str:
        """The JSON document of this error, ASCII only: it may quote a caller's text that no UTF-8 can hold."""
        info = ErrorInfo(message=self.message, type=self.type, param=self.param, code=self.code)
        return json.dumps(ErrorBody(error=info).model_dump())

    def response(self) -> Response:
        """The HTTP response of this error; whoever passes it on finds it in the scope's state."""
        return _ErrorResponse(self)


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused in here is told under the ``names`` that parameters have in the caller's API."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        error.param = names.get(error.param or "", error.param)
        raise


class _ErrorResponse(Response):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, headers=error.headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error"] = self._error
        await super().__call__(scope, receive, send)


class InvalidParameterError(ApiError):
    """The request cannot be honoured as it is; ``param`` names the culprit."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, code=code, param=param)


class AuthenticationError(ApiError):
    """No API key, or one that is not accepted."""

    status = 401
    type = "invalid_request_error"

    def __init__(self, given: bool) -> None:
        message = (
            "Incorrect API key provided."
            if given
            else "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
        )
        super().__init__(message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class PermissionDeniedError(ApiError):
    """Whatever is asked, it is not answered here."""

    status = 403
    type = "invalid_request_error"


class RequestTimeoutError(ApiError):
    """The answer, or the request itself, was not there in the time that this server allows."""

    status = 408
    type = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_timeout")

    @classmethod
    def of_answer(cls, seconds: float) -> RequestTimeoutError:
        """For an answer that took longer."""
        return cls(f"The answer took longer than {seconds:g} seconds. Ask for fewer tokens.")

    @classmethod
    def of_arrival(cls, seconds: float) -> RequestTimeoutError:
        """For a request that took longer to come."""
        return cls(f"The request did not arrive within {seconds:g} seconds.")


class RequestTooLargeError(ApiError):
    """The body has more bytes than this server reads."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, most: int) -> None:
        super().__init__(f"The request body is larger than {most} bytes.", code="request_too_large")


class UnsupportedEncodingError(ApiError):
    """The body comes in an encoding, and would have to be decoded first."""

    status = 415
    type = "invalid_request_error"

    def __init__(self, encoding: str) -> None:
        message = f"This server takes no bodies with 'Content-Encoding: {encoding}': send the body as it is."
        super().__init__(message, code="unsupported_encoding")


class TooManyRequestsError(ApiError):
    """The caller's rate, or the server's queue, is used up."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, code: str, retry_after: int = RETRY_AFTER_S) -> None:
        headers = {"Retry-After": str(retry_after)}
        super().__init__(f"{message} Try again in {retry_after} s.", code=code, headers=headers)


class NotFoundError(ApiError):
    """No such model or route."""

    status = 404
    type = "invalid_request_error"


class UnavailableError(ApiError):
    """Not now: the model is loading, or the server is shutting down."""

    status = 503

    def __init__(self, message: str) -> None:
        super().__init__(message, code="service_unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


class ClientGoneError(ApiError):
    """The client closed the connection before its answer was ready."""

    status = 499
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.", code="client_closed_request")


class InternalError(ApiError):
    """Something broke that the client cannot mend."""

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.", code="internal_error")


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told about ``error``; what it must not know is logged instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return InvalidParameterError(str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        return InvalidParameterError(str(error), param=error.param)
    if isinstance(error, EngineNotReadyError):
        return UnavailableError(str(error) or "The model is still loading.")
    if isinstance(error, ServerTimeoutError):
        return RequestTimeoutError(str(error))
    if isinstance(error, EngineLoadError):
        return UnavailableError("The model could not be loaded.")
    if isinstance(error, EngineStepError):
        return InternalError()  # the engine's thread, where it happened, has logged it
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors()[0])
    if isinstance(error, HTTPException):
        return _from_http(error)
    logger.error("unexpected error", exc_info=error)
    return InternalError()


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return _from_routing(error, request).response()
        return to_api_error(error).response()

    for kind in (ApiError, RequestValidationError, HTTPException, EngineError):
        app.add_exception_handler(kind, answer)


def _from_routing(error: HTTPException, request: Request) -> ApiError:
    """The same as `_from_http`, with what was asked where no route takes it."""
    api_error = _from_http(error)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        api_error.message = f"There is no such route: {asked}."
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names the methods of the first route with this path alone.
        allowed = [method for method in METHODS if _takes(request, method)]
        methods = sorted({*allowed, *(["HEAD"] if "GET" in allowed else ())})
        api_error.message = f"This route does not take {asked}; it takes {' and '.join(methods)}."
        api_error.headers = {"Allow": ", ".join(methods)}
    return api_error


def _takes(request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def _from_http(error: HTTPException) -> ApiError:
    """Starlette's and FastAPI's own refusals: an unknown route, a wrong method, a body that cannot be decoded."""
    known = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    api_error = ApiError(str(error.detail), code=known.get(error.status_code, "http_error"), headers=error.headers)
    api_error.status = error.status_code
    if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        api_error.type = InvalidParameterError.type
    return api_error


def _from_validation(problem: Mapping[str, Any]) -> ApiError:
    """The first problem pydantic found, as OpenAI words it; ``ctx["at"]`` leads deeper than the location does."""
    kind, context = str(problem["type"]), problem.get("ctx") or {}
    if kind == "json_invalid":
        return InvalidParameterError(f"The request body is not valid JSON: {context.get('error')}.", code="invalid_json")
    param = _param(problem["loc"][1:], str(context.get("at", "")))
    if param is None:
        if kind == "missing":
            return InvalidParameterError("The request body is empty.", code="invalid_json")
        hint = "The request body must be a JSON object, sent with 'Content-Type: application/json'."
        return InvalidParameterError(hint, code="invalid_type")
    match kind:
        case "missing":
            return InvalidParameterError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            return InvalidParameterError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
        case "unsupported_parameter":
            return InvalidParameterError(f"Unsupported parameter: '{param}'; {problem['msg']}.", param=param, code=kind)
        case _:
            code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
            return InvalidParameterError(f"Invalid value for '{param}': {problem['msg']}.", param=param, code=code)


def _param(location: Sequence[str | int], at: str) -> str | None:
    """('messages', 0, 'content') and '[1].type' -> 'messages[0].content[1].type'; None for the body as a whole.

    Steps in angle brackets are names of a union's members, which callers do not know.
    """
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if not str(step).startswith("<")]
    path = "".join(steps)
    return (path + at).removeprefix(".") or None
