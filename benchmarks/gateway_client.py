"""Streams requests from a process of its own: a job a line on standard input, what came of it a line on standard output.

It does as little as a client can, so that on few cores it takes little from the server: no JSON is parsed but the last chunk's.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any, Final

END: Final = b"0\r\n\r\n"
TAIL: Final = 4096


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> tuple[int, float]:
    """Tokens by the stream's own account, and its longest silence after its first bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    tail, silence, last = b"", 0.0, 0.0
    while not tail.endswith(END):
        data = await reader.read(1 << 18)
        if not data:
            raise ConnectionError("the server hung up")
        now = time.perf_counter()
        if not last and not data.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(data[:2000].decode(errors="replace"))
        silence, last = max(silence, now - last if last else 0.0), now
        tail = (tail + data)[-TAIL:]
    events = [line for line in tail.split(b"\n") if line.startswith(b"data: {")]
    return json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"], silence


async def _job(port: int, path: str, bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    waiting = [json.dumps(body).encode() for body in reversed(bodies)]
    tokens, silence = 0, 0.0
    began = time.perf_counter()

    async def worker() -> None:
        nonlocal tokens, silence
        reader, writer = await _connect(port)
        try:
            while waiting:
                more, silent = await _stream(reader, writer, path, waiting.pop())
                tokens, silence = tokens + more, max(silence, silent)
        finally:
            writer.close()

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(bodies)))))
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "longest_silence": silence}


async def _posts(port: int, path: str, posts: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask for one document after the other; an empty body is asked for with GET."""
    statuses = []
    for body in posts:
        reader, writer = await _connect(port)
        data = json.dumps(body).encode() if body else b""
        length = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if data else ""
        head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n{length}\r\n"
        writer.write(head.encode() + data)
        statuses.append(int((await reader.readline()).split()[1]))
        while await reader.read(1 << 18):
            pass
        writer.close()
    return {"statuses": statuses}


def main() -> None:
    """Take jobs until there are no more. Ctrl-C is for whoever gives them, and ends this by the end of its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        try:
            job = json.loads(line)
            result = asyncio.run(_posts(**job) if "posts" in job else _job(**job))
        except (OSError, ValueError, LookupError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
