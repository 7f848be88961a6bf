"""The API's description (/openapi.json), as far as FastAPI does not get it right by itself."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send


class Described(FastAPI):
    """An application whose description says what it really answers: errors in OpenAI's shape, and no 422.

    It is made when it is first asked for, in a thread: that takes tenths of a second.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._one, self._described = anyio.CapacityLimiter(1), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As in FastAPI."""
        if scope["type"] == "http" and not self._described and scope["path"].endswith(str(self.openapi_url)):
            await anyio.to_thread.run_sync(self.openapi, limiter=self._one)
            self._described = True
        await super().__call__(scope, receive, send)

    def prepare(self) -> None:
        """Do what FastAPI leaves for each router's first request: streams that run then would notice it."""
        for route in self.routes:
            route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            schema = super().openapi()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(unused, None)
        return super().openapi()
