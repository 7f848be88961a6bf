"""The API's description (/openapi.json), as far as FastAPI does not get it right by itself."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse


class Described(FastAPI):
    """An application whose description says what it really answers: errors in OpenAI's shape, and no 422.

    It is made and written when it is first asked for, in a thread: that takes tenths of a second.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._one = anyio.CapacityLimiter(1)
        self._descriptions: dict[str, bytes] = {}

    def setup(self) -> None:
        """As in FastAPI, whose own route for the description comes second and is never reached."""
        assert self.openapi_url is not None
        self.add_route(self.openapi_url, self._describe, include_in_schema=False)
        super().setup()

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

    async def _describe(self, request: Request) -> Response:
        root = request.scope.get("root_path", "")
        if (written := self._descriptions.get(root)) is None:
            written = await anyio.to_thread.run_sync(self._write, root, limiter=self._one)
        return Response(written, media_type="application/json")

    def _write(self, root: str) -> bytes:
        if root not in self._descriptions:  # somebody else may have asked meanwhile
            document = self.openapi()
            if root:  # where a proxy strips a prefix, clients that read this are to ask with it
                document = {**document, "servers": [{"url": root}]}
            self._descriptions[root] = bytes(JSONResponse(document).body)
        return self._descriptions[root]
