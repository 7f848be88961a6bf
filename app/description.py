"""The API's description (/openapi.json), as far as FastAPI does not get it right by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI


class Described(FastAPI):
    """An application whose description says what it really answers: errors in OpenAI's shape, and no 422."""

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
