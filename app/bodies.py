"""Large request bodies are read off the event loop, and so that no other thread waits for the interpreter while they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Final, get_type_hints

import anyio
import anyio.to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from app.errors import InvalidParameterError

SMALL: Final = 32 * 1024
"""Bytes of a body that is read on the event loop: a few milliseconds, whatever stands in it."""

SIMPLE: Final = 128 * 1024
"""Bytes of a body that `json.loads` reads, which is fast and lets nobody else run meanwhile."""

FEW: Final = 20_000
"""Values of a larger body that is read in a fraction of a second: those with more do not hold it up."""

MOST_VALUES: Final = 1_000_000
"""Keys, values, lists and objects of a larger body, all together: seven prompts of 131,072 token ids have no more."""

MOST_KEYS: Final = 150_000
"""Keys of a larger body."""

MOST_CONTAINERS: Final = 50_000
"""Lists and objects of a larger body. Garbage collections look at all of them at once."""

_STRETCH: Final = 64 * 1024  # characters that are counted before another thread may have its turn


class BodyRoute(APIRoute):
    """A route whose parameter ``body`` is parsed and validated in a thread where it is large.

    One at a time, but those of few values do not wait for one of many.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        handler = super().get_route_handler()
        kind: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return handler
        few, many = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)

        async def handle(request: Request) -> Response:
            try:
                return await handler(_LargeBody(request, kind, few, many))
            except HTTPException as error:  # FastAPI takes them for a fault of parsing
                if isinstance(error.__cause__, RequestValidationError | InvalidParameterError):
                    raise error.__cause__ from None
                raise

        return handle


class _LargeBody(Request):
    def __init__(self, request: Request, kind: type[BaseModel], few: anyio.CapacityLimiter, many: anyio.CapacityLimiter) -> None:
        super().__init__(request.scope, request.receive)
        self._kind, self._few, self._many = kind, few, many

    async def json(self) -> Any:
        """What the body holds; of a large one what its route takes, which FastAPI need not validate again."""
        body = await self.body()
        if len(body) <= SMALL:
            return await super().json()
        if len(body) <= SIMPLE:
            return await anyio.to_thread.run_sync(self._validated, body, limiter=self._few)
        text, values = await anyio.to_thread.run_sync(counted, body, limiter=self._few)
        return await anyio.to_thread.run_sync(self._validated, text, limiter=self._few if values <= FEW else self._many)

    def _validated(self, body: bytes | str) -> BaseModel:
        given = parse(body)
        try:
            return self._kind.model_validate(given)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in problems]) from error


def counted(body: bytes) -> tuple[str, int]:
    """A body's text and how many keys, values, lists and objects it has, or how many at most; raises UnicodeDecodeError.

    Raises InvalidParameterError where they are too many, before anything is made of them.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    found = Counter({mark: text.count(mark) for mark in ",:[{"})
    if found.total() > FEW:  # perhaps only for what stands in its strings
        found = Counter()
        for outside in _outside_of_strings(text):
            found.update({mark: outside.count(mark) for mark in ",:[{"})
            if refused := _refused(found):
                raise InvalidParameterError(f"The request body has more than {refused}.")
    return text, found.total()


def _refused(found: Counter[str]) -> str | None:
    """What there is too much of."""
    if found["["] + found["{"] > MOST_CONTAINERS:
        return f"{MOST_CONTAINERS} lists and objects"
    if found[":"] > MOST_KEYS:
        return f"{MOST_KEYS} keys"
    return f"{MOST_VALUES} values" if found.total() > MOST_VALUES else None


def _outside_of_strings(text: str) -> Iterator[str]:
    """All of a JSON text but its strings, by stretches."""
    start, inside = 0, False
    while start < len(text):
        stretch = text[start : start + _STRETCH]
        if (len(stretch) - len(stretch.rstrip("\\"))) % 2:
            stretch = text[start : start + _STRETCH + 1]  # with the character that the last backslash escapes
        start += len(stretch)
        pieces = stretch.replace("\\\\", "").replace('\\"', "").split('"')
        yield "".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0


def parse(body: bytes | str) -> Any:
    """The value of a JSON text; raises JSONDecodeError and UnicodeDecodeError.

    A large text is read by Python code, of which other threads interrupt any at any time; only single strings are read in one go.
    """
    return json.loads(body) if len(body) <= SIMPLE else json.loads(body, cls=_Interruptible)


class _Interruptible(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.scan_once = py_make_scanner(self)
