"""GET /: the playground, a page to try the model on. It holds no secrets; what it asks of the API needs a key like all else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)
# Not mounted: behind a proxy that strips --root-path, a mount looks for its files under the wrong names.
_files = StaticFiles(directory=Path(__file__).parents[1] / "web")

HEADERS = {
    "Cache-Control": "no-cache",  # kept by browsers, and asked for again by its ETag: never older than the server
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
async def page(http: Request) -> Response:
    """The page."""
    return await _file("index.html", http)


@router.get("/playground/{name}")
async def part(name: str, http: Request) -> Response:
    """A file that the page consists of."""
    return await _file(name, http)


async def _file(name: str, http: Request) -> Response:
    response = await _files.get_response(name, http.scope)
    response.headers.update(HEADERS)
    return response
