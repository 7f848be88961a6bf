"""The playground as a browser gets it; what it does there: tests/integration/test_playground.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from app.main import create_app
from app.settings import Settings
from tests.app.fakes import FakeEngine

WEB = Path(__file__).parents[2] / "app" / "web"
PAGE = "http://test/"
REFERENCES = re.compile(r"""(?:src|href)="([^"]*)"|from "([^"]*)"|url\(([^)]*)\)""")


def served(**settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(Settings(**settings), FakeEngine()), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def everything(client: httpx.AsyncClient, page: str = PAGE) -> dict[str, httpx.Response]:
    """The page and all that it loads, by address."""
    found: dict[str, httpx.Response] = {}
    wanted = [page]
    while wanted:
        url = wanted.pop()
        found[url] = await client.get(url)
        wanted += {urljoin(url, "".join(groups)) for groups in REFERENCES.findall(found[url].text)} - found.keys() - set(wanted)
    return found


async def test_the_page_and_all_its_parts_are_there_and_of_this_server(client: httpx.AsyncClient) -> None:
    found = await everything(client)
    assert {response.status_code for response in found.values()} == {200}
    assert {urlsplit(url).netloc for url in found} == {"test"}
    assert {urlsplit(url).path.rsplit("/", 1)[1] or "index.html" for url in found} == {path.name for path in WEB.iterdir()}
    types = {Path(urlsplit(url).path).suffix: response.headers["content-type"].split(";")[0] for url, response in found.items()}
    assert types == {"": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


async def test_browsers_run_nothing_but_its_own_files_and_ask_nobody_else(client: httpx.AsyncClient) -> None:
    for response in (await everything(client)).values():
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"


async def test_browsers_keep_its_parts_as_long_as_they_are_the_servers(client: httpx.AsyncClient) -> None:
    for url, response in (await everything(client)).items():
        assert response.headers["cache-control"] == "no-cache"
        again = await client.get(url, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"]
        head = await client.head(url)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", response.headers["etag"])


async def test_it_needs_no_key_and_gives_none_away() -> None:
    async with served(api_key="secret") as client:
        found = await everything(client)
        assert {response.status_code for response in found.values()} == {200}
        assert not any("secret" in response.text for response in found.values())
        assert (await client.get("/v1/models")).status_code == 401


async def test_hosts_that_are_not_answered_do_not_get_it() -> None:
    async with served(allowed_hosts="example.org") as client:
        assert (await client.get("/")).status_code == 403


async def test_it_can_be_switched_off() -> None:
    async with served(playground=False) as client:
        for path in ("/", "/playground/main.js"):
            for method in ("GET", "HEAD", "POST"):
                assert (await client.request(method, path)).status_code == 404


@pytest.mark.parametrize(
    "name", ["nothing.js", "%2e%2e", "%2e%2e%2fmain.py", "%2e%2e%5cmain.py", "%2fetc%2fpasswd", "a%00", ".", "x" * 300]
)
async def test_other_files_are_not_there(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/playground/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_it_works_under_a_path_that_a_proxy_strips() -> None:
    async with served(root_path="/llm") as client:

        async def strip(request: httpx.Request) -> None:
            request.url = request.url.copy_with(path=request.url.path.removeprefix("/llm"))

        client.event_hooks["request"].append(strip)
        found = await everything(client, "http://test/llm/")
        assert {response.status_code for response in found.values()} == {200}
        assert len(found) == len(list(WEB.iterdir()))
        assert all(urlsplit(url).path.startswith("/llm/") for url in found)


async def test_the_apis_description_has_nothing_of_it(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "/" not in paths and not any("playground" in path for path in paths)


def test_text_becomes_no_html() -> None:
    for script in WEB.glob("*.js"):
        source = script.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "localStorage"):
            assert way not in source, script.name
    page = (WEB / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src)", page)
