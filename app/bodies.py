"""Large request bodies are read off the event loop, and so that no other thread waits for the interpreter while they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # typeshed leaves it out
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # and this
from typing import Any, Final, get_type_hints

import anyio
import anyio.to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

SMALL: Final = 32 * 1024
"""Bytes of a body that is read on the event loop: a few milliseconds, whatever stands in it."""

SIMPLE: Final = 128 * 1024
"""Bytes of a body that `json.loads` reads, which is fast and lets nobody else run meanwhile."""

MOST_CONTAINERS: Final = 50_000
"""Lists and objects of a larger body. Garbage collections look at all of them at once."""


class BodyRoute(APIRoute):
    """A route whose parameter ``body`` is parsed and validated in a thread where it is large; one at a time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        handler = super().get_route_handler()
        kind: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return handler
        one = anyio.CapacityLimiter(1)

        async def handle(request: Request) -> Response:
            try:
                return await handler(_LargeBody(request, kind, one))
            except HTTPException as error:
                if isinstance(error.__cause__, RequestValidationError):  # FastAPI takes it for a fault of parsing
                    raise error.__cause__ from None
                raise

        return handle


class _LargeBody(Request):
    def __init__(self, request: Request, kind: type[BaseModel], one: anyio.CapacityLimiter) -> None:
        super().__init__(request.scope, request.receive)
        self._kind, self._one = kind, one

    async def json(self) -> Any:
        """What the body holds; of a large one what its route takes, which FastAPI need not validate again."""
        body = await self.body()
        if len(body) <= SMALL:
            return await super().json()
        return await anyio.to_thread.run_sync(self._validated, body, limiter=self._one)

    def _validated(self, body: bytes) -> BaseModel:
        given = parse(body)
        try:
            return self._kind.model_validate(given)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in problems]) from error


def parse(body: bytes) -> Any:
    """The value of a JSON text; raises JSONDecodeError, also for more than `MOST_CONTAINERS`, and UnicodeDecodeError.

    A large text is read by Python code, of which other threads interrupt any at any time; only single strings are read in one go.
    """
    return json.loads(body) if len(body) <= SIMPLE else json.loads(body, cls=_Interruptible)


class _Interruptible(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self._containers = 0
        self.parse_array, self.parse_object = self._counted(JSONArray), self._counted(JSONObject)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counting(text_and_place: tuple[str, int], *arguments: Any) -> Any:
            self._containers += 1
            if self._containers > MOST_CONTAINERS:
                raise json.JSONDecodeError(f"More than {MOST_CONTAINERS} lists and objects", *text_and_place)
            return parse(text_and_place, *arguments)

        return counting
