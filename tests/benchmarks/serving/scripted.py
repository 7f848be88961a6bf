"""A server that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def said(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}])


def told(tokens: int, *, prompt: int = 7, cached: int = 0) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return event(choices=[], usage=usage) + b"data: [DONE]\n\n"


async def three_words(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(OK + said("one") + said(" two") + said(" three") + said("", "stop") + told(3))


@dataclass
class Scripted:
    """Where it is, and what it was asked: heads as they came, bodies as objects."""

    url: str
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    readers: list[asyncio.StreamReader] = field(default_factory=list)


@asynccontextmanager
async def scripted(answer: Answer = three_words, tls: ssl.SSLContext | None = None) -> AsyncIterator[Scripted]:
    """On this machine, as 127.0.0.1; with ``tls`` as localhost."""
    server: Scripted

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(next(line for line in head.splitlines() if line.startswith("Content-Length")).split()[1])
            server.heads.append(head)
            server.readers.append(reader)
            server.bodies.append(json.loads(await reader.readexactly(length)))
            await answer(server.bodies[-1], writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):  # who asked has gone
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server = Scripted(f"https://localhost:{port}/v1" if tls else f"http://127.0.0.1:{port}/v1")
    try:
        yield server
    finally:
        listening.close()
