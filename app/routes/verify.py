"""WebSocket /v1/speculative/sessions: edges draft, this server verifies. docs/protocol.md has what is said there."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, WebSocket
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from app.deps import OwnerDep, ServingDep, TakeRateDep
from app.remote import generating
from speculative.remote.verifier import Verifier

router = APIRouter(tags=["speculative"])


@router.websocket("/v1/speculative/sessions")
async def sessions(socket: WebSocket, serving: ServingDep, owner: OwnerDep, take_rate: TakeRateDep) -> None:
    """One connection of an edge."""

    async def receive() -> bytes | None:
        message: Message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        return message.get("bytes") or b""  # text is no frame, as nothing is

    assert serving.remote is not None  # else this route is not there
    await socket.accept()
    await Verifier(serving.remote, generating(serving, take_rate, owner), owner).run(receive, socket.send_bytes)
    with suppress(RuntimeError, WebSocketDisconnect):  # the peer has closed it already
        await socket.close()
